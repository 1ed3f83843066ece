"""The layers of a hybrid decoder, written once for prefill and verification.

Plain objects with a `forward`, because on a CPU the module machinery costs as much as a small
matrix product. `Step.is_prefill` alone decides whether rows are stored or appended. Every mixer has
the same form, so that another kind needs no change here: `forward(x, residual, rows, memory)`, and
`memory_spec(config, options)`, which states the memory that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import ModelConfig
from hybridspec.models.mlp import Mlp, MoeMlp
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention
from hybridspec.ops.norms import widened
from hybridspec.ops.rotary import norm_and_rotate
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import GdnMemory, KvMemory, MemoryOptions, MemorySpec

__all__ = [
    "AttentionLayer",
    "DecoderLayer",
    "GdnLayer",
    "Mixer",
    "RmsNorm",
    "Rotary",
    "Rows",
]


class RmsNorm:
    """Root-mean-square norm of the last dimension.

    y = x / sqrt(mean(x^2) + eps) * weight

    On a GPU `F.rms_norm` is one kernel; on a CPU it is eight operators, and the four of the same
    equation as x * (weight sqrt(D)) / hypot(|x|, sqrt(D eps)) take half the time.

    Args:
        weight: the whole factor (a stored zero-centred weight plus one), [D], or [heads, D] where
            every head has its own; fp32 or fp64.
        eps: added to the mean square.
    """

    __slots__ = ("_floor", "eps", "scaled_weight", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self.scaled_weight = weight * size**0.5
        self._floor = weight.new_tensor((eps * size) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of activations [..., D], in their dtype.

        Numerics: computed in the dtype of the weight and rounded once, at the end.
        """
        return widened(self._wide(x), x.dtype)

    def forward_gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return norm(x) * silu(gate), both [..., D], in the dtype of `x`.

        Numerics: computed in the dtype of the weight and rounded once, at the end.
        """
        wide = self._wide(x)
        return widened(wide.mul_(F.silu(widened(gate, wide.dtype))), x.dtype)

    def _wide(self, x: Tensor) -> Tensor:
        wide = widened(x, self.weight.dtype)
        if wide.is_cuda and self.weight.dim() == 1:
            return F.rms_norm(wide, self.weight.shape, self.weight, self.eps)
        length = torch.linalg.vector_norm(wide, 2, -1, True)
        return wide.mul(self.scaled_weight).div_(length.hypot_(self._floor))


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

    def forward(self, x: Tensor, residual: Tensor, rows: Rows, memory: Any) -> Tensor:
        """Add rows [N, D], mixed along their requests, to others; appends to the memory's logs."""
        ...


def rotate_(x: Tensor, rotary: tuple[Tensor, Tensor]) -> None:
    """Rotate the leading dimensions of every head of `x` [N, heads, D], in place."""
    cos, sin = rotary
    rotated = x.narrow(-1, 0, cos.shape[-1])
    first, second = rotated.chunk(2, -1)
    swapped = torch.cat((second, first), -1)
    rotated.mul_(cos).addcmul_(swapped, sin)


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
        backend: which implementation of the ops to use.
    """

    config: ModelConfig
    in_weight: Tensor
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: RmsNorm
    out_weight: Tensor
    backend: str

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

    def forward(self, x: Tensor, residual: Tensor, rows: Rows, memory: GdnMemory) -> Tensor:
        """Add rows [N, D], mixed along their requests, to others; appends to the memory's logs."""
        g, step = self.config.gdn, rows.step
        keys, values = (-1, g.num_key_heads, g.key_dim), (-1, g.num_value_heads, g.value_dim)
        q_size, v_size = keys[1] * keys[2], values[1] * values[2]
        # split_with_sizes and view have no Python layer above them, unlike split and unflatten.
        qkv, z, b, a = F.linear(x, self.in_weight).split_with_sizes(
            (g.conv_dim, v_size, g.num_value_heads, g.num_value_heads), -1
        )
        q, k, v = self._convolve(qkv, step, memory).split_with_sizes((q_size, q_size, v_size), -1)
        y = self._mix(q.view(keys), k.view(keys), v.view(values), a, b, step, memory)
        y = self.norm.forward_gated(y, z.view(values))
        return torch.addmm(residual, y.flatten(-2), self.out_weight.t())

    def _convolve(self, qkv: Tensor, step: Step, memory: GdnMemory) -> Tensor:
        logs = (
            qkv, self.conv_weight, memory.conv_ring, memory.seq_len, step.cu_seqlens, step.slots,
        )  # fmt: skip
        if step.is_prefill:
            return causal_conv1d.prefill(
                *logs, max_seqlen=step.max_seqlen, activation="silu", backend=self.backend
            )
        return causal_conv1d.verify(
            *logs, max_verify_tokens=step.max_seqlen, activation="silu", backend=self.backend
        )

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, step: Step, memory: GdnMemory
    ) -> Tensor:
        rows = (q, k, v, a, b, self.A_log, self.dt_bias)
        logs = (memory.state, memory.ring, step.cu_seqlens, step.slots)
        if step.is_prefill:
            return gated_delta_rule.prefill(
                *rows,
                *logs,
                max_seqlen=step.max_seqlen,
                state_scale=memory.state_scale,
                backend=self.backend,
            )
        return gated_delta_rule.verify(
            *rows,
            *logs,
            max_verify_tokens=step.max_seqlen,
            is_fold=step.is_fold,
            state_scale=memory.state_scale,
            backend=self.backend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Grouped-query attention with normed, partly rotated q and k and a gated output.

    Attributes:
        config: sizes.
        in_weight: [q | k | v | gate] stacked, [(2 Hq + 2 Hkv) d, D].
        qk_norm: norm of every head of q and k, weight [Hq + Hkv, d].
        out_weight: [D, Hq d].
        verify_backend, prefill_backend: which implementation of attention to use.
    """

    config: ModelConfig
    in_weight: Tensor
    qk_norm: RmsNorm
    out_weight: Tensor
    verify_backend: str
    prefill_backend: str

    @staticmethod
    def memory_spec(config: ModelConfig, options: MemoryOptions) -> MemorySpec:
        """State the memory of such a layer."""
        return KvMemory.spec(options, num_heads=config.num_kv_heads, head_dim=config.head_dim)

    def forward(self, x: Tensor, residual: Tensor, rows: Rows, memory: KvMemory) -> Tensor:
        """Add what rows [N, D] find in their requests' pages to others; appends there first."""
        c, step = self.config, rows.step
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qk, v, gate = F.linear(x, self.in_weight).split_with_sizes(
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
        y = y.flatten(-2).mul_(gate.sigmoid())
        return torch.addmm(residual, y, self.out_weight.t())

    def _norm_and_rotate(self, qk: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        weight = self.qk_norm.weight
        heads = qk.view(-1, *weight.shape)
        if qk.is_cuda:
            return norm_and_rotate(heads, weight, *rotary, eps=self.qk_norm.eps)
        # The call of an op costs a CPU as much as this arithmetic.
        heads = self.qk_norm.forward(widened(heads, weight.dtype))
        rotate_(heads, rotary)
        return widened(heads, qk.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One residual block: norm, mixer, norm, MLP.

    Attributes:
        mixer: the layer that mixes rows along a request.
        mlp: the layer that acts on each row.
        mixer_norm, mlp_norm: norms in front of them.
    """

    mixer: Mixer
    mlp: Mlp | MoeMlp
    mixer_norm: RmsNorm
    mlp_norm: RmsNorm

    def with_attention(self, *, verify_backend: str, prefill_backend: str) -> Self:
        """Return the same block, with other implementations of attention if it attends."""
        if not isinstance(self.mixer, AttentionLayer):
            return self
        mixer = replace(self.mixer, verify_backend=verify_backend, prefill_backend=prefill_backend)
        return replace(self, mixer=mixer)

    def forward(self, x: Tensor, rows: Rows, memory: Any) -> Tensor:
        """Return the residual stream after this layer, [N, D]; appends to the memory's logs."""
        x = self.mixer.forward(self.mixer_norm.forward(x), x, rows, memory)
        return self.mlp.forward(self.mlp_norm.forward(x), x)
