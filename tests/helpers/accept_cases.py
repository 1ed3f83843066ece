"""Random steps to accept, and what the definition says about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridspec.ops.accept import RequestTable, StepResult, TokenLog
from hybridspec.ops.accept.naive import accept_one

__all__ = ["AcceptCase", "expected", "on_device", "random_case"]

VOCAB = 70
PAGE = 4


@dataclass(slots=True, kw_only=True)
class AcceptCase:
    """The arguments of `accept_rows`, by name."""

    chosen: Tensor
    arguments: dict[str, Any]

    def state(self) -> list[Tensor]:
        """Everything that a call may write."""
        given = self.arguments
        return [*given["requests"].tensors(), given["log"].token_pages, given["counts"]]

    def result(self) -> StepResult:
        """A result full of numbers that must all be overwritten."""
        requests = self.arguments["requests"]
        result = StepResult.create(
            num_requests=self.arguments["slots"].shape[0], num_drafts=requests.most_drafts
        )
        result.packed.fill_(-99)
        result.num_committed.fill_(-99)
        return result


def random_case(seed: int, *, has_counts: bool = True) -> AcceptCase:
    """A step of random requests, most of whose drafts are right."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=dtype)

    k, num_slots = int(draw(0, 8, 1)), 6
    order = torch.randperm(num_slots, generator=g)[:4].int()
    slots = torch.where(draw(0, 5, 4) == 0, -1, order)
    num_rows = torch.where(slots < 0, draw(0, 2, 4), draw(0, k + 2, 4))
    requests = RequestTable.create(num_slots=num_slots, num_drafts=k)
    requests.next_tokens.copy_(draw(0, VOCAB, num_slots + 1, k + 1, dtype=torch.int64))
    requests.is_done.zero_()
    seq_len = draw(0, 20, num_slots)
    requests.last_position[:-1] = seq_len + draw(1, k + 5, num_slots)
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), num_rows.cumsum(0).int()))
    chosen = draw(0, VOCAB, int(bounds[-1]) + 3, dtype=torch.int64)
    for b, slot in enumerate(slots.tolist()):
        for j in range(int(num_rows[b]) - 1):
            if int(draw(0, 5, 1)):
                chosen[bounds[b] + j] = requests.next_tokens[slot, 1 + j]
    chosen[draw(0, 12, *chosen.shape) == 0] = -1
    pages = 8
    counts = draw(0, 3, 3 if has_counts else 0, VOCAB, dtype=torch.int16)
    counts[draw(0, 9, *counts.shape) == 0] = 0x7FFF
    counts[draw(0, 3, *counts.shape) == 0] |= -0x8000
    return AcceptCase(
        chosen=chosen,
        arguments={
            "cu_seqlens": bounds,
            "num_verify_tokens": num_rows,
            "slots": slots,
            "is_fold": draw(0, 2, 4, dtype=torch.int8),
            "history_len": draw(0, 17, num_slots),
            "requests": requests,
            "log": TokenLog(
                token_pages=draw(0, VOCAB, num_slots * pages, PAGE),
                page_table=torch.randperm(num_slots * pages, generator=g).int().view(-1, pages),
                seq_len=seq_len,
            ),
            "end_bits": (draw(-(2**31), 2**31 - 1, num_slots, 3) & draw(-(2**31), 2**31 - 1, 1))
            * (draw(0, 2, num_slots, 1)),
            "ends_from": draw(0, 25, num_slots),
            "counts": counts,
            "count_row": torch.tensor([-1, 2, 0, -1, 1, -1], dtype=torch.int32)
            if has_counts
            else torch.full((6,), -1, dtype=torch.int32),
        },
    )


def expected(case: AcceptCase) -> tuple[list[Tensor], StepResult]:
    """What the definition leaves behind: `state()` and the result."""
    given = case.arguments
    requests: RequestTable = given["requests"]
    log: TokenLog = given["log"]
    state = [tensor.clone() for tensor in case.state()]
    next_tokens, is_done, pages, counts = state[0], state[5], state[6], state[7]
    result = case.result()
    k = requests.most_drafts
    for b, slot in enumerate(given["slots"].tolist()):
        count = int(given["num_verify_tokens"][b])
        row = [0] * 6 + [-1] * (k + 1) + [0] * k
        if slot >= 0 and count > 0:
            first = int(given["cu_seqlens"][b])
            bits, begin = given["end_bits"][slot].tolist(), int(given["ends_from"][slot])
            position = int(log.seq_len[slot]) + 1
            tokens, accepted, done = accept_one(
                case.chosen[first : first + count].tolist(),
                requests.next_tokens[slot, 1:count].tolist(),
                position,
                int(requests.last_position[slot]),
                lambda at, token: at >= begin and bool(bits[token // 32] >> (token % 32) & 1),  # noqa: B023
            )
            row[:6] = [
                len(tokens), accepted, count, int(given["is_fold"][b]),
                int(given["history_len"][slot]), done,
            ]  # fmt: skip
            row[6 : 6 + len(tokens)] = tokens
            row[7 + k :] = requests.next_tokens[slot, 1:].tolist()
            for at, token in enumerate(tokens, start=position):
                pages[log.page_table[slot, at // PAGE], at % PAGE] = token
                owner = int(given["count_row"][slot])
                if owner >= 0 and int(counts[owner, token]) & 0x7FFF < 0x7FFF:
                    counts[owner, token] += 1
                next_tokens[slot, 0] = token
            if done:
                is_done[slot] = done
        result.packed[b] = torch.tensor(row, dtype=torch.int32)
        result.num_committed[b] = row[0]
    return state, result


def on_device(case: AcceptCase, device: str) -> AcceptCase:
    """The same step on a device."""
    given = dict(case.arguments)
    log = given["log"]
    given["requests"] = RequestTable.of([t.to(device) for t in given["requests"].tensors()])
    given["log"] = TokenLog(
        token_pages=log.token_pages.to(device),
        page_table=log.page_table.to(device),
        seq_len=log.seq_len.to(device),
    )
    for name, value in given.items():
        if isinstance(value, Tensor):
            given[name] = value.to(device)
    return AcceptCase(chosen=case.chosen.to(device), arguments=given)
