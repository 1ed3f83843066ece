"""The memories of all requests, one pool per kind and layer, indexed by slot or by page.

Every memory is an append-only log with a cursor. Nothing here is ever copied to speculate: rows
past a cursor are dead and the next append overwrites them. Pools grow only when a request is
admitted, never inside a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.ring import RingView

__all__ = ["GdnPool", "KvPool", "PoolGeometry", "Pools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGeometry:
    """Sizes of a model's memories.

    Attributes:
        num_gdn_layers: GDN layers of the target model.
        num_kv_layers: attention layers, the draft head's last.
        num_key_heads, num_value_heads, key_dim, value_dim: H, HV, K, V of a GDN layer.
        conv_channels, conv_width: channels and taps of the causal convolution.
        num_kv_heads, kv_head_dim: heads and head size of the KV cache.
        ring_capacity: R, rows of the ring, a power of two.
        max_window: W, most live rows of the ring.
        conv_ring_capacity: rows of the ring of raw convolution inputs, a power of two.
    """

    num_gdn_layers: int
    num_kv_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int
    num_kv_heads: int
    kv_head_dim: int
    ring_capacity: int = 32
    max_window: int = 16
    conv_ring_capacity: int = 16

    def state_bytes(self, state_dtype: torch.dtype) -> int:
        """Bytes of one request's recurrent states, all layers: what one snapshot would copy."""
        rows = self.num_gdn_layers * self.num_value_heads * self.value_dim
        scales = 0
        if state_dtype == torch.int8:
            scales = self.key_dim // GROUP_SIZE * SCALE_DTYPE.itemsize
        return rows * (self.key_dim * state_dtype.itemsize + scales)

    def ring_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one request's rings of (u, k, cumulative log-decay), all layers."""
        row = (self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim) * (
            dtype.itemsize
        ) + self.num_value_heads * 4
        return self.num_gdn_layers * self.ring_capacity * row

    def conv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one request's rings of raw convolution inputs, all layers."""
        return self.num_gdn_layers * self.conv_ring_capacity * self.conv_channels * dtype.itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token adds, all attention layers."""
        return self.num_kv_layers * 2 * self.num_kv_heads * self.kv_head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnPool:
    """Memories of one GDN layer: state [S, HV, V, K], its ring, conv_ring [S, R_conv, C].

    An int8 state has factors, state_scale [S, HV, V, K / 32].
    """

    state: Tensor
    state_scale: Tensor | None
    ring: RingView
    conv_ring: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """Pages of one attention layer: k_pages and v_pages [P, page_size, Hkv, D]."""

    k_pages: Tensor
    v_pages: Tensor


class Pools:
    """All memories of all requests on one device.

    Attributes:
        gdn: one GdnPool per GDN layer.
        kv: one KvPool per attention layer, the draft head's last.
        page_table: [S, max_pages] int32, physical page of each logical page; -1 where unused.
        seq_len, ring_start, history_len: [S] int32, the cursors that all layers share.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_pages_per_slot: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.page_size = page_size
        self.dtype = dtype
        self.state_dtype = state_dtype
        self.device = device
        g = geometry

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        def state_scale() -> Tensor | None:
            shape = (num_slots, g.num_value_heads, g.value_dim, g.key_dim // GROUP_SIZE)
            return zeros(*shape, dtype=SCALE_DTYPE) if state_dtype == torch.int8 else None

        self.page_table = torch.full(
            (num_slots, max_pages_per_slot), -1, dtype=torch.int32, device=device
        )
        self.seq_len = zeros(num_slots, dtype=torch.int32)
        self.ring_start = zeros(num_slots, dtype=torch.int32)
        self.history_len = zeros(num_slots, dtype=torch.int32)
        self.gdn = [
            GdnPool(
                state=zeros(
                    num_slots, g.num_value_heads, g.value_dim, g.key_dim, dtype=state_dtype
                ),
                state_scale=state_scale(),
                ring=self._ring(
                    zeros(num_slots, g.num_key_heads, g.ring_capacity, g.key_dim, dtype=dtype),
                    zeros(num_slots, g.num_value_heads, g.ring_capacity, g.value_dim, dtype=dtype),
                    zeros(num_slots, g.num_value_heads, g.ring_capacity, dtype=torch.float32),
                ),
                conv_ring=zeros(num_slots, g.conv_ring_capacity, g.conv_channels, dtype=dtype),
            )
            for _ in range(g.num_gdn_layers)
        ]
        page_shape = (num_pages, page_size, g.num_kv_heads, g.kv_head_dim)
        self.kv = [
            KvPool(k_pages=zeros(*page_shape, dtype=dtype), v_pages=zeros(*page_shape, dtype=dtype))
            for _ in range(g.num_kv_layers)
        ]

    def _ring(self, k: Tensor, u: Tensor, cum_log_decay: Tensor) -> RingView:
        return RingView(
            k=k,
            u=u,
            cum_log_decay=cum_log_decay,
            ring_start=self.ring_start,
            history_len=self.history_len,
            max_window=self.geometry.max_window,
        )

    @property
    def num_slots(self) -> int:
        return self.seq_len.shape[0]

    @property
    def num_pages(self) -> int:
        return self.kv[0].k_pages.shape[0] if self.kv else 0

    def slot_tensors(self) -> list[Tensor]:
        """Every tensor whose first dimension is the slot: what copy and reset act on."""
        tensors = [self.seq_len, self.ring_start, self.history_len]
        for pool in self.gdn:
            ring = pool.ring
            tensors += [pool.state, ring.k, ring.u, ring.cum_log_decay, pool.conv_ring]
            if pool.state_scale is not None:
                tensors.append(pool.state_scale)
        return tensors

    def slot_bytes(self) -> int:
        """Bytes of one slot: states, rings and cursors, without pages."""
        g = self.geometry
        fixed = (
            g.state_bytes(self.state_dtype) + g.ring_bytes(self.dtype) + g.conv_bytes(self.dtype)
        )
        return fixed + 4 * (3 + self.page_table.shape[1])

    def page_bytes(self) -> int:
        """Bytes of one page of keys and values over all attention layers."""
        return self.page_size * self.geometry.kv_bytes_per_token(self.dtype)

    def grow_slots(self, num_slots: int) -> Self:
        """Enlarge every slot-indexed pool, keeping what is there, also if memory runs out."""
        old = self.num_slots
        try:
            self._resize_slots(num_slots)
        except BaseException:
            self._resize_slots(old)
            raise
        return self

    def _resize_slots(self, num_slots: int) -> None:
        self.page_table = _resized(self.page_table, num_slots, fill=-1)
        self.seq_len = _resized(self.seq_len, num_slots)
        self.ring_start = _resized(self.ring_start, num_slots)
        self.history_len = _resized(self.history_len, num_slots)
        for i, pool in enumerate(self.gdn):  # layer by layer, so that the peak is one layer's copy
            ring, scale = pool.ring, pool.state_scale
            self.gdn[i] = GdnPool(
                state=_resized(pool.state, num_slots),
                state_scale=scale if scale is None else _resized(scale, num_slots),
                ring=self._ring(
                    _resized(ring.k, num_slots),
                    _resized(ring.u, num_slots),
                    _resized(ring.cum_log_decay, num_slots),
                ),
                conv_ring=_resized(pool.conv_ring, num_slots),
            )

    def grow_pages(self, num_pages: int) -> Self:
        """Enlarge the KV pools, keeping what is there, also if memory runs out."""
        old = self.num_pages
        try:
            self._resize_pages(num_pages)
        except BaseException:
            self._resize_pages(old)
            raise
        return self

    def _resize_pages(self, num_pages: int) -> None:
        for i, pool in enumerate(self.kv):
            self.kv[i] = KvPool(
                k_pages=_resized(pool.k_pages, num_pages),
                v_pages=_resized(pool.v_pages, num_pages),
            )


def _resized(tensor: Tensor, size: int, *, fill: int = 0) -> Tensor:
    """Return a larger copy, or a view of the first rows, which takes no memory."""
    if size <= tensor.shape[0]:
        return tensor[:size]
    larger = tensor.new_full((size, *tensor.shape[1:]), fill)
    larger[: tensor.shape[0]] = tensor
    return larger
