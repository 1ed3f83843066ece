"""Who owns which slot and which KV pages.

A request reserves its slot and all the pages that it can ever need when it is admitted, so that a
running request never fails or has to be restarted; requests that do not fit wait. Pools that grew
give back what they took when nothing runs any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hybridspec.errors import CapacityError
from hybridspec.ops.ring import reset_slots
from hybridspec.runtime.memory import KvMemory
from hybridspec.runtime.pools import Pools

__all__ = ["Allocator"]

IDLE_BYTES = 64 << 20  # of slots, and of pages, that pools which grew keep when nothing runs
_SHARE = 0.9  # of free memory that growing may take: steps need some as well


@dataclass(slots=True)
class Allocator:
    """Hands out slots and pages of `pools`.

    Attributes:
        pools: the pools whose rows are handed out; grown here if `can_grow`.
        can_grow: whether a shortage enlarges the pools (CPU) or makes the request wait (GPU).
        max_slots: most slots, growing included.
        has_clean_values: whether pages are handed out with values of zero. FlashAttention-3 needs
            it: it multiplies what lies behind the last position by zero, and a request that
            overflowed may have left NaN there.
        free_bytes: says how much memory is free; None: pools grow until an allocation fails.
    """

    pools: Pools
    can_grow: bool
    max_slots: int
    has_clean_values: bool = False
    free_bytes: Callable[[], int] | None = None
    _free_slots: list[int] = field(init=False)
    _free_pages: list[int] = field(init=False)
    _pages: dict[int, list[int]] = field(init=False, default_factory=dict)
    _unclean: list[int] = field(init=False, default_factory=list)
    _is_full: bool = field(init=False, default=False)  # growing failed; until a request ends

    def __post_init__(self) -> None:
        # Lists are used as stacks: the last entry is the lowest number.
        self._free_slots = list(range(self.pools.num_slots))[::-1]
        self._free_pages = list(range(self.pools.num_pages))[::-1]

    @property
    def num_live(self) -> int:
        return len(self._pages)

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` rows take."""
        return -(-num_tokens // self.pools.page_size)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of this length could run if nothing else did."""
        pages = self.pages_for(num_tokens)
        if pages > self.pools.max_pages_per_slot:
            return False
        return self.can_grow or pages <= self.pools.num_pages

    def acquire(self, num_tokens: int) -> int | None:
        """Reserve a slot with pages for `num_tokens` rows; `clean` must follow before it is used.

        Returns:
            The slot, or None if the request has to wait.

        Raises:
            CapacityError: if the pools cannot grow and no request is there that could end.
        """
        pages = self.pages_for(num_tokens)
        if not self._ensure(pages):
            if self._is_full and not self._pages:
                self._is_full = False  # the next one tries again
                raise CapacityError(
                    f"prompt: {num_tokens} tokens, new ones included, do not fit the memory; lower "
                    f"max_tokens"
                )
            return None
        slot, mine = self._free_slots[-1], self._free_pages[: -pages - 1 : -1]
        pools = self.pools
        row = torch.full((pools.page_table.shape[1],), -1, dtype=torch.int32)
        row[:pages] = torch.tensor(mine, dtype=torch.int32)
        pools.page_table[slot] = row.to(pools.device)
        self._unclean.append(slot)
        if self.has_clean_values:
            pages_of_slot = pools.page_table[slot, :pages].to(torch.int64)
            for memory in pools.of_kind(KvMemory):
                memory.v_pages.index_fill_(0, pages_of_slot, 0.0)
        # Last, so that nothing is lost where the above is interrupted.
        self._pages[slot] = mine
        self._free_slots.pop()
        del self._free_pages[-pages:]
        return slot

    def clean(self) -> None:
        """Zero cursors and states of the slots handed out since the last call, all in one go.

        Comes before anything runs in them.
        """
        if self._unclean:
            device = self.pools.device
            slots = torch.tensor(self._unclean, dtype=torch.int32).to(device)
            self._unclean.clear()
            reset_slots(self.pools.start_tensors(), slots)

    def release(self, slot: int) -> None:
        """Give a slot and its pages back."""
        self._free_pages += reversed(self._pages.pop(slot))
        self._free_slots.append(slot)
        self._is_full = False
        if self.can_grow and not self._pages:
            self._give_back()

    def _give_back(self) -> None:
        """Make pools small again that nobody uses, and that take more than is worth keeping."""
        pools = self.pools
        num_slots = max(IDLE_BYTES // pools.slot_bytes(), 1)
        num_pages = max(IDLE_BYTES // pools.page_bytes(), 1)
        if pools.num_slots > num_slots or pools.num_pages > num_pages:
            pools.shrink(num_slots, num_pages)
            self.__post_init__()

    def _ensure(self, pages: int) -> bool:
        pools = self.pools
        if self.can_grow and not self._is_full:
            if not self._free_slots and pools.num_slots < self.max_slots:
                old = pools.num_slots
                self._grow(self._grow_slots, min(self.max_slots, 2 * old), old + 1)
                self._free_slots = list(range(old, pools.num_slots))[::-1]
            if self._free_slots and len(self._free_pages) < pages:
                old = pools.num_pages
                needed = old + pages - len(self._free_pages)
                self._grow(self._grow_pages, max(2 * old, old + pages), needed)
                new = list(range(old, pools.num_pages))[::-1]
                self._free_pages = new + self._free_pages
        return bool(self._free_slots) and len(self._free_pages) >= pages

    def _grow(self, grow: Callable[[int], bool], wanted: int, needed: int) -> None:
        """Enlarge a pool, by less where the memory does not hold more; note if it holds nothing."""
        for size in (wanted, needed):
            try:
                if grow(size):
                    return
            except RuntimeError as error:  # torch has a type for this on GPUs only
                if "allocate" not in str(error):
                    raise
        self._is_full = True

    def _grow_slots(self, num_slots: int) -> bool:
        if not self._has_room(num_slots, self.pools.num_pages):
            return False
        self.pools.grow_slots(num_slots)
        return True

    def _grow_pages(self, num_pages: int) -> bool:
        if not self._has_room(self.pools.num_slots, num_pages):
            return False
        self.pools.grow_pages(num_pages)
        return True

    def _has_room(self, num_slots: int, num_pages: int) -> bool:
        """Whether the memory holds pools of these sizes; an allocation alone would not tell."""
        if self.free_bytes is None:
            return True
        return self.pools.growth_bytes(num_slots, num_pages) <= _SHARE * self.free_bytes()
