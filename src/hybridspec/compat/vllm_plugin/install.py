"""Put the ring into vLLM: its layer, backend, builder, and the models' page sizes."""

from __future__ import annotations

from typing import Any

from hybridspec.compat.vllm_plugin.builder import RingBuilder
from hybridspec.compat.vllm_plugin.layer import RingLayer
from hybridspec.compat.vllm_plugin.pages import num_drafts, ring_dtypes, ring_shapes
from hybridspec.errors import UnsupportedError

__all__ = ["install"]

_LAYER = "QwenGatedDeltaNetAttention"


def install() -> None:
    """Register the layer, and let the models count its pages; a second call does nothing."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.models.qwen3_5 import (
        Qwen3_5ForCausalLMBase,
        Qwen3_5ForConditionalGeneration,
    )
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
    from vllm.v1.attention.backends.gdn_attn import (
        GDNAttentionBackend,
        GDNAttentionMetadataBuilder,
    )

    present = op_registry_oot.get(_LAYER)
    if present is not None:
        if issubclass(present, RingLayer):
            return
        raise UnsupportedError(f"{_LAYER}: replaced by {present.__module__} already")

    class Builder(RingBuilder, GDNAttentionMetadataBuilder):
        pass

    class Backend(GDNAttentionBackend):
        @staticmethod
        def get_builder_cls() -> type[Any]:
            return Builder

    class RingGatedDeltaNetAttention(RingLayer, QwenGatedDeltaNetAttention):
        ring_backend = Backend

    for model in (Qwen3NextForCausalLM, Qwen3_5ForCausalLMBase, Qwen3_5ForConditionalGeneration):
        _count_ring(model)
    PluggableLayer.register_oot(RingGatedDeltaNetAttention, name=_LAYER)


def _count_ring(model: type[Any]) -> None:
    """Let a model class say what a block holds; vLLM computes the size of pages from it."""
    shapes_of = model.get_mamba_state_shape_from_config.__func__
    dtypes_of = model.get_mamba_state_dtype_from_config.__func__

    def shapes_with_ring(cls: type[Any], vllm_config: Any) -> Any:
        shapes, drafts = shapes_of(cls, vllm_config), num_drafts(vllm_config)
        if not drafts:
            return shapes
        heads = vllm_config.model_config.hf_text_config.linear_num_key_heads
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return ring_shapes(shapes, heads // ranks, drafts)

    def dtypes_with_ring(cls: type[Any], vllm_config: Any) -> Any:
        dtypes = dtypes_of(cls, vllm_config)
        if not num_drafts(vllm_config):
            return dtypes
        return ring_dtypes(dtypes, vllm_config.model_config.dtype)

    model.get_mamba_state_shape_from_config = classmethod(shapes_with_ring)
    model.get_mamba_state_dtype_from_config = classmethod(dtypes_with_ring)
