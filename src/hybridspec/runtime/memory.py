"""What one layer remembers of every request: logs with a cursor, as the layer is given them.

A layer states its memory (`MemorySpec`): which tensors a slot and a token need. Pools, byte counts
and an engine's description follow from that, so another kind of layer needs a memory of its own and
nothing else here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE
from hybridspec.ops.ring import RawRingView, RingView

__all__ = [
    "Cursors",
    "GdnMemory",
    "KvMemory",
    "MemoryOptions",
    "MemorySpec",
    "MemorySpecs",
    "TensorSpec",
]

TOKEN_DTYPE = torch.int32  # of the log of token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursors:
    """What the memories of all layers share, keyed by slot.

    Attributes:
        seq_len: [S] int32, rows stored.
        ring_start: [S] int32, first live ring row.
        history_len: [S] int32, live ring rows.
        page_table: [S, max_pages] int32, physical page of each logical page; -1 where unused.
        max_window: most live ring rows.
    """

    seq_len: Tensor
    ring_start: Tensor
    history_len: Tensor
    page_table: Tensor
    max_window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a memory.

    Attributes:
        shape: sizes behind those of the pool: [S, *shape] where it is kept for a slot,
            [num_pages, page_size, *shape] where it is kept for a token.
        dtype: element type.
        part: what it is counted as when an engine says what a request costs.
        is_state: whether decoding with snapshots would copy it for every verified row.
        is_window: whether it holds the window's rows, nothing where no row is live.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: str
    is_state: bool = False
    is_window: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes for one slot or one token."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """What one layer keeps.

    Attributes:
        per_slot: tensors that a request holds whatever its length, by name.
        per_token: tensors that every token adds to, by name.
        view: makes the memory that the layer is given, of both kinds of tensors and the cursors.
    """

    per_slot: Mapping[str, TensorSpec]
    per_token: Mapping[str, TensorSpec]
    view: Callable[[Mapping[str, Tensor], Cursors], Any]

    def slot_bytes(self) -> int:
        """Bytes that one request holds whatever its length."""
        return sum(tensor.num_bytes for tensor in self.per_slot.values())

    def token_bytes(self) -> int:
        """Bytes that one token adds."""
        return sum(tensor.num_bytes for tensor in self.per_token.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What a layer has to know to state its memory.

    Attributes:
        dtype: of activations; logs keep them as they are.
        state_dtype: of recurrent states.
        max_verify_tokens: most rows of one request in a step that verifies.
        ring_capacity: R, rows of a ring, a power of two.
        max_window: W, most live rows of a ring.
        is_raw: whether rings keep rows as they came.
        is_aligned: whether windows are folded every W committed rows of a request, and the rows of
            a step never cross such a border.
    """

    dtype: torch.dtype
    state_dtype: torch.dtype
    max_verify_tokens: int = 8
    ring_capacity: int = 32
    max_window: int = 16
    is_aligned: bool = False
    is_raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpecs:
    """What all layers of a model keep, and the log of token ids beside them.

    Attributes:
        layers: one for each layer of the trunk, in order.
        head: of the draft head; None where there is none or it is not run.
        options: what they were made from.
    """

    layers: tuple[MemorySpec, ...]
    head: MemorySpec | None
    options: MemoryOptions

    def all(self) -> tuple[MemorySpec, ...]:
        """Every layer's, the head's last."""
        return self.layers if self.head is None else (*self.layers, self.head)

    def _slot_tensors(self) -> Iterator[TensorSpec]:
        for spec in self.all():
            yield from spec.per_slot.values()

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes that one request holds whatever its length, by what they are."""
        parts: dict[str, int] = {}
        for tensor in self._slot_tensors():
            parts[tensor.part] = parts.get(tensor.part, 0) + tensor.num_bytes
        return parts

    def request_bytes(self) -> int:
        """Bytes that one request holds whatever its length."""
        return sum(spec.slot_bytes() for spec in self.all())

    def state_bytes(self) -> int:
        """Bytes of one request's recurrent states, all layers: what one snapshot would copy."""
        return sum(tensor.num_bytes for tensor in self._slot_tensors() if tensor.is_state)

    def token_bytes(self) -> int:
        """Bytes that one token adds: what the layers keep of it, and its id."""
        return TOKEN_DTYPE.itemsize + sum(spec.token_bytes() for spec in self.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnMemory:
    """Memory of a Gated DeltaNet layer: a checkpoint, its ring, and the convolution's inputs.

    Attributes:
        state: [S, HV, V, K], the recurrent state at the last fold.
        state_scale: [S, HV, V, K / 32], factors of an int8 state, None of others.
        ring: rows since the last fold, and their cursors.
        conv_ring: [S, R_conv, C], raw inputs of the convolution, row = position mod R_conv.
        seq_len: [S] int32, rows stored; in.
    """

    state: Tensor
    state_scale: Tensor | None
    ring: RingView | RawRingView
    conv_ring: Tensor
    seq_len: Tensor

    @classmethod
    def spec(
        cls,
        options: MemoryOptions,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
    ) -> MemorySpec:
        """State the memory of a layer of H key heads of K and HV value heads of V."""
        dtype, rows = options.dtype, options.ring_capacity
        conv_rows = conv_width - 1 + options.max_verify_tokens
        conv_shape = (
            1 << (conv_rows - 1).bit_length(),
            2 * num_key_heads * key_dim + num_value_heads * value_dim,
        )

        def state(last: int, kind: torch.dtype) -> TensorSpec:
            shape = (num_value_heads, value_dim, last)
            return TensorSpec(shape=shape, dtype=kind, part="GDN state", is_state=True)

        def ring(*shape: int, kind: torch.dtype = dtype) -> TensorSpec:
            return TensorSpec(shape=shape, dtype=kind, part="GDN ring", is_window=True)

        tensors = {"state": state(key_dim, options.state_dtype)}
        if options.state_dtype is torch.int8:
            tensors["state_scale"] = state(key_dim // GROUP_SIZE, SCALE_DTYPE)
        tensors["k"] = ring(num_key_heads, rows, key_dim)
        tensors["v" if options.is_raw else "u"] = ring(num_value_heads, rows, value_dim)
        for name in ("a", "b") if options.is_raw else ("cum_log_decay",):
            tensors[name] = ring(num_value_heads, rows, kind=torch.float32)
        tensors["conv_ring"] = TensorSpec(shape=conv_shape, dtype=dtype, part="conv ring")
        return MemorySpec(per_slot=tensors, per_token={}, view=cls._view)

    @classmethod
    def _view(cls, tensors: Mapping[str, Tensor], cursors: Cursors) -> GdnMemory:
        shared = (cursors.ring_start, cursors.history_len, cursors.max_window)
        k, u = tensors["k"], tensors.get("u")
        view = (
            RawRingView(k, tensors["v"], tensors["a"], tensors["b"], *shared)
            if u is None
            else RingView(k, u, tensors["cum_log_decay"], *shared)
        )
        return cls(
            state=tensors["state"],
            state_scale=tensors.get("state_scale"),
            ring=view,
            conv_ring=tensors["conv_ring"],
            seq_len=cursors.seq_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """Memory of an attention layer: pages of keys and values.

    Attributes:
        k_pages, v_pages: [P, page_size, Hkv, D].
        page_table: [S, max_pages] int32, physical page of each logical page; in.
        seq_len: [S] int32, rows stored; in.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    seq_len: Tensor

    @classmethod
    def spec(cls, options: MemoryOptions, *, num_heads: int, head_dim: int) -> MemorySpec:
        """State the memory of a layer of Hkv heads of D."""
        pages = TensorSpec(shape=(num_heads, head_dim), dtype=options.dtype, part="keys and values")
        return MemorySpec(
            per_slot={}, per_token={"k_pages": pages, "v_pages": pages}, view=cls._view
        )

    @classmethod
    def _view(cls, tensors: Mapping[str, Tensor], cursors: Cursors) -> KvMemory:
        return cls(**tensors, page_table=cursors.page_table, seq_len=cursors.seq_len)
