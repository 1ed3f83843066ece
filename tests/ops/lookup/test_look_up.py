"""Looking up in a log of pages gives what looking up in a list gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from helpers.lookup_cases import random_text, to_pages
from hybridspec.ops.lookup import look_up
from hybridspec.ops.lookup.naive import continue_tokens

PLAIN = {"num_tokens": 2, "max_places": 16, "max_agreement": 16}
OPTIONS = [
    PLAIN,
    {"num_tokens": 1, "max_places": 3, "max_agreement": 1},
    {"num_tokens": 3, "max_places": 1, "max_agreement": 5},
    {"num_tokens": 2, "max_places": 40, "max_agreement": 100},
]


def check_texts(texts: list[list[int]], count: int, options: dict[str, int], **where: Any) -> None:
    """Compare a batch in another order, with a dead lane, with the definition."""
    token_pages, page_table, seq_len = to_pages(texts, 4)
    slots = [*reversed(range(len(texts))), -1]
    drafts, num, agreement = look_up(
        token_pages, page_table, seq_len, torch.tensor(slots, dtype=torch.int32), count=count,
        **options, **where,
    )  # fmt: skip
    for lane, slot in enumerate(slots):
        tokens, agreeing = continue_tokens(texts[slot], count, **options) if slot >= 0 else ([], 0)
        assert drafts[lane].tolist() == (tokens or [-1] * count)
        assert num[lane] == len(tokens)
        assert agreement[lane] == agreeing


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_definition(options: dict[str, int]) -> None:
    rng = random.Random(0)
    for _ in range(40):
        texts = [random_text(rng, 400) for _ in range(5)]
        check_texts(texts, rng.randrange(1, 9), options)


@pytest.mark.interpreted
@pytest.mark.parametrize("options", OPTIONS)
def test_interpreted_kernel(options: dict[str, int]) -> None:
    rng = random.Random(2)
    texts = [random_text(rng, 400) for _ in range(12)]
    texts += [[5, 6, *[i + 9 for i in range(1400)], 5, 6], [*range(2500)], [3] * 1100]
    check_texts(texts, 3, options, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_kernel_on_a_gpu(options: dict[str, int]) -> None:
    rng = random.Random(3)
    texts = [random_text(rng, 9000) for _ in range(64)]
    tensors = [tensor.cuda() for tensor in to_pages(texts, 64)]
    slots = torch.arange(64, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = look_up(*tensors, slots, count=7, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = look_up(*to_pages(texts, 64), slots.cpu(), count=7, **options)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_no_drafts_and_no_lanes() -> None:
    tensors = to_pages([[1, 1, 1, 1]], 4)
    slots = torch.zeros(1, dtype=torch.int32)
    drafts, num, agreement = look_up(*tensors, slots, count=0)
    assert drafts.shape == (1, 0) and num.tolist() == agreement.tolist() == [0]
    assert look_up(*tensors, slots[:0], count=3)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"token_pages": torch.zeros(2, 4)}, TypeError, "token_pages: expected dtype int32"),
        ({"seq_len": torch.zeros(2).int()}, ValueError, "seq_len: expected shape"),
        ({"count": -1}, ValueError, "count: expected at least 0"),
        ({"num_tokens": 0}, ValueError, "num_tokens: expected at least 1"),
        ({"max_agreement": 1}, ValueError, "max_agreement: expected at least 2"),
        ({"backend": "cute"}, ValueError, "backend: expected one of"),
    ],
)
def test_wrong_calls(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    names = ("token_pages", "page_table", "seq_len")
    given = dict(zip(names, to_pages([[1, 1, 1, 1]], 4), strict=True))
    given |= {"slots": torch.zeros(1, dtype=torch.int32), "count": 3}
    with pytest.raises(error, match=text):
        look_up(**{**given, **changes})


def test_opcheck_and_compile() -> None:
    tensors = (*to_pages([[1, 2, 3, 1, 2], [7]], 4), torch.tensor([1, 0], dtype=torch.int32))
    expected = look_up(*tensors, count=3)
    assert expected[0].tolist() == [[-1] * 3, [3, 1, 2]]
    compiled = torch.compile(look_up, fullgraph=True, backend="aot_eager")
    found = compiled(*tensors, count=3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.library.opcheck(
        torch.ops.hybridspec.lookup_look_up.default, (*tensors, 2, 16, 16, *expected, "auto")
    )
