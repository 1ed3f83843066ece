"""Choosing tokens under torch.compile: opcheck, and whole graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.choice_cases import random_case
from hybridspec.ops.sampling import SamplingTable, SamplingUses, count_tokens, is_end, report


def test_opcheck() -> None:
    case = random_case(1, slots=3, drafts=1)
    arguments = (
        case.logits, case.slots, case.offsets, case.table.tensors(), case.seq_len, case.drafts,
        case.token_pages, case.page_table, None, SamplingUses.everything().flags(),
        torch.empty(6, dtype=torch.int64), "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hybridspec.sampling_choose.default, arguments)


def test_schema_names_what_changes() -> None:
    schema = torch.ops.hybridspec.sampling_choose.default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == ["logits", "out"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    """A step's end: choose, see what ends, report, count."""

    def step(case, table: SamplingTable, logits: Tensor) -> tuple[Tensor, ...]:
        case.logits = logits * 2
        tokens = case.choose(uses=SamplingUses.everything())
        ends = is_end(table, case.slots, case.offsets + 9, tokens)
        columns = report(logits, tokens)
        slots = torch.arange(3, dtype=torch.int32)
        count_tokens(table, slots, tokens[:6].view(3, 2), slots)
        return tokens, ends, *columns

    for seed in (1, 2):
        case, other = (random_case(seed, slots=3, drafts=1) for _ in range(2))
        expected = step(case, case.table, case.logits)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        found = compiled(other, other.table, other.logits)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(other.table.counts, case.table.counts)
