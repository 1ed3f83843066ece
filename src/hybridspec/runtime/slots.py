"""Ownership of slots and KV pages.

A request reserves its slot and the pages of its prompt when it is admitted, and further pages as
it grows; who has to wait, or to give its pages up, is the caller's to decide. Prefixes of prompts
are kept in memory that is free, and given up when a request needs it. Pools that grew give back
what they took when nothing runs any more.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hybridspec.errors import CapacityError
from hybridspec.ops.ring import copy_slots, reset_slots
from hybridspec.runtime.memory import KvMemory
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.prefixes import Prefix, Prefixes
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
        max_slots: most slots of requests, growing included.
        has_clean_values: whether pages are handed out with values of zero. FlashAttention-3 needs
            it: it multiplies what lies behind the last position by zero, and a request that
            overflowed may have left NaN there.
        prefixes: those that are kept; each takes a slot, besides those of requests.
        free_bytes: says how much memory is free; None: pools grow until an allocation fails.
    """

    pools: Pools
    can_grow: bool
    max_slots: int
    has_clean_values: bool = False
    prefixes: Prefixes = field(default_factory=Prefixes)
    free_bytes: Callable[[], int] | None = None
    _free_slots: list[int] = field(init=False)
    _free_pages: list[int] = field(init=False)
    _pages: dict[int, list[int]] = field(init=False, default_factory=dict)
    _users: Counter[int] = field(init=False, default_factory=Counter)  # requests on a page
    _keepers: Counter[int] = field(init=False, default_factory=Counter)  # prefixes on a page
    _begun: dict[int, Prefix] = field(init=False, default_factory=dict)  # until `prepare`
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
        """Pages that no request holds; prefixes that hold some are given up at need."""
        return self.pools.num_pages - len(self._users)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` rows take."""
        return -(-num_tokens // self.pools.page_size)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of this length could run if nothing else did."""
        pages = self.pages_for(num_tokens)
        if pages > self.pools.max_pages_per_slot:
            return False
        return self.can_grow or pages <= self.pools.num_pages

    def acquire(
        self, num_tokens: int, *, prefix: Prefix | None = None, num_spare: int = 0
    ) -> int | None:
        """Reserve a slot with pages for `num_tokens` rows; `prepare` makes it ready for use.

        Args:
            num_tokens: rows.
            prefix: a prefix to begin with, whose pages are shared and whose states are copied.
            num_spare: pages that have to be left for others, where the pools cannot grow.

        Returns:
            The slot, or None if the request has to wait.

        Raises:
            CapacityError: if the pools cannot grow and no request is there that could end.
        """
        shared = [] if prefix is None else list(prefix.pages)
        self._users.update(shared)  # so that they stay if room has to be made
        slot = None
        try:
            slot = self._take_slot(self.pages_for(num_tokens) - len(shared), num_spare)
        finally:
            if slot is None:
                self._leave(shared)
        if slot is None:
            if self._is_full and not self._pages:
                raise self.too_large(num_tokens)
            return None
        self._pages[slot] = [*shared, *self._pages[slot]]
        if prefix is not None:
            self._begun[slot] = prefix
        return slot

    def _take_slot(self, pages: int, num_spare: int) -> int | None:
        """Take a slot and new pages for it; None if there is no room for both."""
        if len(self._pages) >= self.max_slots or not self._ensure(pages):
            return None
        is_fixed = self._is_full or not self.can_grow
        if num_spare and is_fixed and not self._make_room(pages + num_spare):
            return None
        slot = self._free_slots[-1]
        self._pages[slot] = self._take(pages)
        self._free_slots.pop()
        return slot

    def too_large(self, num_tokens: int) -> CapacityError:
        """Return the error for more tokens of one request than the memory holds."""
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
        self._users.update(pages)
        return pages

    def _leave(self, pages: Sequence[int]) -> None:
        """Note that a request holds pages no longer."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page not in self._keepers:
                    self._free_pages.append(page)

    def pages_of(self, slot: int) -> Sequence[int]:
        """The pages that a slot holds, in the order of its tokens."""
        return self._pages[slot]

    def prepare(self, slots: Sequence[int]) -> None:
        """Write the page tables of slots that were reserved, and clear what they held before.

        Nothing is waited for, and all slots share the copy and the launches.
        """
        pools, mine = self.pools, [self._pages[slot] for slot in slots]
        width = max(map(len, mine))
        table, new, sources, fresh = (array("i") for _ in range(4))
        for slot, pages in zip(slots, mine, strict=True):
            prefix = self._begun.get(slot)
            new.extend(pages if prefix is None else pages[len(prefix.pages) :])
            table.extend([*pages, *[-1] * (width - len(pages))])
            sources.append(-1 if prefix is None else prefix.slot)
            fresh.append(slot if prefix is None else -1)
        parts = [array("i", slots), table, new, sources, fresh]
        numbers, entries, held, begun, others = upload_parts(parts, pools.device)
        pools.page_table.index_fill_(0, numbers.long(), -1)
        pools.page_table[:, :width].index_copy_(0, numbers.long(), entries.view(-1, width))
        # First what is copied: a prefix may have been given up since, and its slot given on.
        if max(sources) >= 0:
            copy_slots(pools.folded_tensors(), begun, numbers)
        reset_slots(pools.start_tensors(), others)
        self._clean(held)
        for slot in slots:
            self._begun.pop(slot, None)

    def keep(self, borders: Sequence[tuple[int, int, bytes]]) -> None:
        """Keep prefixes: copy the states that slots have now, and hold on to their pages.

        Nothing is waited for, and all share the copy and the launches.

        Args:
            borders: for each, the slot, its tokens so far, whole pages, and the key.
        """
        found: dict[bytes, tuple[int, Prefix]] = {}
        for slot, num_tokens, key in borders:
            self.prefixes.expect_no_more(key)
            if key in self.prefixes or key in found:
                continue
            target = self._slot_of_state(len(found))
            if target is not None:
                pages = self._pages[slot][: num_tokens // self.pools.page_size]
                found[key] = slot, Prefix(target, tuple(pages))
        if not found:
            return
        columns = [[slot for slot, _ in found.values()], [one.slot for _, one in found.values()]]
        try:
            sources, targets = upload_parts([array("i", c) for c in columns], self.pools.device)
            copy_slots(self.pools.folded_tensors(), sources, targets)
        except BaseException:
            self._free_slots += columns[1]
            raise
        for key, (_, prefix) in found.items():
            self._keepers.update(prefix.pages)
            self.prefixes.add(key, prefix)

    def _slot_of_state(self, num_new: int) -> int | None:
        """Take a slot for the states of a prefix; None if there is no room."""
        if len(self.prefixes) + num_new >= self.prefixes.num_states and not self.give_up():
            return None
        self._ensure_slot()
        if not self._free_slots and not self.give_up():
            return None
        return self._free_slots.pop()

    def give_up(self) -> bool:
        """Give up the prefix that was not used for longest; False if there is none."""
        prefix = self.prefixes.pop()
        if prefix is None:
            return False
        self._free_slots.append(prefix.slot)
        for page in prefix.pages:
            self._keepers[page] -= 1
            if not self._keepers[page]:
                del self._keepers[page]
                if page not in self._users:
                    self._free_pages.append(page)
        return True

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
        self._leave(self._pages.pop(slot)[::-1])
        self._written.pop(slot, None)
        self._begun.pop(slot, None)
        self.prefixes.forget(slot)
        self._free_slots.append(slot)
        self._is_full = False
        if self.can_grow and not self._pages:
            self._give_back()

    def _give_back(self) -> None:
        """Shrink unused pools that take more than is worth keeping."""
        pools = self.pools
        num_slots = max(IDLE_BYTES // pools.slot_bytes(), 1)
        num_pages = max(IDLE_BYTES // pools.page_bytes(), 1)
        # Pools double as they grow: what prefixes use half of is worth keeping.
        has_many_slots = pools.num_slots > max(num_slots, 2 * (len(self.prefixes) + 1))
        if has_many_slots or pools.num_pages > max(num_pages, 2 * len(self._keepers)):
            while self.give_up():
                pass
            pools.shrink(num_slots, num_pages)
            self.__post_init__()

    def _ensure(self, pages: int) -> bool:
        self._ensure_slot()
        return (bool(self._free_slots) or self.give_up()) and self._ensure_pages(pages)

    def _ensure_slot(self) -> None:
        pools, most = self.pools, self.max_slots + self.prefixes.num_states
        is_short = not self._free_slots and pools.num_slots < most
        if is_short and self.can_grow and not self._is_full:
            old = pools.num_slots
            self._grow(self._grow_slots, min(most, 2 * old), old + 1)
            self._free_slots = list(range(old, pools.num_slots))[::-1]

    def _make_room(self, pages: int) -> bool:
        """Give up prefixes until so many pages are free; False if that is not enough."""
        while len(self._free_pages) < pages and self.give_up():
            pass
        return len(self._free_pages) >= pages

    def _ensure_pages(self, pages: int) -> bool:
        pools = self.pools
        num_kept = pools.num_pages - len(self._free_pages) - len(self._users)
        if num_kept * pools.page_bytes() > IDLE_BYTES:
            self._make_room(pages)  # before memory is taken for what may never be asked for again
        if self.can_grow and not self._is_full and len(self._free_pages) < pages:
            old = pools.num_pages
            needed = old + pages - len(self._free_pages)
            self._grow(self._grow_pages, max(2 * old, old + pages), needed)
            new = list(range(old, pools.num_pages))[::-1]
            self._free_pages = new + self._free_pages
        return self._make_room(pages)

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
