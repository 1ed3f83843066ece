"""The memories of all requests, one pool per layer, indexed by slot or by page.

Every memory is an append-only log with a cursor. Nothing here is ever copied to speculate: rows
past a cursor are dead and the next append overwrites them. Pools grow only when a request is
admitted, never inside a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from hybridspec.runtime.memory import TOKEN_DTYPE, Cursors, KvMemory, MemorySpecs

__all__ = ["Pools"]

_Memory = TypeVar("_Memory")


class Pools:
    """All memories of all requests on one device.

    Attributes:
        specs: what the model's layers keep.
        max_pages_per_slot: most pages of one slot.
        page_table: [S, pages] int32, physical page of each logical page; -1 where unused. Its width
            is the most pages that a slot can hold now.
        seq_len, ring_start, history_len: [S] int32, the cursors that all layers share.
        token_pages: [P, page_size] int32, the log of token ids, beside the keys.
    """

    def __init__(
        self,
        specs: MemorySpecs,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_pages_per_slot: int,
        device: torch.device,
    ) -> None:
        self.specs = specs
        self.page_size = page_size
        self.max_pages_per_slot = max_pages_per_slot
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        width = min(max_pages_per_slot, num_pages)
        self.page_table = torch.full((num_slots, width), -1, dtype=torch.int32, device=device)
        self.seq_len = zeros(num_slots)
        self.ring_start = zeros(num_slots)
        self.history_len = zeros(num_slots)
        self.token_pages = zeros(num_pages, page_size, dtype=TOKEN_DTYPE)
        # Tensors of each layer by name, the head's last; and the views that layers are given.
        self._slot_tensors = [
            {name: zeros(num_slots, *t.shape, dtype=t.dtype) for name, t in spec.per_slot.items()}
            for spec in specs.all()
        ]
        self._page_tensors = [
            {
                name: zeros(num_pages, page_size, *t.shape, dtype=t.dtype)
                for name, t in spec.per_token.items()
            }
            for spec in specs.all()
        ]
        self._memories: list[Any] = [None] * len(self._slot_tensors)
        for i in range(len(self._memories)):
            self._view(i)

    def _view(self, index: int) -> None:
        """Make the view of a layer's memory anew, over the tensors and cursors of now."""
        tensors = self._slot_tensors[index] | self._page_tensors[index]
        self._memories[index] = self.specs.all()[index].view(tensors, self._cursors())

    def _cursors(self) -> Cursors:
        return Cursors(
            seq_len=self.seq_len,
            ring_start=self.ring_start,
            history_len=self.history_len,
            page_table=self.page_table,
            max_window=self.max_window,
        )

    @property
    def memories(self) -> tuple[Any, ...]:
        """The memory of each layer of the trunk, in order; valid until the pools grow."""
        return tuple(self._memories[: len(self.specs.layers)])

    def memories_at(
        self, seq_len: Tensor, ring_start: Tensor, history_len: Tensor
    ) -> tuple[Any, ...]:
        """Return the same memories with other cursors, [S] int32 each."""
        cursors = replace(
            self._cursors(), seq_len=seq_len, ring_start=ring_start, history_len=history_len
        )
        return tuple(
            spec.view(slots | pages, cursors)
            for spec, slots, pages in zip(
                self.specs.layers, self._slot_tensors, self._page_tensors, strict=False
            )
        )

    @property
    def head_memory(self) -> KvMemory | None:
        """The draft head's memory, None where there is none; valid until the pools grow."""
        return None if self.specs.head is None else self._memories[-1]

    def of_kind(self, kind: type[_Memory]) -> list[_Memory]:
        """List the memories of one kind, the draft head's last."""
        return [memory for memory in self._memories if isinstance(memory, kind)]

    @property
    def ring_capacity(self) -> int:
        """Rows of every ring."""
        return self.specs.options.ring_capacity

    @property
    def max_window(self) -> int:
        """Most live rows of every ring."""
        return self.specs.options.max_window

    @property
    def num_slots(self) -> int:
        return self.seq_len.shape[0]

    @property
    def num_pages(self) -> int:
        return self.token_pages.shape[0]

    def start_tensors(self) -> list[Tensor]:
        """What must be zero where a request begins: cursors and states.

        Rows of rings that no cursor covers are never read, whatever they hold.
        """
        cursors = [self.seq_len, self.ring_start, self.history_len]
        for spec, tensors in zip(self.specs.all(), self._slot_tensors, strict=True):
            cursors += [tensors[name] for name, one in spec.per_slot.items() if one.is_state]
        return cursors

    def slot_tensors(self) -> list[Tensor]:
        """Every tensor whose first dimension is the slot: what copy and reset act on."""
        cursors = [self.seq_len, self.ring_start, self.history_len]
        return cursors + [t for tensors in self._slot_tensors for t in tensors.values()]

    def folded_tensors(self) -> list[Tensor]:
        """Every tensor that matters of a slot whose window is empty, as after a prefill."""
        cursors = [self.seq_len, self.ring_start, self.history_len]
        for spec, tensors in zip(self.specs.all(), self._slot_tensors, strict=True):
            cursors += [tensors[name] for name, one in spec.per_slot.items() if not one.is_window]
        return cursors

    def slot_bytes(self) -> int:
        """Bytes of one slot: states, rings and cursors, without pages."""
        return self.specs.request_bytes() + 4 * (3 + self.page_table.shape[1])

    def page_bytes(self) -> int:
        """Bytes of one page over all layers, token ids included."""
        return self.page_size * self.specs.token_bytes()

    def grow_slots(self, num_slots: int) -> Self:
        """Enlarge every slot-indexed pool, keeping what is there, also if memory runs out."""
        return self._grow(self._resize_slots, self.num_slots, num_slots)

    def _grow(self, resize: Callable[[int], None], old: int, new: int) -> Self:
        try:
            resize(new)
        except BaseException:
            resize(old)
            raise
        return self

    def _resize_slots(self, num_slots: int) -> None:
        self.page_table = _resized(self.page_table, num_slots, fill=-1)
        self.seq_len = _resized(self.seq_len, num_slots)
        self.ring_start = _resized(self.ring_start, num_slots)
        self.history_len = _resized(self.history_len, num_slots)
        self._change(self._slot_tensors, lambda tensor: _resized(tensor, num_slots))

    def grow_pages(self, num_pages: int) -> Self:
        """Enlarge every page-indexed pool, keeping what is there, also if memory runs out."""
        return self._grow(self._resize_pages, self.num_pages, num_pages)

    def _resize_pages(self, num_pages: int) -> None:
        width = min(self.max_pages_per_slot, num_pages)
        self.page_table = _resized(self.page_table.t(), width, fill=-1).t().contiguous()
        self.token_pages = _resized(self.token_pages, num_pages)
        self._change(self._page_tensors, lambda tensor: _resized(tensor, num_pages))

    @torch.inference_mode()
    def shrink(self, num_slots: int, num_pages: int) -> None:
        """Make all pools anew with at most these sizes; what they hold is lost."""
        num_slots, num_pages = min(num_slots, self.num_slots), min(num_pages, self.num_pages)
        width = min(self.max_pages_per_slot, num_pages)
        self.page_table = self.page_table.new_full((num_slots, width), -1)
        self.seq_len = _emptied(self.seq_len, num_slots)
        self.ring_start = _emptied(self.ring_start, num_slots)
        self.history_len = _emptied(self.history_len, num_slots)
        self.token_pages = _emptied(self.token_pages, num_pages)
        self._change(self._slot_tensors, lambda tensor: _emptied(tensor, num_slots))
        self._change(self._page_tensors, lambda tensor: _emptied(tensor, num_pages))

    def _change(self, layers: list[dict[str, Tensor]], change: Callable[[Tensor], Tensor]) -> None:
        # Layer by layer, views included, so that the peak is one layer's copy.
        for i, tensors in enumerate(layers):
            layers[i] = {name: change(tensor) for name, tensor in tensors.items()}
            del tensors
            self._view(i)

    def growth_bytes(self, num_slots: int, num_pages: int) -> int:
        """Bytes that growing to these sizes takes at its peak, at which a layer is there twice."""
        specs = self.specs.all()
        slots, pages = num_slots - self.num_slots, num_pages - self.num_pages
        copied = 0
        if slots > 0:
            copied = self.num_slots * max(spec.slot_bytes() for spec in specs)
        if pages > 0:
            rows = self.num_pages * self.page_size
            copied = max(copied, rows * max(spec.token_bytes() for spec in specs))
        return slots * self.slot_bytes() + pages * self.page_bytes() + copied


def _emptied(tensor: Tensor, size: int) -> Tensor:
    return tensor.new_zeros((size, *tensor.shape[1:]))


def _resized(tensor: Tensor, size: int, *, fill: int = 0) -> Tensor:
    """Return a larger copy, or a view of the first rows, which takes no memory."""
    if size <= tensor.shape[0]:
        return tensor[:size]
    larger = tensor.new_full((size, *tensor.shape[1:]), fill)
    larger[: tensor.shape[0]] = tensor
    return larger
