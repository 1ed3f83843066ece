"""The plug-in for vLLM without its wheel: pages, cursors, metadata, the layer, and registering."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.fake_vllm import LAYERS, MODELS, CommonMetadata, install_fake, make_config
from helpers.vllm_sessions import Request, Session, run_session
from hybridspec.compat import vllm_plugin
from hybridspec.compat.vllm_plugin.cursors import PageCursors
from hybridspec.compat.vllm_plugin.install import install
from hybridspec.compat.vllm_plugin.layer import RingLayer
from hybridspec.compat.vllm_plugin.pages import num_drafts, refuse, ring_rows
from hybridspec.errors import UnsupportedError

NAME = "QwenGatedDeltaNetAttention"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Layers that replace vLLM's, in a vLLM of a few classes."""
    install_fake(monkeypatch)
    return sys.modules["vllm.model_executor.custom_op"].op_registry_oot


def make_layer(**options: Any) -> Any:
    """Create the layer as a model does, by the name of vLLM's."""
    torch.manual_seed(0)
    config = make_config(**options)
    layer = sys.modules[f"{LAYERS}.gdn.qwen_gdn_linear_attn"].QwenGatedDeltaNetAttention
    return layer(config.model_config.hf_text_config, config, prefix="model.layers.0")


def run(layer: Any, metadata: Any, *tensors: Tensor) -> None:
    """Run the layer's core in a forward context."""
    context = sys.modules["vllm.forward_context"]
    found = None if metadata is None else {layer.prefix: metadata}
    with context.override_forward_context(context.ForwardContext(found)):
        layer._forward_core(*tensors)


def make_session(drafts: int) -> Session:
    """Create a layer and the builder of its backend."""
    layer = make_layer(drafts=drafts)
    builder = layer.get_attn_backend().get_builder_cls()
    made = builder(None, [layer.prefix], make_config(drafts), torch.device("cpu"))
    return Session(layer, made, 8, CommonMetadata, run, seed=drafts)


@pytest.mark.parametrize("drafts", range(1, 8))
def test_a_ring_holds_a_window_and_a_step(drafts: int) -> None:
    """Empty windows are not folded, and the longest one is no longer than the CUDA kernel takes."""
    cursors = PageCursors(2, drafts, torch.device("cpu"))
    assert cursors.max_cache_len <= ring_rows(drafts)
    assert 2 * cursors.max_spec_len <= cursors.max_cache_len <= 16 + cursors.max_spec_len


def test_pages(registry: dict[str, type]) -> None:
    install()
    config, layer = make_config(4), make_layer(drafts=4)
    shapes = ((7, 96), (4, 8, 16), (4, 32, 8), (2, 32, 16), (4, 32))
    assert layer.get_state_shape() == shapes
    assert layer.get_state_dtype() == (torch.float32,) * 5
    spec = layer.get_kv_cache_spec(config)
    assert (spec.shapes, spec.num_speculative_blocks) == (shapes, 0)
    assert layer.gdn_decode_kernel == "triton"
    models = sys.modules[f"{MODELS}.qwen3_5"]
    for model in (models.Qwen3_5ForCausalLMBase, models.Qwen3_5ForConditionalGeneration):
        assert model.get_mamba_state_shape_from_config(config) == shapes
        assert model.get_mamba_state_dtype_from_config(config) == layer.get_state_dtype()
    config.model_config.dtype = torch.bfloat16
    dtypes = models.Qwen3_5ForCausalLMBase.get_mamba_state_dtype_from_config(config)
    assert dtypes[2:] == (torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "options", [{"drafts": None}, {"model_config__architecture": "OtherForCausalLM"}], ids=str
)
def test_what_gets_no_ring_stays_as_it_is(options: dict, registry: dict[str, type]) -> None:
    install()
    layer, config = make_layer(**options), make_config(**options)
    shapes = ((3 + layer.num_spec, 96), (4, 8, 16))
    assert num_drafts(config) == 0 and not layer.has_ring
    assert layer.get_state_shape() == shapes and len(layer.get_state_dtype()) == 2
    assert layer.get_kv_cache_spec(config).num_speculative_blocks == layer.num_spec
    assert not issubclass(layer.get_attn_backend().get_builder_cls(), PageCursors)
    assert layer.get_attn_backend().__name__ == "Backend"
    assert layer.get_attn_backend() is not layer.ring_backend
    assert layer.gdn_decode_kernel == "cuda"
    model = sys.modules[f"{MODELS}.qwen3_next"].Qwen3NextForCausalLM
    assert model.get_mamba_state_shape_from_config(config) == shapes
    assert len(model.get_mamba_state_dtype_from_config(config)) == 2


def test_cursors_commit_what_was_pending() -> None:
    cursors = PageCursors(6, 3, torch.device("cpu"))
    blocks = torch.tensor([4, 0, 2], dtype=torch.int32)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    cursors.begin_step(blocks, ints(4, 0, 2), ints(1, 1, 1))
    assert cursors.write_pos.tolist() == [0] * 6  # the first step behind a prompt
    cursors.begin_step(blocks, ints(4, 0, 4), ints(3, 1, 2))
    assert cursors.write_pos.tolist() == [0, 0, 2, 0, 3, 0]
    cursors.begin_step(blocks, ints(4, 0, 4), ints(4, 1, 4))
    assert cursors.write_pos.tolist() == [0, 0, 6, 0, 7, 0]
    assert cursors.is_flush.tolist() == [0] * 6
    cursors.begin_step(blocks, ints(4, 0, 4), ints(2, 1, 1))
    assert cursors.write_pos.tolist() == [0, 0, 7, 0, 9, 0]
    assert cursors.is_flush.tolist() == [0, 0, 0, 0, 1, 0]
    cursors.begin_step(blocks, ints(4, 0, 4), ints(2, 1, 1))
    assert cursors.write_pos.tolist() == [0, 0, 8, 0, 2, 0]
    assert cursors.cache_base.tolist() == [0, 0, 0, 0, 9, 0]
    cursors.reset(ints(4))
    assert cursors.write_pos.tolist() == [0, 0, 8, 0, 0, 0]
    cursors.begin_step(ints(4), ints(4), ints(1))
    assert cursors.write_pos[4] == cursors.cache_base[4] == 0


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_session(drafts: int, registry: dict[str, type]) -> None:
    install()
    run_session(make_session(drafts), drafts, steps=40)


def test_lost_rows_are_noticed(registry: dict[str, type]) -> None:
    """The session sees it if a commit is left out."""
    install()
    session = make_session(3)
    request = Request(2, 5)
    session.step([(request, 5)])
    session.step([(request, 4)])
    request.accepted = 2
    session.builder.cursors.num_pending.zero_()
    with pytest.raises(AssertionError, match="not close"):
        session.step([(request, 4)])


def test_without_metadata_vllm_warms_up(registry: dict[str, type]) -> None:
    install()
    layer = make_layer()
    run(layer, None, *(torch.zeros(2, n) for n in (96, 4, 4)), torch.zeros(2, 4, 8))
    assert layer.warmed_up == 1 and layer.has_ring


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_config__enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"cache_config__mamba_cache_mode": "align"}, "--no-enable-prefix-caching"),
        ({"drafts": 8}, "num_speculative_tokens: expected at most 7 .*, got 8"),
        ({"kv_transfer_config": "a connector"}, "kv_transfer_config: .* without a KV connector"),
    ],
    ids=str,
)
def test_settings_that_would_lose_a_window(
    changes: dict, message: str, registry: dict[str, type]
) -> None:
    install()
    with pytest.raises(UnsupportedError, match=message):
        make_layer(**changes)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="device: .* CUDA"):
        refuse(make_config(), is_cuda=False)


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, False),
        ({"VLLM_PLUGINS": "other"}, False),
        ({"HYBRIDSPEC_VLLM": "0"}, False),
        ({"VLLM_PLUGINS": "other,hybridspec"}, True),
        ({"HYBRIDSPEC_VLLM": "1"}, True),
    ],
    ids=str,
)
def test_it_is_off_unless_named(
    variables: dict[str, str], is_wanted: bool, registry: dict[str, type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("VLLM_PLUGINS", "HYBRIDSPEC_VLLM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vllm_plugin, "version", lambda package: "0.33.2")
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.register()
    assert list(registry) == [NAME] * is_wanted
    if is_wanted:
        assert issubclass(registry[NAME], RingLayer)


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSPEC_VLLM", "1")
    monkeypatch.setattr(vllm_plugin, "version", lambda package: "0.34.0")
    with pytest.raises(UnsupportedError, match="serves vllm 0.33.., got 0.34.0"):
        vllm_plugin.register()


def test_a_layer_that_somebody_replaced(registry: dict[str, type]) -> None:
    registry[NAME] = torch.nn.Linear
    with pytest.raises(UnsupportedError, match=f"{NAME}: replaced by torch.nn"):
        install()
