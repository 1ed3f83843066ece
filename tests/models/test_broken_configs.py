"""Descriptions that must not load, each with the one line that says why; and some that must."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.breaking import Case, both, check, fields, remove, text
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.config import ModelConfig
from hybridspec.models.hybrid import load_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m").folder


def turn_into_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


C, U = CheckpointError, UnsupportedError
TYPES = "'qwen3_5', 'qwen3_5_text', 'qwen3_5_moe', 'qwen3_5_moe_text', 'qwen3_next'"
CONFIGS: dict[str, Case] = {
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
    "adapter beside a model": (
        text("adapter_config.json", "{}"),
        U,
        "/adapter_config.json: an unmerged adapter (LoRA); merge it into its base model first",
    ),
    "quantized by another tool": (
        text("hf_quant_config.json", "{}"),
        U,
        "/hf_quant_config.json: quantized files are not supported",
    ),
    "no json": (text("config.json", "{"), C, "/config.json: not readable as JSON (Expecting"),
    "bad utf-8": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xff") and None,
        C,
        "/config.json: not readable as JSON ('utf-8' codec",
    ),
    "too deep": (
        text("config.json", "[" * 100_000),
        C,
        "/config.json: not readable as JSON (",
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
    "no text for model_type": (
        fields(model_type=["qwen3_5"]),
        C,
        f"/config.json: model_type: expected one of {TYPES}, found ['qwen3_5']",
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
    "a size beyond all models": (
        fields(vocab_size=2**63),
        C,
        "/config.json: vocab_size: expected at most 16777216, found 9223372036854775808",
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
    "infinite eps": (
        fields(rms_norm_eps=float("inf")),
        C,
        "/config.json: rms_norm_eps: expected a positive number, found inf",
    ),
    "theta beyond floats": (
        fields(rope_parameters={"rope_theta": 10**400}),
        C,
        "/config.json: rope_parameters: rope_theta: expected a positive number, found 1000",
    ),
    "text for a flag": (
        fields(tie_word_embeddings="false"),
        C,
        "/config.json: tie_word_embeddings: expected true or false, found 'false'",
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
    "bias of the mlp": (
        fields(mlp_bias=True),
        U,
        "/config.json: mlp_bias: only False is supported, found True",
    ),
    "sliding window": (
        fields(use_sliding_window=True),
        U,
        "/config.json: use_sliding_window: only False is supported, found True",
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
    "three mtp layers by another name": (
        fields(num_nextn_predict_layers=3),
        U,
        "/config.json: num_nextn_predict_layers: only 0 or 1 is supported, found 3",
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
    "yarn beside rope_parameters": (
        fields(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        U,
        "/config.json: rope_scaling: rope_type: only 'default' is supported, found 'yarn'",
    ),
    "two rope types": (
        fields(rope_parameters={"rope_type": "default", "type": "linear", "factor": 2.0}),
        U,
        "/config.json: rope_parameters: rope_type: only 'default' is supported, found 'linear'",
    ),
    "rope for each kind of layer": (
        fields(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5.0}}),
        U,
        "/config.json: rope_parameters: only rope_type, type, rope_theta, partial_rotary_factor, "
        "mrope_section, mrope_interleaved are supported, found 'full_attention'",
    ),
    "a factor without a type": (
        fields(rope_scaling={"factor": 4.0}),
        U,
        "/config.json: rope_scaling: only rope_type, type, rope_theta,",
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
    "a value of many words": (
        fields(hidden_act=["silu"] * 1000),
        U,
        "/config.json: hidden_act: only 'silu' is supported, found ['silu', 'silu'",
    ),
    "escape sequences": (
        fields(model_type="\x1b[31m"),
        C,
        f"/config.json: model_type: expected one of {TYPES}, found '\\x1b[31m'",
    ),
    "a link that leads nowhere": (
        lambda folder: (
            (folder / "generation_config.json").unlink()
            or (folder / "generation_config.json").symlink_to("lost")
        ),
        C,
        "/generation_config.json: not readable as JSON ([Errno 2] No such file",
    ),
    "a folder in place of a file": (
        both(remove("config.json"), lambda folder: (folder / "config.json").mkdir()),
        C,
        "/config.json: not readable as JSON ([Errno 21] Is a directory",
    ),
    "generation config": (
        text("generation_config.json", "oops"),
        C,
        "/generation_config.json: not readable as JSON",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_config(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", CONFIGS[name])


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


def test_null_rope_fields_are_absent_ones(good: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "type": None, "factor": None, "rope_theta": 10_000.0}
    mrope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = rewritten(good, tmp_path / "m", rope_parameters=rope | mrope, rope_scaling={})
    assert config == ModelConfig.from_folder(good)


def test_absent_layer_types_follow_the_interval(good: Path, tmp_path: Path) -> None:
    config = rewritten(
        good, tmp_path / "m", layer_types=None, num_hidden_layers=6, full_attention_interval=3
    )
    assert config.layer_kinds == ("gdn", "gdn", "attention") * 2


def test_end_tokens_come_from_the_generation_config_first(good: Path, tmp_path: Path) -> None:
    assert ModelConfig.from_folder(good).eos_token_ids == (96,)
    shutil.copytree(good, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.from_folder(tmp_path / "m").eos_token_ids == (3, 4)


def test_state_dtype_and_swish_are_read(good: Path, tmp_path: Path) -> None:
    config = rewritten(good, tmp_path / "m", mamba_ssm_dtype="bfloat16", output_gate_type="swish")
    assert config.state_dtype is torch.bfloat16
