"""The one type of a step: laid out by the host or filled by an op, it says the same."""

from __future__ import annotations

import torch

from hybridspec.ops.verify_plan import Step, build_params

SLOTS, LENGTHS = [3, 0, 5], [2, 4, 1]


def test_rows_from_the_host_equal_those_that_the_op_fills() -> None:
    seq_len = torch.tensor([7, 0, 0, 90, 0, 1], dtype=torch.int32)
    starts = seq_len[SLOTS].tolist()
    token_ids = torch.arange(100, 112).view(3, 4)
    packed = torch.cat([token_ids[b, :count] for b, count in enumerate(LENGTHS)])
    by_host = Step.of_rows(SLOTS, LENGTHS, starts, packed, is_prefill=False)
    filled = Step.create(max_requests=3, max_rows=7, max_drafts=3)
    filled.cu_seqlens.copy_(torch.tensor([0, *LENGTHS]).cumsum(0))
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    build_params(token_ids, slots, seq_len, torch.zeros_like(seq_len), plan=filled)
    for mine, other in zip(by_host.tensors()[:-1], filled.tensors()[:-1], strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype
    assert (by_host.max_seqlen, by_host.is_prefill) == (filled.max_seqlen, filled.is_prefill)


def test_tensors_and_names_go_together() -> None:
    step = Step.create(max_requests=2, max_rows=6, max_drafts=2)
    again = Step.of(step.tensors(), max_seqlen=3)
    for name in Step.__slots__:
        assert getattr(again, name) is getattr(step, name)
    assert len(step.tensors()) == len(Step.__slots__) - 2
