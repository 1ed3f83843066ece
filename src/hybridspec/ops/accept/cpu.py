"""The CPU's backend: reads the few numbers of a step into Python and writes back what changed.

Each call of an operator costs as much as a few hundred bytes, so whole columns are read at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._library import Written
from hybridspec.ops.accept.naive import accept_one
from hybridspec.ops.accept.table import Counts, Ends, RequestTable, StepResult, StepRows, TokenLog

__all__ = ["accept_rows"]


def accept_rows(
    chosen: Tensor,
    batch: StepRows,
    history_len: Tensor,
    requests: Written[RequestTable],
    log: Written[TokenLog],
    ends: Ends,
    counts: Written[Counts],
    result: Written[StepResult],
) -> None:
    """Accept, cut, append to the token log and count; see api.py."""
    bounds, num_rows, slots, folds = (tensor.tolist() for tensor in batch)
    tokens, newest, lengths = chosen.tolist(), log.seq_len.tolist(), history_len.tolist()
    fed, last = requests.next_tokens.tolist(), requests.last_position.tolist()
    end_bits, ends_from = ends[0], ends[1].tolist()
    rows_of_counts = counts[1].tolist() if counts[0].shape[0] else None
    most = requests.most_drafts
    packed = []
    for b, slot in enumerate(slots):
        first, count = bounds[b], num_rows[b]
        if slot < 0 or count == 0:
            packed.append([0] * StepResult.NUM_HEAD + [-1] * (most + 1) + [0] * most)
            continue
        position, begin = newest[slot] + 1, ends_from[slot]

        def is_end(at: int, token: int, slot: int = slot, begin: int = begin) -> bool:
            return at >= begin and bool(int(end_bits[slot, token >> 5]) >> (token & 31) & 1)

        committed, accepted, done = accept_one(
            tokens[first : first + count], fed[slot][1:count], position, last[slot], is_end
        )
        num = len(committed)
        head = (num, accepted, count, folds[b], lengths[slot], done)
        packed.append([*head, *committed, *[-1] * (most + 1 - num), *fed[slot][1:]])
        if done:
            requests.is_done[slot] = done
        if committed:
            requests.next_tokens[slot, 0] = committed[-1]
            _append(log, slot, position, committed)
            if rows_of_counts is not None and rows_of_counts[slot] >= 0:
                _count(counts[0][rows_of_counts[slot]], committed)
    values = torch.tensor(packed, dtype=torch.int32)
    result.packed.copy_(values.view_as(result.packed))
    result.num_committed.copy_(result.packed[:, 0])


def _append(log: TokenLog, slot: int, position: int, tokens: list[int]) -> None:
    size = log.token_pages.shape[1]
    while tokens:
        page, place = int(log.page_table[slot, position // size]), position % size
        here = tokens[: size - place]
        log.token_pages[page, place : place + len(here)] = torch.tensor(here, dtype=torch.int32)
        position, tokens = position + len(here), tokens[len(here) :]


def _count(row: Tensor, tokens: list[int]) -> None:
    """Count committed tokens of one request: 15 bits, the sign is the prompt's."""
    for token in tokens:
        held = int(row[token])
        if held & 0x7FFF < 0x7FFF:
            row[token] = held + 1
