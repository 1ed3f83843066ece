"""Folders that must not load, each with the one line that says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.config import ModelConfig
from hybridspec.models.hybrid import load_model

Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m").folder


@pytest.fixture(scope="module")
def good_sharded(tmp_path_factory: Any) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m", num_shards=2).folder


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


def turn_into_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


C, U = CheckpointError, UnsupportedError
TYPES = "'qwen3_5', 'qwen3_5_text', 'qwen3_5_moe', 'qwen3_5_moe_text', 'qwen3_next'"
L0 = "model.layers.0.linear_attn"
# What is broken: (how, error, text after the folder's path).
CONFIGS: dict[str, tuple[Break, type[Exception], str]] = {
    "no config": (
        remove("config.json"),
        C,
        ": expected a model folder with config.json, found none",
    ),
    "adapter": (
        turn_into_adapter,
        U,
        "/adapter_config.json: an unmerged adapter (LoRA); merge it into its base model first",
    ),
    "no json": (text("config.json", "{"), C, "/config.json: not readable as JSON (Expecting"),
    "bad utf-8": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xff") and None,
        C,
        "/config.json: not readable as JSON ('utf-8' codec",
    ),
    "list": (text("config.json", "[]"), C, "/config.json: expected a JSON object, found list"),
    "text_config": (
        fields(text_config=3),
        C,
        "/config.json: text_config: expected an object, found 3",
    ),
    "no model_type": (
        fields(model_type=None),
        C,
        f"/config.json: model_type: expected one of {TYPES}, found None",
    ),
    "llama": (
        fields(model_type="llama"),
        C,
        f"/config.json: model_type: expected one of {TYPES}, found 'llama'",
    ),
    "another hybrid": (
        fields(model_type="olmo_hybrid"),
        U,
        f"/config.json: model_type: expected one of {TYPES}, found 'olmo_hybrid'",
    ),
    "no hidden_size": (
        fields(hidden_size=None),
        C,
        "/config.json: hidden_size: expected a positive whole number, found nothing",
    ),
    "text for a number": (
        fields(vocab_size="97"),
        C,
        "/config.json: vocab_size: expected a positive whole number, found '97'",
    ),
    "boolean for a number": (
        fields(num_hidden_layers=True),
        C,
        "/config.json: num_hidden_layers: expected a positive whole number, found True",
    ),
    "zero heads": (
        fields(linear_num_key_heads=0),
        C,
        "/config.json: linear_num_key_heads: expected a positive whole number, found 0",
    ),
    "head ratio": (
        fields(linear_num_value_heads=3),
        C,
        "/config.json: linear_num_value_heads: expected a multiple of linear_num_key_heads (2), "
        "found 3",
    ),
    "kv head ratio": (
        fields(num_key_value_heads=3),
        C,
        "/config.json: num_attention_heads: expected a multiple of num_key_value_heads (3), found "
        "4",
    ),
    "eps": (
        fields(rms_norm_eps=-1),
        C,
        "/config.json: rms_norm_eps: expected a positive number, found -1",
    ),
    "act": (
        fields(hidden_act="gelu"),
        U,
        "/config.json: hidden_act: only 'silu' is supported, found 'gelu'",
    ),
    "bias": (
        fields(attention_bias=True),
        U,
        "/config.json: attention_bias: only False is supported, found True",
    ),
    "ungated attention": (
        fields(attn_output_gate=False),
        U,
        "/config.json: attn_output_gate: only True is supported, found False",
    ),
    "output gate": (
        fields(output_gate_type="sigmoid"),
        U,
        "/config.json: output_gate_type: only 'swish' is supported, found 'sigmoid'",
    ),
    "quantized": (
        fields(quantization_config={"quant_method": "fp8"}),
        U,
        "/config.json: quantization_config: quantized files are not supported",
    ),
    "two mtp layers": (
        fields(mtp_num_hidden_layers=2),
        U,
        "/config.json: mtp_num_hidden_layers: only 0 or 1 is supported, found 2",
    ),
    "own mtp embeddings": (
        fields(mtp_use_dedicated_embeddings=True),
        U,
        "/config.json: mtp_use_dedicated_embeddings: only False is supported, found True",
    ),
    "yarn": (
        fields(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        U,
        "/config.json: rope_parameters: rope_type: only 'default' is supported, found 'yarn'",
    ),
    "old yarn": (
        fields(rope_parameters=None, rope_scaling={"type": "yarn"}),
        U,
        "/config.json: rope_scaling: rope_type: only 'default' is supported, found 'yarn'",
    ),
    "rope list": (
        fields(rope_parameters=[1]),
        C,
        "/config.json: rope_parameters: expected an object, found [1]",
    ),
    "odd rotary": (
        fields(rope_parameters={"partial_rotary_factor": 0.1}),
        C,
        "/config.json: rope_parameters: partial_rotary_factor: expected an even share of head_dim "
        "(32), found 0.1",
    ),
    "layer count": (
        fields(num_hidden_layers=5),
        C,
        "/config.json: layer_types: expected a list of 5 names (num_hidden_layers), found [",
    ),
    "layer kind": (
        fields(layer_types=["linear_attention"] * 3 + ["sliding_attention"]),
        U,
        "/config.json: layer_types: only 'linear_attention', 'full_attention' are supported, found "
        "'sliding_attention'",
    ),
    "state dtype": (
        fields(mamba_ssm_dtype="int8"),
        C,
        "/config.json: mamba_ssm_dtype: expected one of 'float32', 'bfloat16', 'float16', found "
        "'int8'",
    ),
    "eos": (
        text("generation_config.json", '{"eos_token_id": ["a"]}'),
        C,
        "/generation_config.json: eos_token_id: expected numbers, found ['a']",
    ),
    "eos in the config": (
        both(remove("generation_config.json"), fields(eos_token_id="a")),
        C,
        "/config.json: eos_token_id: expected numbers, found 'a'",
    ),
    "generation config": (
        text("generation_config.json", "oops"),
        C,
        "/generation_config.json: not readable as JSON",
    ),
}
FILES: dict[str, tuple[Break, type[Exception], str]] = {
    "no weights": (
        remove("model.safetensors"),
        C,
        ": expected model.safetensors or model.safetensors.index.json, found neither",
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
    "misshapen": (
        tensors(lambda held: held.update({f"{L0}.A_log": torch.zeros(5)})),
        C,
        f"/model.safetensors: {L0}.A_log: expected shape [4], found [5]",
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
SHARDED: dict[str, tuple[Break, type[Exception], str]] = {
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
    "tensor not in its shard": (
        text(INDEX, json.dumps({"weight_map": {"absent.weight": SHARD}})),
        C,
        f"/{SHARD}: absent.weight: named by {INDEX}, not found",
    ),
}


def check(source: Path, folder: Path, case: tuple[Break, type[Exception], str]) -> None:
    """Break a copy of `source` and compare the error that loading it raises."""
    how, error_type, message = case
    shutil.copytree(source, folder)
    how(folder)
    with pytest.raises(error_type) as error:
        load_model(folder)
    assert str(error.value).startswith(f"{folder}{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_config(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", CONFIGS[name])


@pytest.mark.parametrize("name", FILES)
def test_broken_files(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", FILES[name])


@pytest.mark.parametrize("name", SHARDED)
def test_broken_shards(name: str, good_sharded: Path, tmp_path: Path) -> None:
    check(good_sharded, tmp_path / "m", SHARDED[name])


def test_teeth_the_unbroken_folders_load(good: Path, good_sharded: Path) -> None:
    assert load_model(good).config == load_model(good_sharded).config


def test_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: expected a model folder"):
        load_model(tmp_path / "absent")


def rewritten(good: Path, folder: Path, **changes: Any) -> ModelConfig:
    shutil.copytree(good, folder)
    fields(**changes)(folder)
    return ModelConfig.from_folder(folder)


def test_rope_fields_at_the_top_level_mean_the_same(good: Path, tmp_path: Path) -> None:
    nested = ModelConfig.from_folder(good)
    flat = rewritten(
        good,
        tmp_path / "m",
        rope_parameters=None,
        rope_theta=nested.rope_theta,
        partial_rotary_factor=0.25,
    )
    assert flat == nested
    assert (flat.rotary_dim, flat.rope_theta) == (8, 10_000.0)


def test_absent_layer_types_follow_the_interval(good: Path, tmp_path: Path) -> None:
    config = rewritten(
        good, tmp_path / "m", layer_types=None, num_hidden_layers=6, full_attention_interval=3
    )
    assert config.layer_kinds == ("gdn", "gdn", "attention") * 2
    geometry = config.pool_geometry(has_mtp=True, max_verify_tokens=16)
    assert (geometry.num_gdn_layers, geometry.num_kv_layers) == (4, 3)
    assert geometry.conv_ring_capacity == 32
    assert config.pool_geometry(has_mtp=False).conv_ring_capacity == 16


def test_end_tokens_come_from_the_generation_config_first(good: Path, tmp_path: Path) -> None:
    assert ModelConfig.from_folder(good).eos_token_ids == (96,)
    shutil.copytree(good, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.from_folder(tmp_path / "m").eos_token_ids == (3, 4)


def test_state_dtype_and_swish_are_read(good: Path, tmp_path: Path) -> None:
    config = rewritten(good, tmp_path / "m", mamba_ssm_dtype="bfloat16", output_gate_type="swish")
    assert config.state_dtype is torch.bfloat16
