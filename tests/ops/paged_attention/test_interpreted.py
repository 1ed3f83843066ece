"""The kernels against the loop in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.attention_cases import BATCHES, check_verify, make_attention_batch, with_far_pages
from helpers.far_memory import far_apart
from helpers.guarded import at_the_end_of_memory
from helpers.thinned import thinned
from helpers.tolerances import assert_same
from hybridspec.ops.paged_attention import launch

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16
CONFIG = launch.LaunchConfig(
    block_m=16, block_n=16, columns=64, num_stages=2, num_warps=4, num_programs=4,
    finish_programs=2, is_overlapped=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_memory_is_poison() -> Iterator[None]:
    """Fill tensors that nobody has written with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "page_size"), thinned(list(BATCHES), [1, 3, 16, 32]))
def test_batches(name: str, page_size: int) -> None:
    make = BATCHES[name] | {"page_size": page_size, "dtype": F32}
    check_verify(make_attention_batch(**make), launch.verify, config=CONFIG)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 50])
def test_any_number_of_programs(num_programs: int) -> None:
    """Every cut of the units: all in one program, a program within a request, more than units."""
    config = replace(CONFIG, num_programs=num_programs)
    make = {"lengths": [4, 0, 2], "positions": [300, 9, 40], "slots": [1, 5, 2], "dtype": F32}
    check_verify(make_attention_batch(**make), launch.verify, config=config)


@pytest.mark.parametrize("num_programs", [3, 4, 6, 10])
@pytest.mark.parametrize("num_heads", [1, 3, 4, 5])
def test_head_groups(num_heads: int, num_programs: int) -> None:
    """As many groups as heads, fewer, or one; groups of more than one head and tile."""
    config = replace(CONFIG, num_programs=num_programs)
    make = {"lengths": [3, 0, 8], "positions": [150, 9, 70], "slots": [1, 5, 2], "dtype": F32}
    heads = {"num_query_heads": 3 * num_heads, "num_kv_heads": num_heads}
    batch = make_attention_batch(**make, **heads, page_size=16)
    check_verify(batch, launch.verify, config=config)


def test_head_groups_divide_heads_and_programs() -> None:
    for num_heads, num_programs, groups in ((2, 132, 2), (8, 132, 4), (5, 132, 1), (1, 132, 1)):
        config = replace(CONFIG, num_programs=num_programs)
        sizes = launch.kernel_sizes(config, 4, 4, num_heads, 4, 64, 16)
        assert sizes.split["HEAD_GROUPS"] == sizes.finish["HEAD_GROUPS"] == groups


def test_more_requests_than_one_kernel_is_built_for() -> None:
    count = 70
    positions = [i % 19 for i in range(count)]
    make = {"lengths": [1] * count, "positions": positions, "slots": list(range(count))}
    batch = make_attention_batch(**make, num_slots=count, page_size=16, dtype=F32)
    check_verify(batch, launch.verify, config=CONFIG)


@pytest.mark.parametrize(
    ("heads", "head_dim"), thinned([(1, 1), (6, 3), (16, 1), (28, 4), (6, 2)], [16, 48, 96, 192])
)
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    make = {"lengths": [3, 1], "positions": [30, 9], "slots": [4, 0], "dtype": F32}
    batch = make_attention_batch(
        **make, num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim
    )
    check_verify(batch, launch.verify, config=CONFIG)


@pytest.mark.parametrize("name", ["ragged", "padding"])
def test_half_precision_and_the_launch_that_is_chosen(name: str) -> None:
    batch = make_attention_batch(**BATCHES[name], page_size=16, head_dim=64, dtype=F16)
    check_verify(batch, launch.verify)


def test_wide_integers_and_strided_tables() -> None:
    make = BATCHES["ragged"] | {"page_size": 16, "dtype": F32}
    batch = make_attention_batch(**make)
    table = batch.page_table.new_full((6, 2 * batch.page_table.shape[1]), -1).long()
    table[:, ::2] = batch.page_table
    wide = {name: getattr(batch, name).long() for name in ("seq_len", "cu_seqlens", "slots")}
    check_verify(replace(batch, page_table=table[:, ::2], **wide), launch.verify, config=CONFIG)


@pytest.mark.parametrize("page_size", [3, 16, 32])
@pytest.mark.parametrize("num_keys", [2, 15, 16, 17, 31, 32, 33, 48])
def test_nothing_behind_the_last_page_is_read(num_keys: int, page_size: int) -> None:
    """Windows of about one, two and three blocks: page numbers are loaded two blocks ahead."""
    positions = [14, num_keys - 2]
    batch = make_attention_batch([3, 2], positions, [0, 5], page_size=page_size, dtype=F32)
    needed = -(-max(num_keys, 17) // page_size)
    guarded = {
        name: at_the_end_of_memory(getattr(batch, name))
        for name in ("seq_len", "cu_seqlens", "slots")
    }
    guarded["page_table"] = at_the_end_of_memory(batch.page_table[:, :needed])
    check_verify(replace(batch, **guarded), launch.verify, config=CONFIG)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.7])
def test_scales(scale: float) -> None:
    make = {"lengths": [4, 2], "positions": [30, 0], "slots": [1, 5], "dtype": F32}
    check_verify(make_attention_batch(**make), launch.verify, scale=scale, config=CONFIG)


def test_pages_past_two_to_the_31st_element(tmp_path: Path) -> None:
    batch = make_attention_batch([4], [30], [2], page_size=16, dtype=F16)
    assert batch.page_table[2, :3].max() >= 2
    check_verify(with_far_pages(batch, tmp_path), launch.verify, config=CONFIG)


def test_rows_past_two_to_the_31st_element(tmp_path: Path) -> None:
    found = []
    for is_far in (False, True):
        batch = make_attention_batch([1] * 4, [20, 3, 0, 9], [2, 1, 5, -1], dtype=F16)
        rows = {"q": batch.q, "k": batch.k, "v": batch.v, "out": torch.empty_like(batch.q)}
        if is_far:
            rows = {
                name: far_apart(part, 4, 2**30, tmp_path / name).copy_(part)
                for name, part in rows.items()
            }
        out = rows.pop("out")
        launch.verify(*replace(batch, **rows).call(1, 0.25, out), config=CONFIG)
        found.append([out, batch.k_pages, batch.v_pages])
    assert_same(found[1][0], found[0][0])
    for far, near in zip(found[1][1:], found[0][1:], strict=True):
        torch.testing.assert_close(far, near, rtol=0, atol=0, equal_nan=True)
    assert found[0][0][:3].isfinite().all() and found[0][0][3].eq(0).all()


def test_no_requests() -> None:
    batch = make_attention_batch([], [], [], tail_rows=3, dtype=F32)
    check_verify(batch, launch.verify, config=CONFIG)


def test_refusals_say_why() -> None:
    batch = make_attention_batch([2], [3], [1], dtype=F32)
    out = torch.empty(2, 4, 16)
    assert launch.explain_verify(*batch.call(2, None, out)) is None
    half = replace(batch, k_pages=batch.k_pages.half(), v_pages=batch.v_pages.half())
    apart = replace(batch, v_pages=batch.v_pages.contiguous())
    transposed = torch.empty(2, 16, 4).transpose(1, 2)
    mixed = replace(batch, v_pages=batch.v_pages.double())
    many = replace(batch, slots=torch.zeros(4097, dtype=torch.int32))
    for arguments, reason in (
        (half.call(2, None, out), "k_pages has dtype float16, q has float32"),
        (apart.call(2, None, out), "v_pages has strides"),
        (batch.call(2, None, transposed), "out has strides"),
        (batch.call(17, None, out), "max_verify_tokens is 17"),
        (many.call(2, None, out), "slots: 4097 requests, the kernel takes up to 4096"),
        (mixed.call(2, None, out), "v_pages has"),
    ):
        assert reason in launch.explain_verify(*arguments)


def test_one_request_twice_gives_the_same() -> None:
    make = {"lengths": [4], "positions": [70], "slots": [2], "dtype": F32}
    results = []
    for _ in range(2):
        batch = make_attention_batch(**make)
        out = torch.empty_like(batch.q, memory_format=torch.contiguous_format)
        launch.verify(*batch.call(4, 0.25, out), config=CONFIG)
        results.append(out)
    assert_same(*results)


def test_the_oracle_would_see_a_missing_part() -> None:
    """Teeth: without the second launch what was cut is not written."""
    batch = make_attention_batch([4], [70], [2], dtype=F32)
    with pytest.raises(AssertionError):
        check_verify(batch, lambda rows, *others, **_: rows.out.zero_())
