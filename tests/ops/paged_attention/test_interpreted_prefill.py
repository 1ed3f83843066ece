"""The prompts' kernel against the loop in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.attention_cases import (
    BATCHES,
    PROMPTS,
    check_verify,
    make_attention_batch,
    with_far_pages,
)
from helpers.guarded import at_the_end_of_memory
from helpers.tolerances import assert_same
from hybridspec.ops.paged_attention import launch, launch_prefill
from hybridspec.ops.paged_attention.call import Rows

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16
CONFIG = launch_prefill.PrefillLaunch(block_m=16, block_n=16, num_stages=2, num_warps=4)


@pytest.mark.parametrize("name", BATCHES | PROMPTS)
def test_batches(name: str) -> None:
    batch = make_attention_batch(**(BATCHES | PROMPTS)[name], dtype=F32)
    check_verify(batch, launch_prefill.prefill, config=CONFIG)


@pytest.mark.parametrize("page_size", [3, 16, 32])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_sizes(head_dim: int, page_size: int) -> None:
    sizes = {"head_dim": head_dim, "page_size": page_size, "dtype": F32}
    batch = make_attention_batch(**PROMPTS["later chunks"], **sizes)
    check_verify(batch, launch_prefill.prefill, config=CONFIG)


def test_16_bits() -> None:
    batch = make_attention_batch(**PROMPTS["later chunks"], dtype=F16)
    check_verify(batch, launch_prefill.prefill)


def test_64_bit_indices_and_a_strided_page_table() -> None:
    batch = make_attention_batch(**PROMPTS["later chunks"], page_size=16, dtype=F32)
    table = batch.page_table.new_full((6, 2 * batch.page_table.shape[1]), -1).long()
    table[:, ::2] = batch.page_table
    wide = {name: getattr(batch, name).long() for name in ("seq_len", "cu_seqlens", "slots")}
    wide_batch = replace(batch, page_table=table[:, ::2], **wide)
    check_verify(wide_batch, launch_prefill.prefill, config=CONFIG)


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("num_keys", [15, 16, 17, 33])
def test_nothing_behind_the_last_page_is_read(num_keys: int, page_size: int) -> None:
    batch = make_attention_batch([num_keys], [0], [5], page_size=page_size, dtype=F32)
    guarded = {
        name: at_the_end_of_memory(getattr(batch, name))
        for name in ("seq_len", "cu_seqlens", "slots")
    }
    needed = -(-num_keys // page_size)
    guarded["page_table"] = at_the_end_of_memory(batch.page_table[:, :needed])
    check_verify(replace(batch, **guarded), launch_prefill.prefill, config=CONFIG)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.7])
def test_scales(scale: float) -> None:
    batch = make_attention_batch(**PROMPTS["later chunks"], dtype=F32)
    check_verify(batch, launch_prefill.prefill, scale=scale, config=CONFIG)


def test_pages_past_two_to_the_31st_element(tmp_path: Path) -> None:
    batch = make_attention_batch([20], [30], [2], page_size=16, dtype=F16)
    assert batch.page_table[2, :4].max() >= 2
    check_verify(with_far_pages(batch, tmp_path), launch_prefill.prefill, config=CONFIG)


def test_no_requests() -> None:
    batch = make_attention_batch([], [], [], tail_rows=3, dtype=F32)
    check_verify(batch, launch_prefill.prefill, config=CONFIG)


def test_chunks_do_not_change_a_row() -> None:
    """Blocks of keys begin at position 0, and what a row does not see leaves its sums alone."""
    [whole], found = _run([37]), _run([5, 16, 13, 3])
    assert_same(torch.cat(found), whole)


def _run(chunks: list[int]) -> list[torch.Tensor]:
    batch = make_attention_batch([37], [0], [1], page_size=16, dtype=F32)
    outputs, start = [], 0
    for rows in chunks:
        part = slice(start, start + rows)
        bounds = torch.tensor([0, rows], dtype=torch.int32)
        mine = {name: getattr(batch, name)[part] for name in ("q", "k", "v")}
        chunk = replace(batch, cu_seqlens=bounds, **mine)
        out = torch.empty(rows, *batch.q.shape[1:])
        launch_prefill.prefill(*chunk.call(rows, 0.25, out), config=CONFIG)
        outputs.append(out)
        batch.seq_len[1] += rows
        start += rows
    return outputs


def test_refusals_say_why() -> None:
    batch = make_attention_batch([2], [3], [1], dtype=F32)
    out = torch.empty(2, 4, 16)
    assert launch.explain_call(*batch.call(2, None, out)) is None
    half = replace(batch, k_pages=batch.k_pages.half(), v_pages=batch.v_pages.half())
    apart = replace(batch, v_pages=batch.v_pages.contiguous())
    transposed = torch.empty(2, 16, 4).transpose(1, 2)
    double = replace(batch, k_pages=batch.k_pages.double())
    for call, reason in (
        (half.call(2, None, out), "k_pages has dtype float16, q has float32"),
        (apart.call(2, None, out), "v_pages has strides"),
        (batch.call(2, None, transposed), "out has strides"),
        (double.call(2, None, out), "k_pages has dtype float64"),
    ):
        assert reason in launch.explain_call(*call)


def test_the_oracle_would_see_rows_in_another_order() -> None:
    batch = make_attention_batch([20], [30], [2], page_size=16, dtype=F32)

    def run(rows: Rows, *arguments: object, **options: object) -> None:
        launch_prefill.prefill(rows._replace(q=rows.q.roll(1, 0)), *arguments, **options)

    with pytest.raises(AssertionError):
        check_verify(batch, run, config=CONFIG)
