"""Who owns which slot and which KV pages.

A request reserves its slot and the pages of its prompt when it is admitted, and further pages as
it grows; who has to wait, or to give its pages up, is the caller's to decide. Pools that grew give
back what they took when nothing runs any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hybridspec.errors import CapacityError
from hybridspec.ops.ring import reset_slots
from hybridspec.runtime.memory import KvMemory
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.upload import upload_parts

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
    _written: dict[int, int] = field(init=False, default_factory=dict)  # of slots that grew
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

    def acquire(self, num_tokens: int, *, num_spare: int = 0) -> int | None:
        """Reserve a slot with pages for `num_tokens` rows; `prepare` makes it ready for use.

        Args:
            num_tokens: rows.
            num_spare: pages that have to be left for others, where the pools cannot grow.

        Returns:
            The slot, or None if the request has to wait.

        Raises:
            CapacityError: if the pools cannot grow and no request is there that could end.
        """
        pages = self.pages_for(num_tokens)
        if not self._ensure(pages):
            if self._is_full and not self._pages:
                raise self.too_large(num_tokens)
            return None
        is_fixed = self._is_full or not self.can_grow
        if num_spare and is_fixed and len(self._free_pages) < pages + num_spare:
            return None
        slot = self._free_slots[-1]
        self._pages[slot] = self._take(pages)
        self._free_slots.pop()
        return slot

    def too_large(self, num_tokens: int) -> CapacityError:
        """Say that so many tokens of one request are more than the memory holds."""
        self._is_full = False  # the next one tries again
        return CapacityError(
            f"prompt: {num_tokens} tokens, new ones included, do not fit the memory; lower "
            f"max_tokens"
        )

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Give a slot pages for `num_tokens` rows; `upload` tells the page table.

        Returns:
            Whether there are enough; if not, it has what it had.
        """
        mine = self._pages[slot]
        more = self.pages_for(num_tokens) - len(mine)
        if more > 0:
            if not self._ensure_pages(more):
                return False
            self._written.setdefault(slot, len(mine))
            mine += self._take(more)
        return True

    def room_of(self, slot: int) -> int:
        """Rows that the pages of a slot hold."""
        return len(self._pages[slot]) * self.pools.page_size

    def _take(self, count: int) -> list[int]:
        pages = self._free_pages[: -count - 1 : -1]
        del self._free_pages[len(self._free_pages) - count :]
        return pages

    def pages_of(self, slot: int) -> Sequence[int]:
        """The pages that a slot holds, in the order of its tokens."""
        return self._pages[slot]

    def prepare(self, slots: Sequence[int]) -> None:
        """Write the page tables of slots that were reserved, and clear what they held before.

        Nothing is waited for, and all slots share the copy and the launches.
        """
        pools, mine = self.pools, [self._pages[slot] for slot in slots]
        width = max(map(len, mine))
        table, pages = array("i"), array("i")
        for one in mine:
            pages.extend(one)
            table.extend([*one, *[-1] * (width - len(one))])
        numbers, entries, held = upload_parts([array("i", slots), table, pages], pools.device)
        pools.page_table.index_fill_(0, numbers.long(), -1)
        pools.page_table[:, :width].index_copy_(0, numbers.long(), entries.view(-1, width))
        reset_slots(pools.start_tensors(), numbers)
        self._clean(held)

    @property
    def has_grown(self) -> bool:
        """Whether the page table lacks what `extend` added: the next step has to `upload`."""
        return bool(self._written)

    def upload(self, lanes: Sequence[int]) -> Tensor:
        """Write the new pages of all slots into the page table, and bring `lanes` along.

        Nothing is waited for; there is one copy.

        Args:
            lanes: what else a step wants to have on the device; may be empty.

        Returns:
            `lanes` there, int32.
        """
        pools, width = self.pools, self.pools.page_table.shape[1]
        places, pages = array("i"), array("i")
        for slot, first in self._written.items():
            new = self._pages[slot][first:]
            places.extend(range(slot * width + first, slot * width + first + len(new)))
            pages.extend(new)
        self._written.clear()
        there, at, entries = upload_parts([array("i", lanes), places, pages], pools.device)
        if pages:
            pools.page_table.view(-1).index_copy_(0, at.long(), entries)
            self._clean(entries)
        return there

    def _clean(self, pages: Tensor) -> None:
        if self.has_clean_values:
            for memory in self.pools.of_kind(KvMemory):
                memory.v_pages.index_fill_(0, pages.long(), 0.0)

    def release(self, slot: int) -> None:
        """Give a slot and its pages back."""
        self._free_pages += reversed(self._pages.pop(slot))
        self._written.pop(slot, None)
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
        is_short = not self._free_slots and pools.num_slots < self.max_slots
        if is_short and self.can_grow and not self._is_full:
            old = pools.num_slots
            self._grow(self._grow_slots, min(self.max_slots, 2 * old), old + 1)
            self._free_slots = list(range(old, pools.num_slots))[::-1]
        return bool(self._free_slots) and self._ensure_pages(pages)

    def _ensure_pages(self, pages: int) -> bool:
        pools = self.pools
        if self.can_grow and not self._is_full and len(self._free_pages) < pages:
            old = pools.num_pages
            needed = old + pages - len(self._free_pages)
            self._grow(self._grow_pages, max(2 * old, old + pages), needed)
            new = list(range(old, pools.num_pages))[::-1]
            self._free_pages = new + self._free_pages
        return len(self._free_pages) >= pages

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
