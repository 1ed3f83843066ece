"""`hybridspec serve`: what is told before anything is served."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridspec.cli.arguments import engine_options, parse
from hybridspec.cli.usage import UsageError
from hybridspec.config import EngineConfig


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_help_needs_nothing_of_the_extra() -> None:
    gone = "import sys\nfor name in ('starlette', 'uvicorn', 'pydantic', 'prometheus_client'):\n"
    gone += "    sys.modules[name] = None\n"
    main = "from hybridspec.cli import main\nsys.exit(main(['serve', *{words}]))\n"
    shown = in_a_process(gone + main.format(words=["--help"]))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--api-key-file" in shown.stdout and "hybridspec[serve]" in shown.stdout
    refused = in_a_process(gone + main.format(words=[]))
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("is not installed: pip install 'hybridspec[serve]'\n")


def test_replicas_need_their_extra() -> None:
    code = "import sys\nsys.modules['ray'] = None\nfrom hybridspec.cli import main\n"
    refused = in_a_process(code + "sys.exit(main(['serve', '--replicas', '2']))\n")
    assert refused.returncode == 2
    assert refused.stderr == (
        "hybridspec: error: ray is not installed: pip install 'hybridspec[cluster]'\n"
    )


def test_the_model_may_be_a_word() -> None:
    """As in `vllm serve MODEL --gpu-memory-utilization F`."""
    words = ["serve", "some/model", "--port", "0", "--gpu-memory-utilization", "0.5"]
    arguments = parse(words)
    assert (arguments.model, arguments.memory_fraction) == ("some/model", 0.5)
    assert parse(["info", "some/model"]).model == "some/model"
    assert parse(["info"]).model is None
    with pytest.raises(UsageError, match="MODEL and --model: give one of them"):
        parse(["serve", "some/model", "--model", "other/model"])


def test_every_option_of_an_engine_has_a_flag() -> None:
    flags = vars(parse(["serve"]))
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields - flags.keys() == {"seed"}  # it is a request's
    words = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--enforce-eager"]
    options = engine_options(parse(["serve", *words]))
    assert options["max_num_seqs"] == 3 and options["max_num_batched_tokens"] == 64
    assert options["enforce_eager"] and options["draft_vocab"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port -1", "--port: expected 0 to 65535, got -1"),
        ("--port 70000", "--port: expected 0 to 65535, got 70000"),
        ("--host nowhere.invalid", "--host, --port: cannot listen on nowhere.invalid"),
        ("--max-requests 0", "--max-requests: expected 1 to 1000000, got 0"),
        ("--replicas 0", "--replicas: expected 1 to 1024, got 0"),
        ("--replicas 2 --device cuda:1", "--replicas: each takes a GPU of its own; give --device"),
        ("--drain nan", "--drain: expected 0 to 1000000, got nan"),
        ("--api-key-file /no/such/keys", "/no/such/keys: No such file or directory"),
        ("--draft-tokens 9", "draft_tokens: expected an integer in 0..7, got 9"),
    ],
)
def test_wrong_calls(cli: Callable, words: str, message: str) -> None:
    outcome = cli("serve", *words.split())
    assert outcome.status == 2
    assert outcome.err.startswith(f"hybridspec: error: {message}")
    assert outcome.err.count("\n") == 1


def test_a_file_without_keys_opens_no_door(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(" \n\n")
    outcome = cli("serve", "--api-key-file", str(tmp_path / "keys"))
    assert (outcome.status, "holds no key" in outcome.err) == (2, True)


def test_a_port_that_is_taken(cli: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = cli("serve", "--port", str(taken.getsockname()[1]))
    assert (outcome.status, "the port is in use" in outcome.err) == (2, True)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    words = ["serve", "--port", "0", "--model", "/no/such/folder"]
    code = f"import sys\nfrom hybridspec.cli import main\nsys.exit(main({words}))\n"
    ended = in_a_process(code)
    assert ended.returncode == 2
    listening, error = ended.stderr.splitlines()
    assert listening.startswith("listening on http://127.0.0.1:")
    assert error.startswith("hybridspec: error: /no/such/folder: expected a model folder")
