"""Weight files that must not load, each with the one line that says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.breaking import Case, both, check, cut_in_half, fields, remove, tensors, text
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.chat import ChatTemplates
from hybridspec.models.hybrid import load_model
from hybridspec.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m").folder


@pytest.fixture(scope="module")
def good_sharded(tmp_path_factory: Any) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m", num_shards=2).folder


C, U = CheckpointError, UnsupportedError
L0 = "model.layers.0.linear_attn"
FILES: dict[str, Case] = {
    "no weights": (
        remove("model.safetensors"),
        C,
        ": expected model.safetensors or model.safetensors.index.json, found neither",
    ),
    "weights of torch": (
        both(remove("model.safetensors"), text("pytorch_model.bin", "x")),
        C,
        ": expected model.safetensors or model.safetensors.index.json, found neither; "
        "pytorch_model.bin cannot be read",
    ),
    "cut": (cut_in_half, C, "/model.safetensors: not readable as safetensors ("),
    "empty": (text("model.safetensors", ""), C, "/model.safetensors: not readable as safetensors"),
    "missing": (
        tensors(lambda held: held.pop(f"{L0}.in_proj_z.weight")),
        C,
        f"/model.safetensors: {L0}.in_proj_z.weight: expected shape [64, 48], found no tensor",
    ),
    "missing head": (
        tensors(lambda held: held.pop("lm_head.weight")),
        C,
        "/model.safetensors: lm_head.weight: expected shape [97, 48], found no tensor",
    ),
    "missing in mtp": (
        tensors(lambda held: held.pop("mtp.fc.weight")),
        C,
        "/model.safetensors: mtp.fc.weight: expected shape [48, 96], found no tensor",
    ),
    "names of a wrapper": (
        tensors(
            lambda held: [
                held.update({f"base_model.model.{name}": held.pop(name)}) for name in list(held)
            ]
        ),
        C,
        "/model.safetensors: model.embed_tokens.weight: expected a tensor, found no tensor "
        "whose name starts with model., but base_model.model.lm_head.weight",
    ),
    "escape sequences in a name": (
        tensors(lambda held: held.update({"model.\x1b[31m\x07\n": torch.zeros(3)})),
        C,
        "/model.safetensors: model.\\x1b[31m\\x07\\n: expected no such tensor by config.json, "
        "found shape [3]",
    ),
    "misshapen": (
        tensors(lambda held: held.update({f"{L0}.A_log": torch.zeros(5)})),
        C,
        f"/model.safetensors: {L0}.A_log: expected shape [4], found [5]",
    ),
    "bias": (
        tensors(
            lambda held: held.update(
                {"model.layers.3.self_attn.q_proj.bias": torch.zeros(256)},
            )
        ),
        C,
        "/model.safetensors: model.layers.3.self_attn.q_proj.bias: expected no such tensor by "
        "config.json, found shape [256]",
    ),
    "unmerged lora": (
        tensors(
            lambda held: held.update(
                {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 48)},
            )
        ),
        U,
        "/model.safetensors: model.layers.0.mlp.up_proj.lora_A.weight: an unmerged adapter (LoRA); "
        "merge it into its base model first",
    ),
    "two layers of mtp": (
        tensors(lambda held: held.update({"mtp.layers.1.x": torch.zeros(3)})),
        C,
        "/model.safetensors: mtp.layers.1.x: expected no such tensor by config.json, found shape "
        "[3]",
    ),
    "scales of quantized weights": (
        tensors(
            lambda held: held.update(
                {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1, 1)}
            )
        ),
        C,
        "/model.safetensors: model.layers.0.mlp.up_proj.weight_scale_inv: expected no such tensor",
    ),
    "config of another model": (
        fields(intermediate_size=96),
        C,
        "/model.safetensors: model.layers.0.mlp.gate_proj.weight: expected shape [96, 48], found "
        "[80, 48]",
    ),
    "extra": (
        tensors(lambda held: held.update({"model.layers.4.x": torch.zeros(2, 3)})),
        C,
        "/model.safetensors: model.layers.4.x: expected no such tensor by config.json, found shape "
        "[2, 3]",
    ),
    "extra layers": (
        fields(num_hidden_layers=3, layer_types=["linear_attention"] * 3),
        C,
        "/model.safetensors: model.layers.3.input_layernorm.weight (and 10 more): expected no such "
        "tensor by config.json, found shape [48]",
    ),
    "fp8": (
        tensors(
            lambda held: held.update(
                {"model.norm.weight": held["model.norm.weight"].to(torch.float8_e4m3fn)}
            )
        ),
        U,
        "/model.safetensors: model.norm.weight: expected BF16, F16, F32, F64, found F8_E4M3; "
        "quantized files are not supported",
    ),
}
INDEX = "model.safetensors.index.json"
SHARD = "mtp.safetensors"
SHARDED: dict[str, Case] = {
    "no shard": (remove(SHARD), C, f"/{INDEX}: names the file {SHARD}, which does not exist"),
    "index is no json": (
        text(INDEX, "{"),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map",
    ),
    "index is a list": (
        text(INDEX, "[]"),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map",
    ),
    "index too deep": (
        text(INDEX, "[" * 100_000),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map",
    ),
    "index without map": (
        text(INDEX, "{}"),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map",
    ),
    "map to numbers": (
        text(INDEX, '{"weight_map": {"a": 1}}'),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map",
    ),
    "a file beside the folder": (
        text(INDEX, '{"weight_map": {"a": "../outside.safetensors"}}'),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map of names to files (ValueError: "
        "'../outside.safetensors' is no file of the folder)",
    ),
    "a file somewhere else": (
        text(INDEX, '{"weight_map": {"a": "/outside.safetensors"}}'),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map of names to files (ValueError: "
        "'/outside.safetensors' is no file of the folder)",
    ),
    "a name that no file can have": (
        text(INDEX, json.dumps({"weight_map": {"a": "x" * 5000}})),
        C,
        f"/{INDEX}: names the file xxx",
    ),
    "a file with a zero byte": (
        text(INDEX, '{"weight_map": {"a": "\\u0000.safetensors"}}'),
        C,
        f"/{INDEX}: expected a JSON object with a weight_map of names to files (ValueError: "
        "'\\x00.safetensors' is no file of the folder)",
    ),
    "tensor not in its shard": (
        text(INDEX, json.dumps({"weight_map": {"absent.weight": SHARD}})),
        C,
        f"/{SHARD}: absent.weight: named by {INDEX}, not found",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_broken_files(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", FILES[name])


@pytest.mark.parametrize("name", SHARDED)
def test_broken_shards(name: str, good_sharded: Path, tmp_path: Path) -> None:
    check(good_sharded, tmp_path / "m", SHARDED[name])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", load_model),
        ("generation_config.json", load_model),
        (INDEX, load_model),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", ChatTemplates.from_folder),
        ("chat_template.jinja", ChatTemplates.from_folder),
    ],
)
def test_what_has_no_end_is_not_read(
    name: str, read: Callable[[Path], object], good: Path, tmp_path: Path
) -> None:
    """A pipe that nobody writes to, a device without end, a size that is no text's."""
    folder = tmp_path / "m"
    shutil.copytree(good, folder)
    file = folder / name
    for make, message in (
        (lambda: os.mkfifo(file), "a pipe or a device"),
        (lambda: file.symlink_to("/dev/zero"), "a pipe or a device"),
        (lambda: file.touch() or os.truncate(file, 1 << 40), "1099511627776 bytes"),
    ):
        file.unlink(missing_ok=True)
        make()
        with pytest.raises(CheckpointError, match=message) as error:
            read(folder)
        assert str(file) in str(error.value) and str(error.value).isprintable()


def test_teeth_the_unbroken_folders_load(good: Path, good_sharded: Path) -> None:
    assert load_model(good).config == load_model(good_sharded).config
