"""Heads from elsewhere, drafting without one, made-up weights and hub ids on the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.ascii_tokenizer import END, write_ascii_tokenizer
from helpers.fake_engine import FakeLLM
from helpers.hub_server import serve_hub
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec.cli.loading import _shown_bytes

PROMPT = ("--prompt-token-ids", "1,2,3", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_tiny_checkpoint(tmp_path_factory.mktemp("base"), eos_token_id=END).folder
    write_ascii_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base without its head."""
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("tuned") / "m"))
    held = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_every_drafter_gives_the_same_tokens(cli: Callable, base: Path, tuned: Path) -> None:
    expected = json.loads(cli("generate", *PROMPT, "--model", str(base), "--json").out)
    assert (expected["drafter"], expected["mtp_from"]) == ("mtp", None)
    for flags, drafter, k in (
        ((), "lookup", 3),
        (("--drafter", "lookup", "--draft-tokens", "2"), "lookup", 2),
        (("--drafter", "none"), "none", 0),
        (("--mtp-from", str(base)), "mtp", 3),
    ):
        outcome = cli("generate", *PROMPT, "--model", str(tuned), "--json", *flags)
        document = json.loads(outcome.out)
        assert document["token_ids"] == expected["token_ids"]
        assert (document["drafter"], document["draft_tokens"]) == (drafter, k)
        assert document["mtp_from"] == (str(base) if "--mtp-from" in flags else None)


def test_panels_name_a_drafter_that_is_not_the_own_head(
    cli: Callable, base: Path, tuned: Path
) -> None:
    flags = ("generate", *PROMPT, "--model")
    assert "drafter" not in cli(*flags, str(base)).out
    assert "drafter: prompt lookup\n" in cli(*flags, str(tuned)).out
    assert f"drafter: MTP head of {base}\n" in cli(*flags, str(tuned), "--mtp-from", str(base)).out
    info = cli("info", "--model", str(tuned)).out
    assert "none (--mtp-from takes one from elsewhere)" in info and "prompt lookup" in info
    compared = cli("compare", "some text", "--model", str(tuned), "--max-tokens", "8")
    assert compared.status == 0
    assert "drafter: prompt lookup" in compared.out


def test_a_head_that_is_not_there(cli: Callable, tuned: Path) -> None:
    outcome = cli("generate", *PROMPT, "--model", str(tuned), "--drafter", "mtp")
    assert (outcome.status, outcome.out) == (2, "")
    assert "has none; take one from another checkpoint with mtp_from (--mtp-from)" in outcome.err
    outcome = cli("generate", *PROMPT, "--model", str(tuned), "--mtp-from", str(tuned))
    assert (outcome.status, outcome.out) == (2, "")
    assert "model.safetensors: expected a draft head (mtp.* tensors), found none" in outcome.err


@pytest.mark.parametrize(
    "words",
    [
        ("generate", *PROMPT),
        ("generate", *PROMPT, "--trace"),
        ("generate", *PROMPT, "--json"),
        ("info",),
        ("info", "--json"),
        ("compare", "text", "--max-tokens", "4"),
        ("compare", "text", "--max-tokens", "4", "--json"),
    ],
    ids=" ".join,
)
def test_made_up_weights_are_labelled(
    cli: Callable, base: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(base / name, tmp_path)
    outcome = cli(*words, "--model", str(tmp_path), "--dummy-weights")
    assert outcome.status == 0
    if "--json" in words:
        assert json.loads(outcome.out)["dummy_weights"] is True
    else:
        assert "DUMMY: random numbers" in " ".join(outcome.out.split())
    real = cli(*words, "--model", str(base))
    assert "DUMMY" not in real.out and '"dummy_weights": true' not in real.out


FORCED = ("--acceptance", "0.8,0.5", "--acceptance-spread", "0.1", "--max-tokens", "4")


@pytest.mark.parametrize(
    "words",
    [
        ("generate", *PROMPT, *FORCED),
        ("generate", *PROMPT, "--trace", *FORCED),
        ("generate", *PROMPT, "--quiet", *FORCED),
        ("generate", *PROMPT, "--json", *FORCED),
        ("info", *FORCED[:4]),
        ("info", "--json", *FORCED[:4]),
        ("compare", "text", *FORCED),
        ("compare", "text", "--json", *FORCED),
    ],
    ids=" ".join,
)
def test_acceptance_by_force_is_labelled(
    cli: Callable, base: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...]
) -> None:
    outcome = cli(*words, "--model", str(base))
    assert outcome.status == 0  # in compare too, where tokens are not the plain ones
    assert "synthetic: drafts are accepted by force" in caplog.text
    if "--json" in words:
        found = json.loads(outcome.out)
        assert (found["synthetic_acceptance"], found["acceptance_spread"]) == ([0.8, 0.5], 0.1)
        assert found.get("identical") is None
    elif "--quiet" not in words:
        label = "SYNTHETIC: accepted by force (0.8, 0.5, spread 0.1)"
        assert label in " ".join(outcome.out.split())
    assert "tokens identical" not in outcome.out


def test_the_panel_of_a_terminal_says_it_too(cli: Callable, fake: FakeLLM) -> None:
    fake.has_dummy_weights = True
    assert "weights: DUMMY" in cli("generate", "x").out
    fake.has_dummy_weights = False
    assert "DUMMY" not in cli("generate", "x").out


def test_experts_are_described(cli: Callable, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, family="qwen3_next", mlp_only_layers=[1])
    info = " ".join(cli("info", "--model", str(tmp_path)).out.split())
    assert "48, 2 of 6 experts of 24 and 32 shared; 80 without experts (layers: 1)" in info
    moe = json.loads(cli("info", "--model", str(tmp_path), "--json").out)["moe"]
    assert (moe["num_experts"], moe["experts_per_token"], moe["dense_layers"]) == (6, 2, [1])


def test_each_percent_is_shown_once() -> None:
    shown: list[str] = []
    on_progress = _shown_bytes(shown.append)
    for done in range(0, 2048, 3):
        on_progress(done, 2048)
    on_progress(2048, 2048)
    assert shown[0] == "0 % of 2.0 KiB" and shown[-1] == "100 % of 2.0 KiB"
    assert len(shown) == len(set(shown)) == 101


def test_a_model_from_the_hub(tuned: Path, base: Path, tmp_path: Path) -> None:
    """In a process of its own, which reads the address of the stand-in when it starts."""
    words = ("generate", *PROMPT, "--model", "someone/tuned", "--mtp-from", "someone/base")
    with serve_hub({"someone/tuned": tuned, "someone/base": base}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "hybridspec", *words, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["drafter"] == "mtp" and len(document["token_ids"]) == 12
        assert "models--someone--tuned" in document["model"]
        assert hub.fetched.count("model.safetensors") == 2
        failed = subprocess.run(
            [sys.executable, "-m", "hybridspec", "info", "--model", "someone/absent"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        "hybridspec: error: someone/absent: no such path here, and from the Hugging Face hub: no "
        "such repository, or a private one\n"
    )
