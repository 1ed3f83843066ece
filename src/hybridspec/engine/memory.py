"""How large the pools are, and what a request costs."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

import torch

from hybridspec.config import MAX_NUM_SEQS, EngineConfig
from hybridspec.errors import CapacityError, UnsupportedError
from hybridspec.models import HybridModel, ModelConfig
from hybridspec.runtime import MemoryOptions, MemorySpecs

__all__ = ["PoolPlan", "available_bytes", "check_sizes", "plan_pools"]

_log = logging.getLogger("hybridspec")
PAGE_SIZE = 64  # tokens per KV page
CPU_MAX_SLOTS = 64
SMALL_HIDDEN_SIZE = 512  # up to here a step is made of small operations, slower on two threads
INT8_KEY_DIMS = (64, 128)  # where the error of 8-bit states was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Sizes of the pools at start.

    Attributes:
        specs: what the model's layers keep of a request.
        num_slots, num_pages, page_size, max_pages_per_slot: as in Pools; where keys and values are
            contiguous, a page holds a whole request.
        max_slots: most slots ever.
        can_grow: whether the pools grow with use.
    """

    specs: MemorySpecs
    num_slots: int
    num_pages: int
    page_size: int
    max_pages_per_slot: int
    max_slots: int
    can_grow: bool


def check_sizes(model: ModelConfig, config: EngineConfig) -> None:
    """Refuse options that do not go with a model's sizes, before any weight is read.

    Raises:
        ValueError: if max_model_len is longer than the model's.
        UnsupportedError: for 8-bit states of a head size for which they were not validated.
    """
    limit, key_dim = model.max_positions, model.gdn.key_dim
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len: expected at most the model's {limit}, got {config.max_model_len}"
        )
    if config.state_dtype == "int8" and key_dim not in INT8_KEY_DIMS:
        sizes = " and ".join(map(str, INT8_KEY_DIMS))
        raise UnsupportedError(
            f"state_dtype: int8 was validated for key heads of {sizes} only, this model's have "
            f"{key_dim}; use bfloat16"
        )


def plan_pools(model: HybridModel, config: EngineConfig) -> tuple[EngineConfig, PoolPlan]:
    """Resolve what is "auto" of dtypes, device and lengths for this model, and size the pools.

    Raises:
        CapacityError: if not even one request fits: a short one, or where keys and values are
            contiguous, one of max_model_len tokens.
    """
    max_len = model.config.max_positions if config.max_model_len is None else config.max_model_len
    state_dtype = model.config.state_dtype if config.state_dtype == "auto" else config.state_dtype
    threads = config.threads
    if threads is None and model.device.type == "cpu":
        is_small = model.config.hidden_size <= SMALL_HIDDEN_SIZE
        threads = 1 if is_small else torch.get_num_threads()
    if threads is not None and threads > (cores := num_cores()):
        _log.warning("threads: %d on %d cores, taking %d", threads, cores, cores)
        threads = cores
    resolved = replace(
        config,
        dtype=_name(model.dtype),
        state_dtype=_name(state_dtype),
        device=str(model.device),
        max_model_len=max_len,
        threads=threads,
    )
    is_contiguous = config.kv_layout == "contiguous"
    page_size = max_len if is_contiguous else PAGE_SIZE
    pages_per_slot = -(-max_len // page_size)
    has_mtp = config.drafter not in ("lookup", "none")
    options = MemoryOptions(dtype=model.dtype, state_dtype=getattr(torch, resolved.state_dtype))
    specs = model.memory_specs(options, has_head=has_mtp)
    page_bytes = page_size * specs.token_bytes()
    if model.device.type == "cpu":
        free = available_bytes(model.device)
        if is_contiguous and page_bytes > free:
            raise CapacityError(_too_long(resolved, page_bytes, free))
        return resolved, PoolPlan(
            specs=specs,
            num_slots=1,
            num_pages=min(pages_per_slot, 16),
            page_size=page_size,
            max_pages_per_slot=pages_per_slot,
            max_slots=config.max_num_seqs or CPU_MAX_SLOTS,
            can_grow=True,
        )
    num_slots, num_pages = _sizes_on_gpu(resolved, model.device, specs.request_bytes(), page_bytes)
    return resolved, PoolPlan(
        specs=specs,
        num_slots=num_slots,
        num_pages=min(num_pages, num_slots * pages_per_slot),
        page_size=page_size,
        max_pages_per_slot=pages_per_slot,
        max_slots=num_slots,
        can_grow=False,
    )


def _sizes_on_gpu(
    config: EngineConfig, device: torch.device, slot_bytes: int, page_bytes: int
) -> tuple[int, int]:
    """Return how many slots and pages the memory takes."""
    free, total = torch.cuda.mem_get_info(device)
    most = config.max_num_seqs or MAX_NUM_SEQS
    budget = max(free - int((1 - config.memory_fraction) * total), 0)
    if config.kv_layout == "contiguous":
        num_slots = min(most, budget // (slot_bytes + page_bytes))
        if num_slots < 1:
            raise CapacityError(_too_long(config, slot_bytes + page_bytes, budget))
        return num_slots, num_slots
    # Half for the fixed part of requests, at most; pages take what is left.
    num_slots = min(most, budget // 2 // slot_bytes)
    num_pages = (budget - num_slots * slot_bytes) // page_bytes
    if num_slots < 1 or num_pages < 1:
        raise CapacityError(
            f"memory_fraction: {config.memory_fraction:g} of {total >> 20} MiB leaves "
            f"{budget >> 20} MiB for requests; one needs at least "
            f"{(slot_bytes + page_bytes) >> 20} MiB"
        )
    return num_slots, num_pages


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
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
