"""The layers of a hybrid decoder, written once for prefill and verification.

Plain objects with a `forward`, because on a CPU the module machinery costs as much as a small
matrix product. `Step.is_prefill` alone decides whether rows are stored or appended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import ModelConfig
from hybridspec.models.mlp import Mlp, MoeMlp
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention
from hybridspec.ops.norms import widened
from hybridspec.ops.rotary import norm_and_rotate
from hybridspec.runtime.pools import GdnPool, KvPool
from hybridspec.runtime.step import Step

__all__ = [
    "AttentionLayer",
    "DecoderLayer",
    "GdnLayer",
    "RmsNorm",
    "RotaryRows",
    "RotaryTable",
]

RotaryRows = tuple[Tensor, Tensor]


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


class RotaryTable:
    """Cosines and sines of the rotary embedding for the positions asked for so far.

    The angle of pair i at position p is p * theta^(-2i / rotary_dim), in fp32; the pair consists of
    dimensions i and i + rotary_dim / 2. Both halves are stored, the first sines negated, so that
    rotating is x * cos + swapped_halves(x) * sin.

    Args:
        rotary_dim: number of rotated dimensions.
        theta: base of the frequencies.
        dtype: dtype of the stored values, fp32 or fp64.
        device: where the table lives.
    """

    def __init__(
        self, rotary_dim: int, theta: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rotary_dim = rotary_dim
        self.theta = theta
        self.dtype = dtype
        self.device = device
        self.num_positions = 0
        self._cos = self._sin = torch.empty(0, 1, rotary_dim, dtype=dtype, device=device)

    def reserve(self, num_positions: int) -> None:
        """Make positions 0 .. num_positions - 1 available; cheap when they already are."""
        if num_positions <= self.num_positions:
            return
        exponents = torch.arange(0, self.rotary_dim, 2, device=self.device).float()
        inv_freq = 1.0 / (self.theta ** (exponents / self.rotary_dim))
        positions = torch.arange(num_positions, device=self.device).float()
        angles = positions[:, None, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(self.dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(self.dtype)
        self.num_positions = num_positions

    def rows(self, positions: Tensor) -> RotaryRows:
        """Return (cos, sin), each [N, 1, rotary_dim], of the rows' positions [N]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate_(x: Tensor, rotary: RotaryRows) -> None:
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

    def forward(self, x: Tensor, residual: Tensor, step: Step, pool: GdnPool) -> Tensor:
        """Add rows [N, D], mixed along their requests, to others; appends to the logs in `pool`."""
        g = self.config.gdn
        keys, values = (-1, g.num_key_heads, g.key_dim), (-1, g.num_value_heads, g.value_dim)
        q_size, v_size = keys[1] * keys[2], values[1] * values[2]
        # split_with_sizes and view have no Python layer above them, unlike split and unflatten.
        qkv, z, b, a = F.linear(x, self.in_weight).split_with_sizes(
            (g.conv_dim, v_size, g.num_value_heads, g.num_value_heads), -1
        )
        q, k, v = self._convolve(qkv, step, pool).split_with_sizes((q_size, q_size, v_size), -1)
        y = self._mix(q.view(keys), k.view(keys), v.view(values), a, b, step, pool)
        y = self.norm.forward_gated(y, z.view(values))
        return torch.addmm(residual, y.flatten(-2), self.out_weight.t())

    def _convolve(self, qkv: Tensor, step: Step, pool: GdnPool) -> Tensor:
        logs = (qkv, self.conv_weight, pool.conv_ring, step.seq_len, step.cu_seqlens, step.slots)
        if step.is_prefill:
            return causal_conv1d.prefill(
                *logs, max_seqlen=step.max_rows, activation="silu", backend=self.backend
            )
        return causal_conv1d.verify(
            *logs, max_verify_tokens=step.max_rows, activation="silu", backend=self.backend
        )

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, step: Step, pool: GdnPool
    ) -> Tensor:
        rows = (q, k, v, a, b, self.A_log, self.dt_bias)
        logs = (pool.state, pool.ring, step.cu_seqlens, step.slots)
        if step.is_prefill:
            return gated_delta_rule.prefill(
                *rows,
                *logs,
                max_seqlen=step.max_rows,
                state_scale=pool.state_scale,
                backend=self.backend,
            )
        return gated_delta_rule.verify(
            *rows,
            *logs,
            max_verify_tokens=step.max_rows,
            is_fold=step.is_fold,
            state_scale=pool.state_scale,
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

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        rotary: RotaryRows,
        step: Step,
        pool: KvPool,
        page_table: Tensor,
    ) -> Tensor:
        """Add what rows [N, D] find in their requests' pages to others; appends there first."""
        c = self.config
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qk, v, gate = F.linear(x, self.in_weight).split_with_sizes(
            (q_size + kv_size, kv_size, q_size), -1
        )
        q, k = self._norm_and_rotate(qk, rotary).split_with_sizes(
            (c.num_attention_heads, c.num_kv_heads), 1
        )
        v = v.view(-1, c.num_kv_heads, c.head_dim)
        logs = (pool.k_pages, pool.v_pages, page_table, step.seq_len, step.cu_seqlens, step.slots)
        if step.is_prefill:
            y = paged_attention.prefill(
                q, k, v, *logs, max_seqlen=step.max_rows, backend=self.prefill_backend
            )
        else:
            y = paged_attention.verify(
                q, k, v, *logs, max_verify_tokens=step.max_rows, backend=self.verify_backend
            )
        y = y.flatten(-2).mul_(gate.sigmoid())
        return torch.addmm(residual, y, self.out_weight.t())

    def _norm_and_rotate(self, qk: Tensor, rotary: RotaryRows) -> Tensor:
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
        pool_index: which of `Pools.gdn` or `Pools.kv` is this layer's.
    """

    mixer: GdnLayer | AttentionLayer
    mlp: Mlp | MoeMlp
    mixer_norm: RmsNorm
    mlp_norm: RmsNorm
    pool_index: int

    def with_attention(self, *, verify_backend: str, prefill_backend: str) -> Self:
        """Return the same block, with other implementations of attention if it attends."""
        if not isinstance(self.mixer, AttentionLayer):
            return self
        mixer = replace(self.mixer, verify_backend=verify_backend, prefill_backend=prefill_backend)
        return replace(self, mixer=mixer)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryRows,
        step: Step,
        pool: GdnPool | KvPool,
        page_table: Tensor,
    ) -> Tensor:
        """Return the residual stream after this layer, [N, D]; appends to the logs in `pool`."""
        normed = self.mixer_norm.forward(x)
        if isinstance(self.mixer, GdnLayer):
            assert isinstance(pool, GdnPool)
            x = self.mixer.forward(normed, x, step, pool)
        else:
            assert isinstance(pool, KvPool)
            x = self.mixer.forward(normed, x, rotary, step, pool, page_table)
        return self.mlp.forward(self.mlp_norm.forward(x), x)
