"""The part of a GDN layer that keeps a ring beside its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridspec.compat.vllm import gdn_replayssm_spec_decode
from hybridspec.compat.vllm_plugin.builder import RingStep
from hybridspec.compat.vllm_plugin.pages import num_drafts, refuse, ring_dtypes, ring_shapes

__all__ = ["RingLayer"]


class RingLayer:
    """Goes before vLLM's QwenGatedDeltaNetAttention, whose projections and prompts it keeps.

    Attributes:
        ring_backend: vLLM's attention backend with the builder of `builder.py`.
        has_ring: whether this model runs with drafts that a ring can serve.
    """

    ring_backend: Any
    has_ring = False

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        drafts = num_drafts(vllm_config)
        if drafts:
            from vllm.platforms import current_platform

            refuse(vllm_config, is_cuda=current_platform.is_cuda())
        super().__init__(config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        self.has_ring = drafts > 0

    def _fused_gdn_decode_unsupported_reason(self, vllm_config: Any) -> str | None:
        """Return why vLLM's fused verification is not used: it would bypass `_forward_core`."""
        if num_drafts(vllm_config):
            return "hybridspec verifies with a ring"
        return super()._fused_gdn_decode_unsupported_reason(vllm_config)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of conv, state, u, k and decay of a block."""
        shapes = super().get_state_shape()
        if not self.has_ring:
            return shapes
        return ring_shapes(shapes, self.num_k_heads // self.tp_size, self.num_spec)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of conv, state, u, k and decay."""
        dtypes = super().get_state_dtype()
        return ring_dtypes(dtypes, self.model_config.dtype) if self.has_ring else dtypes

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's specification, without blocks for drafts."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, num_speculative_blocks=0) if self.has_ring else spec

    def get_attn_backend(self) -> Any:
        """Return the backend whose builder moves the cursors."""
        return self.ring_backend if self.has_ring else super().get_attn_backend()

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
        """Warm up as vLLM does, which unpacks two dtypes of states."""
        has_ring, self.has_ring = self.has_ring, False
        try:
            super()._warmup_prefill_kernels(qkv_or_qkvz, v_dim)
        finally:
            self.has_ring = has_ring

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Run convolution and recurrence: verified rows with the ring, all others as vLLM does.

        Args:
            mixed_qkv: q, k and v side by side, [N, 2HK + HV V]; in.
            b: write strength inputs, [N, HV]; in.
            a: decay inputs, [N, HV]; in.
            core_attn_out: where to write, [N, HV, V]; out.
        """
        from vllm.forward_context import get_forward_context, override_forward_context

        context = get_forward_context()
        found = context.attn_metadata
        metadata = found.get(self.prefix) if isinstance(found, dict) else None
        ring: RingStep | None = getattr(metadata, "ring", None)
        if metadata is None or ring is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        count = metadata.num_actual_tokens
        rows, out = (mixed_qkv[:count], b[:count], a[:count]), core_attn_out[:count]
        if ring.rest is None:
            self._verify(rows, out, metadata, ring)
            return
        at = metadata.spec_token_indx
        verified = out.new_empty(at.shape[0], *out.shape[1:])
        self._verify([part.index_select(0, at) for part in rows], verified, metadata, ring)
        out.index_copy_(0, at.long(), verified)
        at = metadata.non_spec_token_indx
        others = out.new_zeros(at.shape[0], *out.shape[1:])
        with override_forward_context(replace(context, attn_metadata={self.prefix: ring.rest})):
            super()._forward_core(*(part.index_select(0, at) for part in rows), others)
        out.index_copy_(0, at.long(), others)

    def _verify(self, rows: Sequence[Tensor], out: Tensor, metadata: Any, ring: RingStep) -> None:
        """Run rows (mixed_qkv, b, a) that may be rejected, packed by request."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        (mixed_qkv, b, a), (conv, state, u, k, decay) = rows, self.kv_cache
        count, cursors = metadata.num_spec_decodes, ring.cursors
        blocks = metadata.spec_state_indices_tensor[:count, 0]
        bounds = metadata.spec_query_start_loc[: count + 1]
        mixed_qkv = causal_conv1d_update(
            mixed_qkv,
            conv if is_conv_state_dim_first() else conv.transpose(-1, -2),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=blocks,
            num_accepted_tokens=metadata.num_accepted_tokens[:count],
            query_start_loc=bounds,
            max_query_len=cursors.max_spec_len,
            validate_data=False,
        )
        gdn_replayssm_spec_decode(
            mixed_qkv, a, b, self.A_log, self.dt_bias, state, u, k, decay, out, bounds, blocks,
            cursors.write_pos, cursors.cache_base, cursors.is_flush, cursors.max_cache_len,
            cursors.max_spec_len,
        )  # fmt: skip
