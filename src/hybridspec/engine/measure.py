"""Times of captured steps, taken at start, with requests in their slots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hybridspec.engine.graphs import StepGraphs
from hybridspec.ops.accept import RequestTable
from hybridspec.runtime import Allocator
from hybridspec.speculate import CostTable, Decoder

__all__ = ["measure_costs"]

_REPEATS = 3
_NUM_TOKENS = 64  # that a slot has room for: more than the timed steps commit


def measure_costs(graphs: StepGraphs) -> CostTable:
    """Time every graph once it has run, on slots without a history and random tokens.

    Batches that the pools do not hold are timed with as many requests as they do. Nothing of it
    stays behind.

    Args:
        graphs: what is timed; no slot may be in use.

    Returns:
        Median seconds by requests, rows and drafts.
    """
    decoder, allocator = graphs.decoder, graphs.allocator
    slots = _lent_slots(allocator, decoder, graphs.sizes[-1])
    verify: dict[int, dict[int, float]] = {}
    draft: dict[int, list[float]] = {}
    try:
        for size in graphs.sizes:
            used = slots[:size]
            graphs.set_slots(size, used)
            verify[size] = {}
            for rows in graphs.budgets[size]:
                _revive(allocator, decoder, used)
                verify[size][rows] = _seconds(decoder, partial(graphs.verify, size, rows))
            draft[size] = [
                _seconds(decoder, partial(graphs.draft, size, count)) for count in graphs.drafts
            ]
    finally:
        held = torch.tensor(slots, device=decoder.pools.device)
        decoder.requests.is_done.index_fill_(0, held, RequestTable.DONE_BY_LENGTH)
        for slot in reversed(slots):
            allocator.release(slot)
    return CostTable(verify=verify, draft=draft)


def _lent_slots(allocator: Allocator, decoder: Decoder, most: int) -> list[int]:
    slots: list[int] = []
    room = min(_NUM_TOKENS, decoder.pools.max_pages_per_slot * decoder.pools.page_size)
    while len(slots) < most and (slot := allocator.acquire(room)) is not None:
        slots.append(slot)
    return slots


def _revive(allocator: Allocator, decoder: Decoder, slots: Sequence[int]) -> None:
    """Let slots hold requests that have just begun, with drafts of random tokens."""
    requests = decoder.requests
    allocator.prepare(slots)
    rows = torch.tensor(slots, device=decoder.pools.device)
    shape = (len(slots), requests.most_drafts + 1)
    words = decoder.model.config.vocab_size
    tokens = torch.randint(words, shape, device=rows.device, generator=_draws(rows.device))
    requests.next_tokens.index_copy_(0, rows, tokens)
    requests.confidences.index_fill_(0, rows, 0.5)
    for column, value in (
        (requests.num_drafts, requests.most_drafts),
        (requests.draft_limit, requests.most_drafts),
        (requests.last_position, _NUM_TOKENS - 1),
        (requests.is_done, 0),
    ):
        column.index_fill_(0, rows, value)


def _draws(device: torch.device) -> torch.Generator:
    """A generator of its own, so that the caller's goes on as it was."""
    return torch.Generator(device).manual_seed(0)


def _seconds(decoder: Decoder, launch: Callable[[], None]) -> float:
    """Return the median time of a launch on the device, the first one aside."""
    launch()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    with torch.cuda.device(decoder.pools.device):
        marks[0].record()
        for mark in marks[1:]:
            launch()
            mark.record()
        marks[-1].synchronize()
    spans = zip(marks, marks[1:], strict=False)
    times: list[float] = [begin.elapsed_time(end) for begin, end in spans]
    return 1e-3 * statistics.median(times)
