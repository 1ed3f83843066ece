"""Choosing tokens under torch.compile: opcheck, and whole graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.choice_cases import ChoiceCase, random_case
from hybridspec.ops.sampling import SamplingUses


def test_opcheck() -> None:
    case = random_case(1, slots=3, drafts=1)
    arguments = (
        case.logits, case.slots, case.offsets, None, *case.table.tensors(), case.seq_len,
        case.drafts, case.token_pages, case.page_table, *SamplingUses.everything().flags(),
        torch.empty(6, dtype=torch.int64), "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hybridspec.sampling_choose.default, arguments)


def test_schema_names_what_changes() -> None:
    schema = torch.ops.hybridspec.sampling_choose.default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == ["logits", "out"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    def step(case: ChoiceCase, logits: Tensor) -> Tensor:
        case.logits = logits * 2
        return case.choose(uses=SamplingUses.everything()) + 1

    for seed in (1, 2):
        case = random_case(seed, slots=3, drafts=1)
        logits = case.logits
        expected = step(case, logits)
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        assert torch.equal(compiled(case, logits), expected)
