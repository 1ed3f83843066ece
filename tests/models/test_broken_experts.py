"""Checkpoints with experts that must not load, each with the one line that says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.breaking import Case, check, fields, tensors
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.hybrid import load_model


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    """A Qwen3-Next checkpoint, an expert's matrices being tensors of their own."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("good") / "m", family="qwen3_next").folder


C, U = CheckpointError, UnsupportedError
L0 = "model.layers.0.linear_attn"
CONFIGS: dict[str, Case] = {
    "no experts": (
        fields(num_experts=None),
        C,
        "/config.json: num_experts: expected a positive whole number, found nothing",
    ),
    "more chosen than there are": (
        fields(num_experts_per_tok=7),
        C,
        "/config.json: num_experts_per_tok: expected at most num_experts (6), found 7",
    ),
    "no size of the experts": (
        fields(moe_intermediate_size=None),
        C,
        "/config.json: moe_intermediate_size: expected a positive whole number, found nothing",
    ),
    "no size of the shared expert": (
        fields(shared_expert_intermediate_size=0),
        C,
        "/config.json: shared_expert_intermediate_size: expected a positive whole number, found 0",
    ),
    "norm_topk_prob": (
        fields(norm_topk_prob="yes"),
        C,
        "/config.json: norm_topk_prob: expected true or false, found 'yes'",
    ),
    "not normalized": (
        fields(model_type="qwen3_5_moe_text", norm_topk_prob=False),
        U,
        "/config.json: norm_topk_prob: only True is supported in this family, found False",
    ),
    "layers without experts": (
        fields(mlp_only_layers=["0"]),
        C,
        "/config.json: mlp_only_layers: expected a list of layer numbers, found ['0']",
    ),
    "experts every zero layers": (
        fields(decoder_sparse_step=0),
        C,
        "/config.json: decoder_sparse_step: expected a positive whole number, found 0",
    ),
}
EXPERTS = "model.layers.0.mlp.experts"
FILES: dict[str, Case] = {
    "a plain layer that has experts": (
        fields(mlp_only_layers=[0]),
        C,
        "/model.safetensors: model.layers.0.mlp.gate_proj.weight: expected shape [80, 48], found "
        "no tensor",
    ),
    "one expert less": (
        tensors(lambda held: held.pop(f"{EXPERTS}.5.up_proj.weight")),
        C,
        f"/model.safetensors: {EXPERTS}.5.up_proj.weight: expected shape [24, 48], found no tensor",
    ),
    "one expert more": (
        tensors(lambda held: held.update({f"{EXPERTS}.6.up_proj.weight": torch.zeros(24, 48)})),
        C,
        f"/model.safetensors: {EXPERTS}.6.up_proj.weight: expected no such tensor by config.json, "
        "found shape [24, 48]",
    ),
    "experts in both forms": (
        tensors(lambda held: held.update({f"{EXPERTS}.down_proj": torch.zeros(6, 48, 24)})),
        C,
        f"/model.safetensors: {EXPERTS}.0.down_proj.weight (and 5 more): expected no such tensor "
        "by config.json, found shape [48, 24]",
    ),
    "fused experts turned over": (
        tensors(lambda held: held.update({f"{EXPERTS}.gate_up_proj": torch.zeros(6, 48, 47)})),
        C,
        f"/model.safetensors: {EXPERTS}.gate_up_proj: expected shape [6, 48, 48], found "
        "[6, 48, 47]",
    ),
    "router": (
        tensors(lambda held: held.update({"model.layers.2.mlp.gate.weight": torch.zeros(5, 48)})),
        C,
        "/model.safetensors: model.layers.2.mlp.gate.weight: expected shape [6, 48], found [5, 48]",
    ),
    "no gate of the shared expert": (
        tensors(lambda held: held.pop("model.layers.1.mlp.shared_expert_gate.weight")),
        C,
        "/model.safetensors: model.layers.1.mlp.shared_expert_gate.weight: expected shape [1, 48], "
        "found no tensor",
    ),
    "an expert of the head": (
        tensors(lambda held: held.pop("mtp.layers.0.mlp.experts.0.gate_proj.weight")),
        C,
        "/model.safetensors: mtp.layers.0.mlp.experts.0.gate_proj.weight: expected shape [24, 48], "
        "found no tensor",
    ),
    "another family's projections": (
        fields(model_type="qwen3_5_moe_text"),
        C,
        f"/model.safetensors: {L0}.in_proj_qkv.weight: expected shape [128, 48], found no tensor",
    ),
    "projections of other heads": (
        fields(linear_num_value_heads=6),
        C,
        f"/model.safetensors: {L0}.conv1d.weight: expected shape [160, 1, 4], found [128, 1, 4]",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_broken_config_of_experts(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", CONFIGS[name])


@pytest.mark.parametrize("name", FILES)
def test_broken_files_of_experts(name: str, good: Path, tmp_path: Path) -> None:
    check(good, tmp_path / "m", FILES[name])


def test_teeth_the_unbroken_folder_loads(good: Path) -> None:
    assert load_model(good).config.moe is not None
