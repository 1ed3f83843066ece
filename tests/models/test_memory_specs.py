"""What a model says that its layers keep of a request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec.models import ModelConfig
from hybridspec.models.hybrid import memory_specs
from hybridspec.runtime import MemoryOptions


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tmp_path_factory.mktemp("tiny")
    layers = ["linear_attention", "linear_attention", "full_attention"] * 2
    build_tiny_checkpoint(folder, layer_types=layers, num_hidden_layers=6)
    return ModelConfig.from_folder(folder)


def options(**changes: object) -> MemoryOptions:
    return MemoryOptions(**({"dtype": torch.float32, "state_dtype": torch.float32} | changes))


def test_each_layer_states_what_its_kind_keeps(config: ModelConfig) -> None:
    specs = memory_specs(config, options(), has_head=True)
    assert [bool(spec.per_token) for spec in specs.all()] == [False, False, True] * 2 + [True]
    assert [bool(spec.per_slot) for spec in specs.all()] == [True, True, False] * 2 + [False]
    assert specs.head is specs.all()[-1]
    headless = memory_specs(config, options(), has_head=False)
    assert headless.head is None and headless.all() == headless.layers
    assert headless.request_bytes() == specs.request_bytes()
    assert headless.token_bytes() == specs.token_bytes() - specs.layers[2].token_bytes()


@pytest.mark.parametrize(("max_verify_tokens", "conv_rows"), [(8, 16), (16, 32)])
def test_the_ring_of_the_convolution_holds_a_step(
    config: ModelConfig, max_verify_tokens: int, conv_rows: int
) -> None:
    made = options(max_verify_tokens=max_verify_tokens)
    recurrent = [s for s in memory_specs(config, made, has_head=True).layers if s.per_slot]
    assert [spec.per_slot["conv_ring"].shape[0] for spec in recurrent] == [conv_rows] * 4


def test_bytes_follow_from_the_tensors(config: ModelConfig) -> None:
    for state_dtype in (torch.float32, torch.bfloat16):
        specs = memory_specs(config, options(state_dtype=state_dtype), has_head=True)
        parts = specs.bytes_by_part()
        assert parts.keys() == {"GDN state", "GDN ring", "conv ring"}
        assert sum(parts.values()) == specs.request_bytes()
        g = config.gdn
        numbers = 4 * g.num_value_heads * g.value_dim * g.key_dim
        assert parts["GDN state"] == specs.state_bytes() == numbers * state_dtype.itemsize
