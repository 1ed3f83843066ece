"""The layers of a hybrid decoder, written once for prefill and verification.

Plain objects with a `forward`, because on a CPU the module machinery costs as much as a small
matrix product. `Step.is_prefill` alone decides whether rows are stored or appended. Every mixer has
the same form, so that another kind needs no change here: `forward(x, rows, memory)` in front of its
`out_weight`, and what an engine asks before it is built: `memory_spec`, the memory that it is
given, and `refusals`, which backends of its ops would not serve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridspec.models.config import ModelConfig
from hybridspec.models.mlp import Mlp, MoeMlp
from hybridspec.models.products import BLAS, Products
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention, rotary
from hybridspec.ops.activations import sigmoid_gate
from hybridspec.ops.norms import RmsNorm, widened
from hybridspec.ops.ring import RawRingView
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import GdnMemory, KvMemory, MemoryOptions, MemorySpec

__all__ = [
    "ATTENTION",
    "CAUSAL_CONV1D",
    "GATED_DELTA_RULE",
    "NORM_AND_ROTATE",
    "PROMPT_ATTENTION",
    "PROMPT_RULE",
    "AttentionLayer",
    "DecoderLayer",
    "GdnLayer",
    "Mixer",
    "Refusals",
    "Rotary",
    "Rows",
]

# Ops as engines name them.
GATED_DELTA_RULE = "gated_delta_rule"
CAUSAL_CONV1D = "causal_conv1d"
ATTENTION = "paged_attention"
PROMPT_ATTENTION = "attention of prompts"
PROMPT_RULE = "gated_delta_rule of prompts"
NORM_AND_ROTATE = "norm_and_rotate"

# By op: the backends in order of preference, each with why it would not serve, None if it would.
Refusals = dict[str, dict[str, str | None]]


class Rotary:
    """The rotary embedding's angles.

    The angle of pair i at position p is p * theta^(-2i / rotary_dim), in fp32; the pair consists of
    dimensions i and i + rotary_dim / 2. Both halves are computed, the first angles negated, so that
    rotating is x * cos + swapped_halves(x) * sin. They are computed anew for each forward pass: to
    look them up takes as long, and a table is as large as the longest sequence.

    Args:
        rotary_dim: number of rotated dimensions.
        theta: base of the frequencies.
        dtype: dtype of the results, fp32 or fp64.
        device: where they are computed.
    """

    def __init__(
        self, rotary_dim: int, theta: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        exponents = torch.arange(0, rotary_dim, 2, device=device).to(torch.float32)
        frequencies = 1.0 / (theta ** (exponents / rotary_dim))
        self.signed_frequencies = torch.cat((-frequencies, frequencies))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [N, 1, rotary_dim], of the rows' positions [N]."""
        angles = positions.view(-1, 1, 1) * self.signed_frequencies
        return widened(angles.cos(), self.dtype), widened(angles.sin(), self.dtype)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass, as all its layers see them.

    Attributes:
        step: their layout.
        rotary: cosines and sines of their positions, each [N, 1, rotary_dim].
    """

    step: Step
    rotary: tuple[Tensor, Tensor]


class Mixer(Protocol):
    """A layer that mixes rows along their requests."""

    @staticmethod
    def memory_spec(config: ModelConfig, options: MemoryOptions) -> MemorySpec:
        """State the memory of such a layer."""
        ...

    @staticmethod
    def refusals(config: ModelConfig, memory: Any, max_verify_tokens: int) -> Refusals:
        """Ask each op of such a layer which of its backends would not serve it."""
        ...

    @property
    def out_weight(self) -> Tensor:
        """What the mixed rows are multiplied with, [D, F]."""
        ...

    def forward(self, x: Tensor, rows: Rows, memory: Any) -> Tensor:
        """Mix rows [N, D] along their requests, into [N, F]; appends to the memory's logs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnLayer:
    """Gated DeltaNet: convolved q, k, v, the gated delta rule, a gated norm, a projection.

    Attributes:
        config: sizes.
        in_weight: [q | k | v | z | b | a] stacked, [2 H K + 2 HV V + 2 HV, D].
        conv_weight: [2 H K + HV V, conv_width], newest input last.
        A_log, dt_bias: [HV], fp32.
        norm: gated norm over V.
        out_weight: [D, HV V].
        conv_backend, rule_backend: what runs the convolution and the rule of rows to verify.
        products: how rows are multiplied with weights.
    """

    config: ModelConfig
    in_weight: Tensor
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: RmsNorm
    out_weight: Tensor
    conv_backend: str
    rule_backend: str
    products: Products = BLAS

    @staticmethod
    def memory_spec(config: ModelConfig, options: MemoryOptions) -> MemorySpec:
        """State the memory of such a layer."""
        g = config.gdn
        return GdnMemory.spec(
            options,
            num_key_heads=g.num_key_heads,
            num_value_heads=g.num_value_heads,
            key_dim=g.key_dim,
            value_dim=g.value_dim,
            conv_width=g.conv_width,
        )

    @staticmethod
    def refusals(config: ModelConfig, memory: GdnMemory, max_verify_tokens: int) -> Refusals:
        """Ask each op of such a layer which of its backends would not serve it."""
        g = config.gdn
        keys, values = (-1, g.num_key_heads, g.key_dim), (-1, g.num_value_heads, g.value_dim)
        sizes = (g.conv_dim, values[1] * values[2], g.num_value_heads, g.num_value_heads)
        projected = memory.conv_ring.new_empty(1, sum(sizes))
        qkv, z, b, a = projected.split_with_sizes(sizes, -1)
        out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        q, k, v = out.split_with_sizes((keys[1] * keys[2], keys[1] * keys[2], sizes[1]), -1)
        weight = out.new_empty(g.conv_width, g.conv_dim).t()
        y = out.new_empty(1, *values[1:])
        gate = y.new_empty(g.num_value_heads, dtype=torch.float32)
        offsets = memory.seq_len.new_zeros(2)
        return {
            CAUSAL_CONV1D: causal_conv1d.explain_verify(
                causal_conv1d.Rows(qkv, out),
                causal_conv1d.Taps(weight, None, "silu"),
                causal_conv1d.Log(memory.conv_ring, memory.seq_len),
                causal_conv1d.Batch(offsets, offsets[:1], max_verify_tokens),
            ),
            **_explain_rule(
                gated_delta_rule.Rows(q.view(keys), k.view(keys), v.view(values), a, b, y),
                gated_delta_rule.Gates(gate, gate, None, True, 1.0),
                memory,
                gated_delta_rule.FoldingBatch(offsets, offsets[:1], None, max_verify_tokens),
            ),
        }

    def forward(self, x: Tensor, rows: Rows, memory: GdnMemory) -> Tensor:
        """Mix rows [N, D] along their requests, into [N, HV V]; appends to the memory's logs."""
        g, step = self.config.gdn, rows.step
        keys, values = (-1, g.num_key_heads, g.key_dim), (-1, g.num_value_heads, g.value_dim)
        q_size, v_size = keys[1] * keys[2], values[1] * values[2]
        # split_with_sizes and view have no Python layer above them, unlike split and unflatten.
        qkv, z, b, a = self.products.linear(x, self.in_weight).split_with_sizes(
            (g.conv_dim, v_size, g.num_value_heads, g.num_value_heads), -1
        )
        q, k, v = self._convolve(qkv, step, memory).split_with_sizes((q_size, q_size, v_size), -1)
        y = self._mix(q.view(keys), k.view(keys), v.view(values), a, b, step, memory)
        return self.norm.forward_gated(y, z.view(values)).flatten(-2)

    def _convolve(self, qkv: Tensor, step: Step, memory: GdnMemory) -> Tensor:
        logs = (
            qkv, self.conv_weight, memory.conv_ring, memory.seq_len, step.cu_seqlens, step.slots,
        )  # fmt: skip
        if step.is_prefill:
            return causal_conv1d.prefill(*logs, max_seqlen=step.max_seqlen, activation="silu")
        return causal_conv1d.verify(
            *logs, max_verify_tokens=step.max_seqlen, activation="silu", backend=self.conv_backend
        )

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, step: Step, memory: GdnMemory
    ) -> Tensor:
        rows, ring = (q, k, v, a, b, self.A_log, self.dt_bias, memory.state), memory.ring
        batch = (step.cu_seqlens, step.slots)
        if step.is_prefill:
            return gated_delta_rule.prefill(
                *rows,
                ring.for_prefill() if isinstance(ring, RawRingView) else ring,
                *batch,
                max_seqlen=step.max_seqlen,
                state_scale=memory.state_scale,
            )
        if isinstance(ring, RawRingView):
            return gated_delta_rule.verify_raw(
                *rows,
                ring,
                *batch,
                max_verify_tokens=step.max_seqlen,
                is_fold=step.is_fold,
                backend=self.rule_backend,
            )
        return gated_delta_rule.verify(
            *rows,
            ring,
            *batch,
            max_verify_tokens=step.max_seqlen,
            is_fold=step.is_fold,
            state_scale=memory.state_scale,
            backend=self.rule_backend,
        )


def _explain_rule(
    rows: gated_delta_rule.Rows,
    gates: gated_delta_rule.Gates,
    memory: GdnMemory,
    batch: gated_delta_rule.FoldingBatch,
) -> Refusals:
    """Ask which backends of the rule would not serve steps and prompts over a memory."""
    state, ring = gated_delta_rule.State(memory.state, memory.state_scale), memory.ring
    if isinstance(ring, RawRingView):
        verify = gated_delta_rule.explain_verify_raw(rows, gates, state, ring, batch)
        ring = ring.for_prefill()
    else:
        verify = gated_delta_rule.explain_verify(rows, gates, state, ring, batch)
    prompts = gated_delta_rule.explain_prefill(rows, gates, state, ring, batch)
    return {GATED_DELTA_RULE: verify, PROMPT_RULE: prompts}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Grouped-query attention with normed, partly rotated q and k and a gated output.

    Attributes:
        config: sizes.
        in_weight: [q | k | v | gate] stacked, [(2 Hq + 2 Hkv) d, D].
        qk_norm: norm of every head of q and k, weight [Hq + Hkv, d].
        out_weight: [D, Hq d].
        verify_backend, prefill_backend: attention of rows to verify, and of prompt rows.
        rotary_backend: what norms and rotates heads on a GPU.
        products: how rows are multiplied with weights.
    """

    config: ModelConfig
    in_weight: Tensor
    qk_norm: RmsNorm
    out_weight: Tensor
    verify_backend: str
    prefill_backend: str
    rotary_backend: str
    products: Products = BLAS

    @staticmethod
    def memory_spec(config: ModelConfig, options: MemoryOptions) -> MemorySpec:
        """State the memory of such a layer."""
        return KvMemory.spec(options, num_heads=config.num_kv_heads, head_dim=config.head_dim)

    @staticmethod
    def refusals(config: ModelConfig, memory: KvMemory, max_verify_tokens: int) -> Refusals:
        """Ask each op of such a layer which of its backends would not serve it."""
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        qk = memory.k_pages.new_empty(1, heads + kv_heads, head_dim)
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        offsets = memory.seq_len.new_zeros(2)
        rows = paged_attention.Rows(q, k, torch.empty_like(k), torch.empty_like(q), None)
        pages = paged_attention.Pages(
            memory.k_pages, memory.v_pages, memory.page_table, memory.seq_len
        )
        batch = paged_attention.Batch(offsets, offsets[:1], max_verify_tokens)
        prompts = batch._replace(max_rows=config.max_positions)
        wide = torch.promote_types(qk.dtype, torch.float32)
        weight = qk.new_empty(qk.shape[1:], dtype=wide)
        angles = qk.new_empty(1, 1, config.rotary_dim, dtype=wide)
        return {
            ATTENTION: paged_attention.explain_verify(rows, pages, batch),
            PROMPT_ATTENTION: paged_attention.explain_prefill(rows, pages, prompts),
            NORM_AND_ROTATE: rotary.explain(
                qk, weight, angles, angles, torch.empty_like(qk), config.norm_eps
            ),
        }

    def forward(self, x: Tensor, rows: Rows, memory: KvMemory) -> Tensor:
        """Return what rows [N, D] find in their requests' pages, [N, Hq d]; appends there first."""
        c, step = self.config, rows.step
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qk, v, gate = self.products.linear(x, self.in_weight).split_with_sizes(
            (q_size + kv_size, kv_size, q_size), -1
        )
        q, k = self._norm_and_rotate(qk, rows.rotary).split_with_sizes(
            (c.num_attention_heads, c.num_kv_heads), 1
        )
        v = v.view(-1, c.num_kv_heads, c.head_dim)
        logs = (
            memory.k_pages, memory.v_pages, memory.page_table, memory.seq_len, step.cu_seqlens,
            step.slots,
        )  # fmt: skip
        if step.is_prefill:
            y = paged_attention.prefill(
                q, k, v, *logs, max_seqlen=step.max_seqlen, backend=self.prefill_backend
            )
        else:
            y = paged_attention.verify(
                q, k, v, *logs, max_verify_tokens=step.max_seqlen, backend=self.verify_backend
            )
        y = y.flatten(-2)
        return sigmoid_gate(y, gate, out=y) if y.is_cuda else y.mul_(gate.sigmoid())

    def _norm_and_rotate(self, qk: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        weight = self.qk_norm.weight
        heads = qk.view(-1, *weight.shape)
        if qk.is_cuda:
            return rotary.norm_and_rotate(
                heads, weight, *angles, eps=self.qk_norm.eps, backend=self.rotary_backend
            )
        # The call of an op costs a CPU as much as this arithmetic.
        heads = self.qk_norm.wide(heads)
        rotary.rotate_(heads, *angles)
        return widened(heads, qk.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One residual block: norm, mixer, norm, MLP.

    Attributes:
        mixer: the layer that mixes rows along a request.
        mlp: the layer that acts on each row.
        mixer_norm, mlp_norm: norms in front of them.
        products: how rows are multiplied with weights.
    """

    mixer: Mixer
    mlp: Mlp | MoeMlp
    mixer_norm: RmsNorm
    mlp_norm: RmsNorm
    products: Products = BLAS

    def forward(
        self, x: Tensor, y: Tensor, rows: Rows, memory: Any, behind: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        """Run rows through this layer and append to the memory's logs.

        A norm belongs to the sum in front of it, since one launch may do both.

        Args:
            x: the residual stream, [N, D]; may be overwritten.
            y: its norm, by `mixer_norm`; in.
            rows: their layout.
            memory: of the mixer.
            behind: the norm behind this layer.

        Returns:
            The residual stream after it, and its norm.
        """
        products, mixed = self.products, self.mixer.forward(y, rows, memory)
        if isinstance(self.mlp, MoeMlp):  # one launch may do its norm as well
            x = products.add(x, mixed, self.mixer.out_weight)
            x = self.mlp.forward(x, self.mlp_norm)
            return x, behind.forward(x)
        x, y = products.add_and_norm(x, mixed, self.mixer.out_weight, self.mlp_norm)
        return products.add_and_norm(x, self.mlp.forward(y), self.mlp.down_weight, behind)
