"""Folders broken at random: each loads, or is refused in one line with one of two errors."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.hybrid import load_model

INDEX = "model.safetensors.index.json"
VALUES: list[Any] = [
    None, -1, 0, 1, 7, 2**31, 2**63, 10**400, 0.0, 1.5, float("nan"), float("inf"), 1e-30, "", "1",
    "x" * 1000, "\x1b[31m\x07\n", [], {}, True, False, [1], [None], {"a": 1}, "float32", [[[]]],
]  # fmt: skip
NAMES: list[Any] = [
    "", ".", "..", "a/b", "../x", "/etc/passwd", "\x1b.safetensors", "x" * 300, "\0", 3, None, [],
    "config.json", "~", "model.safetensors", "C:\\x",
]  # fmt: skip
DTYPES = [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.float64]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, options in (
        ("dense", {}),
        ("shards", {"num_shards": 2, "layout": "composite"}),
        ("experts", {"family": "qwen3_next"}),
    ):
        build_tiny_checkpoint(folder / name, **options)
    return sorted(folder.iterdir())


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything in a JSON document."""
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [found for key, item in items for found in ((*path, key), *places(item, (*path, key)))]


def change_config(rng: random.Random, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice(places(config))
        parent = config
        for key in path:
            parent = parent[key]
        if rng.random() < 0.2:
            del parent[last]
        elif last != "max_position_embeddings":
            parent[last] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def change_index(rng: random.Random, folder: Path) -> None:
    file = folder / INDEX
    if not file.exists():
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "weights.safetensors")
        file.write_text(json.dumps({"weight_map": dict.fromkeys(names, "weights.safetensors")}))
    index = json.loads(file.read_text())
    index["weight_map"][rng.choice([*index["weight_map"], "\x1b"])] = rng.choice(NAMES)
    file.write_text(json.dumps(index))


def change_tensor(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    held = load_file(file)
    name = rng.choice(sorted(held))
    tensor = held.pop(name)
    changes: list[Callable[[], dict[str, torch.Tensor]]] = [
        lambda: {},
        lambda: {name: tensor.to(rng.choice(DTYPES))},
        lambda: {name: tensor.reshape(-1)},
        lambda: {name: tensor[:0].contiguous()},
        lambda: {name: tensor[..., :-1].contiguous()},
        lambda: {name: torch.tensor(1.0)},
        lambda: {rng.choice(("module.", "\x1b[31m", "x" * 3000)) + name: tensor},
        lambda: {name: tensor, f"{name}\x07\n": torch.zeros(2)},
    ]
    save_file(held | rng.choice(changes)(), file, metadata={"format": "pt"})


def change_bytes(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    how = rng.randrange(4)
    if how == 0:
        content = content[: rng.randrange(len(content))]
    elif how == 1:
        for _ in range(10):
            content[rng.randrange(min(len(content), 2000))] = rng.randrange(256)
    elif how == 2:
        content[:8] = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
    else:
        content = bytearray(b" " * rng.choice((0, 1, 10**5)))
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("change", [change_config, change_index, change_tensor, change_bytes])
def test_broken_at_random(
    change: Callable[[random.Random, Path], None], sources: list[Path], tmp_path: Path
) -> None:
    outcomes = []
    for seed in range(30):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(rng.choice(sources), folder)
        change(rng, folder)
        try:
            load_model(folder)
            outcomes.append("loaded")
        except (CheckpointError, UnsupportedError) as error:
            assert str(error).isprintable() and len(str(error)) <= 1000
            outcomes.append("refused")
    assert outcomes.count("refused") >= 10  # teeth
