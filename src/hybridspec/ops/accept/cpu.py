"""The CPU's backend: reads the few numbers of a step into Python and writes back what changed."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import accept_one
from .table import RequestTable, StepResult, TokenLog

__all__ = ["accept_rows"]


def accept_rows(
    chosen: Tensor,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    history_len: Tensor,
    requests: RequestTable,
    log: TokenLog,
    ends: tuple[Tensor, Tensor],
    counts: tuple[Tensor, Tensor],
    result: StepResult,
) -> None:
    """Accept, cut, append to the token log and count; see api.py."""
    bounds, num_rows, slots, folds = (tensor.tolist() for tensor in batch)
    tokens, newest = chosen.tolist(), log.seq_len.tolist()
    most, lengths = requests.most_drafts, history_len.tolist()
    live = [b for b, slot in enumerate(slots) if slot >= 0 and num_rows[b] > 0]
    index = [slots[b] for b in live]
    drafts = dict(zip(live, requests.next_tokens[index, 1:].tolist(), strict=True))
    last = dict(zip(live, requests.last_position[index].tolist(), strict=True))
    is_end = _EndTest(ends, slots, live)
    packed = [[0] * StepResult.NUM_HEAD + [-1] * (most + 1) + [0] * most for _ in slots]
    written: list[tuple[int, int, int]] = []
    for b in live:
        slot, row = slots[b], packed[b]
        first, count = bounds[b], num_rows[b]
        mine, position = drafts[b][: count - 1], newest[slot] + 1
        is_end.request = b
        committed, accepted, done = accept_one(
            tokens[first : first + count], mine, position, last[b], is_end
        )
        head = (len(committed), accepted, count, folds[b], lengths[slot], done)
        row[: len(head)] = head
        row[len(head) : len(head) + len(committed)] = committed
        row[len(head) + most + 1 :] = drafts[b]
        written += [(slot, position + i, token) for i, token in enumerate(committed)]
        if done:
            requests.is_done[slot] = done
        if committed:
            requests.next_tokens[slot, 0] = committed[-1]
    result.packed.copy_(torch.tensor(packed, dtype=torch.int32).view_as(result.packed))
    result.num_committed.copy_(result.packed[:, 0])
    if written:
        _append(log, written)
        _count(counts, written)


class _EndTest:
    """Whether a token ends the request that is looked at, found by its bit."""

    def __init__(self, ends: tuple[Tensor, Tensor], slots: list[int], live: list[int]) -> None:
        self.bits, ends_from = ends
        first = ends_from[[slots[b] for b in live]].tolist()
        self.slots = slots
        self.first = dict(zip(live, first, strict=True))
        self.request = 0

    def __call__(self, position: int, token: int) -> bool:
        if position < self.first[self.request]:
            return False
        word = int(self.bits[self.slots[self.request], token >> 5])
        return bool(word >> (token & 31) & 1)


def _append(log: TokenLog, written: list[tuple[int, int, int]]) -> None:
    size = log.token_pages.shape[1]
    slots, positions, tokens = torch.tensor(written).unbind(-1)
    pages = log.page_table[slots, positions // size].long()
    log.token_pages[pages, positions % size] = tokens.int()


def _count(counts: tuple[Tensor, Tensor], written: list[tuple[int, int, int]]) -> None:
    """Count committed tokens where a request has counts: 15 bits, the sign is the prompt's."""
    table, rows_of_slots = counts
    if table.shape[0] == 0:
        return
    rows = rows_of_slots[[slot for slot, _, _ in written]].tolist()
    for row, (_, _, token) in zip(rows, written, strict=True):
        if row >= 0:
            held = int(table[row, token])
            if held & 0x7FFF < 0x7FFF:
                table[row, token] = held + 1
