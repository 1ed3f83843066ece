"""One call chooses the tokens of a step's rows, whatever their requests ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.choice_cases import ChoiceCase, random_case
from hybridspec.ops.sampling import NO_TOKEN, SamplingUses, choose, explain_choose
from hybridspec.ops.sampling.naive import score_row
from hybridspec.runtime import SlotOptions

NEAR = 1e-4  # fp32 logits of magnitude 10, divided by temperatures of 0.3


def expected(case: ChoiceCase, row: int) -> list[float]:
    return score_row(
        case.logits[row],
        case.table,
        int(case.slots[row]),
        case.tokens_before(row),
        int(case.offsets[row]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_definition(seed: int) -> None:
    case = random_case(seed, drafts=seed % 4)
    found = case.choose(uses=case.uses()).tolist()
    for row, token in enumerate(found):
        scores = expected(case, row)
        best = max(scores)
        if best == -torch.inf:
            assert token == NO_TOKEN
            continue
        assert scores[token] >= best - NEAR
        if sum(score >= best - NEAR for score in scores) == 1:
            assert token == scores.index(best)


def test_the_definition_can_fail() -> None:
    """Each option changes some token of the cases above, in the definition too."""
    off = {
        "has_noise": {"temperature": 0},
        "has_filters": {"top_k": 0, "top_p": 1, "min_p": 0},
        "has_counts": {"count_row": -1},
        "has_bias": {"bias_len": 0},
        "has_words": {"word_len": 0},
        "has_masks": {"allowed_bits": -1, "end_bits": 0},
    }
    changed = dict.fromkeys(off, 0)
    for seed in range(40):
        case = random_case(seed)
        tokens = case.choose()
        for name, columns in off.items():
            plain = case.choose(uses=replace(SamplingUses.everything(), **{name: False}))
            changed[name] += int((plain != tokens).sum())
            before = {column: getattr(case.table, column).clone() for column in columns}
            for column, value in columns.items():
                getattr(case.table, column).fill_(value)
            assert torch.equal(case.choose(), plain)
            for column, values in before.items():
                getattr(case.table, column).copy_(values)
    assert min(changed.values()) > 5, changed


def test_rows_do_not_matter_to_each_other() -> None:
    for seed in range(20):
        case = random_case(seed)
        together = case.choose()
        assert torch.equal(case.choose(uses=case.uses()), together)
        alone = [int(case.choose([row])) for row in range(together.shape[0])]
        assert alone == together.tolist()
        assert torch.equal(case.choose(list(range(5, 11))), together[5:11])


def test_logits_stay_and_out_is_filled() -> None:
    case = random_case(3)
    before = case.logits.clone()
    out = torch.zeros(case.slots.shape[0], dtype=torch.int64)
    found = case.choose(out=out)
    assert found is out
    assert torch.equal(case.logits, before)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_nothing_is_chosen(is_greedy: bool) -> None:
    case = random_case(1, chance=0)
    if not is_greedy:
        case.table.temperature.fill_(0.8)
        case.table.bias_len[case.slots[1]] = 0
    uses = SamplingUses() if is_greedy else SamplingUses.everything()
    good = case.choose(uses=uses)
    assert (good >= 0).all()
    case.logits[0, 7] = torch.nan
    case.logits[1, 7] = torch.inf
    case.logits[2] = -torch.inf
    case.logits[3, :10] = -torch.inf
    case.slots[4] = -1
    case.offsets[4] = 10**6
    found = case.choose(uses=uses)
    assert found[[0, 1, 2, 4]].tolist() == [NO_TOKEN] * 4
    assert found[3] >= 10
    assert torch.equal(found[5:], good[5:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_logit_counts_where_its_token_is_forbidden(value: float) -> None:
    case = random_case(1, chance=0)
    case.pool.release(int(case.slots[0]))
    case.pool.write(int(case.slots[0]), SlotOptions(allowed=[1, 2, 3]))
    case.logits[0, 9] = value
    assert case.choose()[0] == NO_TOKEN


def test_equals_give_the_lowest_token() -> None:
    case = random_case(2, chance=0)
    case.logits.zero_()
    case.logits[:, [5, 9, 30]] = 1.0
    assert case.choose().tolist() == [5] * case.slots.shape[0]


def test_mask_of_the_host() -> None:
    case = random_case(4, chance=0)
    num_rows, vocab = case.logits.shape
    best = case.logits.argmax(-1)
    mask = torch.full((num_rows, -(-vocab // 32)), -1, dtype=torch.int32)
    for row, token in enumerate(best.tolist()):
        bit = 1 << token % 32
        mask[row, token // 32] = ~(bit if bit < 2**31 else bit - 2**32)
    found = case.choose(mask=mask, uses=SamplingUses())
    assert torch.equal(found, case.logits.topk(2).indices[:, 1])
    assert (case.choose(mask=torch.zeros_like(mask)) == NO_TOKEN).all()


def test_no_rows_and_no_drafts() -> None:
    case = random_case(5, drafts=0)
    assert case.choose([]).shape == (0,)
    assert case.choose().shape == (6,)


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("logits", torch.zeros(2, 45, dtype=torch.float64), TypeError, "logits: expected dtype"),
        ("logits", torch.zeros(45, 2).T, ValueError, "logits: expected a last stride"),
        ("logits", torch.zeros(2, 44), ValueError, "counts: expected shape"),
        ("slots", torch.zeros(2, dtype=torch.int64), TypeError, "slots: expected dtype int32"),
        ("offsets", torch.zeros(3, dtype=torch.int32), ValueError, "offsets: expected shape"),
        ("seq_len", torch.zeros(5, dtype=torch.int32), ValueError, "seq_len: expected shape"),
        ("drafts", torch.zeros(6, 3, dtype=torch.int32), TypeError, "drafts: expected dtype int64"),
        ("token_pages", torch.zeros(9, 4), TypeError, "token_pages: expected dtype int32"),
        ("page_table", torch.zeros(5, 4).int(), ValueError, "page_table: expected shape"),
        ("mask", torch.zeros(2, 1).int(), ValueError, "mask: expected shape"),
        ("out", torch.zeros(3).long(), ValueError, "out: expected shape"),
        ("backend", "cute", ValueError, "backend: expected one of"),
    ],
)
def test_wrong_calls(name: str, value: Any, error: type[Exception], text: str) -> None:
    case = random_case(6)
    given = {
        "logits": case.logits[:2],
        "slots": case.slots[:2],
        "offsets": case.offsets[:2],
        "table": case.table,
        "seq_len": case.seq_len,
        "drafts": case.drafts,
        "token_pages": case.token_pages,
        "page_table": case.page_table,
    }
    with pytest.raises(error, match=text):
        choose(**{**given, name: value})


def test_backends_are_explained() -> None:
    reasons = explain_choose(torch.device("cpu"))
    assert list(reasons) == ["reference", "triton"]
    assert reasons["reference"] is None
    assert reasons["triton"] == "the tensors are not on a CUDA device"
