"""Sizes of an engine's pools at its start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridspec.config import EngineConfig
from hybridspec.engine.resolve import Resolved
from hybridspec.errors import CapacityError
from hybridspec.models.layers import ATTENTION, PROMPT_ATTENTION
from hybridspec.runtime import Allocator, Pools, Prefixes, available_host_bytes

__all__ = ["PoolPlan", "available_bytes", "fitting_memory", "make_pools", "plan_pools"]

_FIRST_PAGES = 16  # of pools that grow
_NUM_STATES = 64  # kept for reuse, unless they take too much
_STATES_ON_CPU = 256 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Sizes of the pools at start.

    Attributes:
        num_slots, num_pages: as in Pools.
        max_slots: most slots of requests ever.
        num_states: most prefixes kept for reuse, each with the states of a slot.
        can_grow: whether the pools grow with use.
    """

    num_slots: int
    num_pages: int
    max_slots: int
    num_states: int
    can_grow: bool


@contextmanager
def fitting_memory(folder: Path) -> Iterator[None]:
    """Say that a model does not fit, where an allocation fails."""
    try:
        yield
    except RuntimeError as error:  # torch has a type for this on GPUs only
        if "allocate" not in str(error) or isinstance(error, CapacityError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise CapacityError(f"model: {folder} does not fit the memory ({reason})") from error


def make_pools(resolved: Resolved) -> tuple[Pools, Allocator]:
    """Make the pools, and who hands out their slots and pages."""
    plan = plan_pools(resolved)
    pools = Pools(
        resolved.specs,
        num_slots=plan.num_slots,
        num_pages=plan.num_pages,
        page_size=resolved.page_size,
        max_pages_per_slot=resolved.max_pages_per_slot,
        device=resolved.device,
    )
    attending = [resolved.backends[op][0] for op in (ATTENTION, PROMPT_ATTENTION)]
    allocator = Allocator(
        pools,
        can_grow=plan.can_grow,
        max_slots=plan.max_slots,
        prefixes=Prefixes(plan.num_states),
        has_clean_values="fa3" in attending,
        free_bytes=available_host_bytes if plan.can_grow else None,
    )
    return pools, allocator


def plan_pools(resolved: Resolved) -> PoolPlan:
    """Size the pools by what the weights, which lie there already, have left.

    Raises:
        CapacityError: if not even one request fits: a short one, or where keys and values are
            contiguous, one of max_model_len tokens.
    """
    config, device = resolved.config, resolved.device
    assert config.max_num_seqs is not None  # resolved
    max_pages = resolved.max_pages_per_slot
    slot_bytes = resolved.specs.request_bytes()
    page_bytes = resolved.page_size * resolved.specs.token_bytes()
    if device.type == "cpu":
        free = available_bytes(device)
        if config.kv_layout == "contiguous" and page_bytes > free:
            raise CapacityError(_too_long(config, page_bytes, free))
        return PoolPlan(
            num_slots=1,
            num_pages=min(max_pages, _FIRST_PAGES),
            max_slots=config.max_num_seqs,
            num_states=_num_states(config, max(_STATES_ON_CPU // slot_bytes, 1)),
            can_grow=True,
        )
    num_slots, num_states, num_pages = _sizes_on_gpu(config, device, slot_bytes, page_bytes)
    return PoolPlan(
        num_slots=num_slots + num_states,
        num_pages=min(num_pages, (num_slots + num_states) * max_pages),
        max_slots=num_slots,
        num_states=num_states,
        can_grow=False,
    )


def _sizes_on_gpu(
    config: EngineConfig, device: torch.device, slot_bytes: int, page_bytes: int
) -> tuple[int, int, int]:
    """Return how many requests, prefixes and pages the memory takes."""
    free, total = torch.cuda.mem_get_info(device)
    most = config.max_num_seqs
    assert most is not None  # resolved
    budget = max(free - int((1 - config.memory_fraction) * total), 0)
    if config.kv_layout == "contiguous":
        num_slots = min(most, budget // (slot_bytes + page_bytes))
        if num_slots < 1:
            raise CapacityError(_too_long(config, slot_bytes + page_bytes, budget))
        return num_slots, 0, num_slots
    # Half for the fixed part of requests and for states, at most; pages take what is left.
    num_states = _num_states(config, budget // 8 // slot_bytes)
    num_slots = min(most, budget // 2 // slot_bytes - num_states)
    num_pages = (budget - (num_slots + num_states) * slot_bytes) // page_bytes
    if num_slots < 1 or num_pages < 1:
        raise CapacityError(
            f"memory_fraction: {config.memory_fraction:g} of {total >> 20} MiB leaves "
            f"{budget >> 20} MiB for requests; one needs at least "
            f"{(slot_bytes + page_bytes) >> 20} MiB"
        )
    return num_slots, num_states, num_pages


def _num_states(config: EngineConfig, most: int) -> int:
    """Return of how many prefixes the states are kept."""
    if not config.enable_prefix_caching:
        return 0
    return min(_NUM_STATES, most) if config.prefix_states is None else config.prefix_states


def _too_long(config: EngineConfig, needed: int, budget: int) -> str:
    return (
        f"max_model_len: with kv_layout 'contiguous' a request takes the memory of "
        f"{config.max_model_len} tokens, {needed >> 20} MiB, and there are {budget >> 20} MiB; "
        f"lower max_model_len, or take kv_layout 'paged'"
    )


def available_bytes(device: torch.device) -> int:
    """Memory that is free for pools now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_bytes()
