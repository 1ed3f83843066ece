"""Attention over pieces of fixed positions against the loop, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers.attention_cases import BATCHES, check_verify, make_attention_batch
from helpers.thinned import thinned
from hybridspec.ops.paged_attention import launch_pieces

pytestmark = pytest.mark.interpreted

F32 = torch.float32


@pytest.fixture(autouse=True)
def small_pieces_and_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of one or a few blocks; tensors that nobody has written hold NaN."""
    monkeypatch.setattr(launch_pieces, "_PIECE", 16)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "page_size"), thinned(list(BATCHES), [3, 16]))
def test_batches(name: str, page_size: int) -> None:
    make = BATCHES[name] | {"page_size": page_size, "dtype": F32}
    check_verify(make_attention_batch(**make), launch_pieces.verify)


def test_pieces_that_grow_with_the_position() -> None:
    """From the sixteenth piece on they are longer: 500 positions are behind three doublings."""
    make = {"lengths": [4, 0, 2], "positions": [250, 9, 500], "slots": [1, 5, 2], "dtype": F32}
    check_verify(make_attention_batch(**make), launch_pieces.verify)


def test_number_of_pieces() -> None:
    sizes = (1, 16, 17, 256, 257, 512, 513, 1024)
    assert [launch_pieces.num_pieces(size) for size in sizes] == [1, 1, 2, 16, 17, 24, 25, 32]
