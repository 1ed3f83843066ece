"""Models and prompts that do not do end as one line that says why, with exit status 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_checkpoints import build_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint without a tokenizer, with a context of 512."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny")).folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | fields
    file.write_text(json.dumps(config), encoding="utf-8")


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ', encoding="utf-8")


def wrong_type(folder: Path) -> None:
    edit_config(folder, model_type="llama")


def another_hybrid(folder: Path) -> None:
    edit_config(folder, model_type="olmo_hybrid")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def cut_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])


def weights_that_are_text(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")


def another_size(folder: Path) -> None:
    edit_config(folder, intermediate_size=96)


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (break_json, "config.json"),
        (wrong_type, "model_type"),
        (another_hybrid, "model_type"),
        (no_config, "config.json"),
        (no_weights, "safetensors"),
        (cut_weights, "safetensors"),
        (weights_that_are_text, "safetensors"),
        (another_size, "96"),
        (broken_tokenizer, "tokenizer.json"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("command", ["generate", "info"])
def test_unsuitable_checkpoints(
    cli: Callable, folder: Path, spoil: Callable[[Path], None], said: str, command: str
) -> None:
    spoil(folder)
    prompt = ("--prompt-token-ids", "1") if command == "generate" else ()
    assert_one_line(cli(command, *prompt, "--model", str(folder)), said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("",), "empty"),
        (("--prompt-token-ids", ""), "--prompt-token-ids"),
        (("--prompt-token-ids", "1,x"), "1,x"),
        (("--prompt-token-ids", "97"), "97"),
        (("--prompt-token-ids", "-1"), "-1"),
        (("--prompt-token-ids", ",".join(["1"] * 512)), "512"),
        (("--prompt-token-ids", "1,1", "--max-model-len", "2"), "2"),
        (("--prompt-token-ids", "1", "--max-model-len", "513"), "513"),
        (("--prompt-token-ids", "1", "--device", "cuda:99"), "cuda:99"),
        (("--prompt-token-ids", "1", "--stop", "x"), "stop"),
        (("--prompt-token-ids", "1", "--stop-token-id", "97"), "97"),
        (("--prompt-token-ids", "1", "--prompt-file", "f"), "--prompt-file"),
        (("--prompt-file", "/no/such/file"), "/no/such/file: No such file"),
        (("text",), "tokenizer"),
        ((), "PROMPT"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_unsuitable_prompts(cli: Callable, tiny: Path, words: tuple[str, ...], said: str) -> None:
    assert_one_line(cli("generate", *words, "--model", str(tiny)), said)


def test_files_that_are_no_text(cli: Callable, tiny: Path, tmp_path: Path) -> None:
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe")
    empty.write_bytes(b"")
    for file, said in ((binary, "UTF-8"), (empty, "empty"), (tmp_path, "directory")):
        assert_one_line(cli("generate", "--prompt-file", str(file), "--model", str(tiny)), said)


def test_folders_that_are_none(cli: Callable, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    for model in (tmp_path / "missing", file, tmp_path):
        assert_one_line(cli("info", "--model", str(model)), str(model))


@pytest.mark.parametrize("flags", [(), ("--json",), ("--trace",)], ids=str)
def test_weights_that_are_no_numbers(cli: Callable, folder: Path, flags: tuple[str, ...]) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.input_layernorm.weight"))
    save_file(tensors | {name: tensors[name] * torch.nan}, file, {"format": "pt"})
    for command in ("generate", "compare"):
        words = ("--prompt-token-ids", "1,2", "--model", str(folder))
        outcome = cli(command, *words, *(flags if command == "generate" else ()))
        assert outcome.status == 2
        assert outcome.err.startswith("hybridspec: error: nothing can be chosen as new token 1: ")
        assert outcome.err.count("\n") == 1


def test_the_untouched_checkpoint_works(cli: Callable, tiny: Path) -> None:
    flags = ("--prompt-token-ids", "1,2,3", "--model", str(tiny), "--max-tokens", "12")
    outcome = cli("generate", *flags, "--ignore-eos", "--json")
    document = json.loads(outcome.out)
    assert (outcome.status, document["text"]) == (0, "")
    assert len(document["token_ids"]) == 12
    assert sum(document["committed_per_step"]) == 11


def assert_one_line(outcome: Any, said: str) -> None:
    """Check that a run failed as a user's mistake does."""
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("hybridspec: error: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err
