"""Ways to break a copy of a checkpoint, and the error that loading it must raise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridspec.models.hybrid import load_model

__all__ = ["Break", "Case", "both", "check", "cut_in_half", "fields", "remove", "tensors", "text"]

Break = Callable[[Path], None]
Case = tuple[Break, type[Exception], str]  # how, the error, its text after the folder's path


def fields(**changes: Any) -> Break:
    """Change fields of config.json; None removes one."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def text(name: str, content: str) -> Break:
    """Replace a whole file."""
    return lambda folder: (folder / name).write_text(content) and None


def remove(name: str) -> Break:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def both(first: Break, second: Break) -> Break:
    """Do one thing after the other."""
    return lambda folder: first(folder) or second(folder)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Edit the tensors of model.safetensors."""

    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        edit(held)
        save_file(held, folder / "model.safetensors")

    return change


def cut_in_half(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def check(source: Path, folder: Path, case: Case) -> None:
    """Break a copy of `source` and compare the error that loading it raises."""
    how, error_type, message = case
    shutil.copytree(source, folder)
    how(folder)
    with pytest.raises(error_type) as error:
        load_model(folder)
    assert str(error.value).startswith(f"{folder}{message}")
    assert str(error.value).isprintable() and len(str(error.value)) <= 1000
