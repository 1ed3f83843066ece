"""The compiled kernels against fp64 on a CUDA device, eager and in CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.attention_cases import BATCHES, PROMPTS, check_verify, make_attention_batch
from hybridspec.ops import paged_attention
from hybridspec.ops.paged_attention import launch, launch_prefill

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_batches(dtype: torch.dtype, name: str) -> None:
    batch = make_attention_batch(**BATCHES[name], page_size=16, head_dim=64, dtype=dtype)
    check_verify(batch, launch.verify, device="cuda")


@dataclass(frozen=True, kw_only=True)
class Large:
    """A batch on the device; pages scattered, what lies behind the last position is NaN."""

    lengths: list[int]
    positions: list[int]
    page_size: int = 16
    heads: tuple[int, int] = (16, 2)
    head_dim: int = 256
    dtype: torch.dtype = BF16

    def build(self) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(len(self.lengths))
        query_heads, kv_heads = self.heads
        bounds = [0, *itertools.accumulate(self.lengths)]
        batch, size = len(self.lengths), self.page_size

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(self.dtype)

        needed = [-(-(p + n) // size) for p, n in zip(self.positions, self.lengths, strict=True)]
        pages = torch.randperm(sum(needed) + 1, generator=generator, device="cuda").int()
        table = torch.full((batch, max(needed) + 1), -1, dtype=torch.int32, device="cuda")
        shape = (sum(needed) + 1, size, kv_heads, self.head_dim)
        pools = [torch.full(shape, torch.nan, dtype=self.dtype, device="cuda") for _ in range(2)]
        begin = 0
        for slot, (count, position) in enumerate(zip(needed, self.positions, strict=True)):
            mine = pages[begin : begin + count]
            table[slot, :count] = mine
            begin += count
            for pool in pools:
                rows = torch.full((count * size, *shape[2:]), torch.nan, device="cuda")
                rows[:position] = normal(position, *shape[2:])
                pool[mine.long()] = rows.to(self.dtype).view(count, *shape[1:])
        return {
            "q": normal(bounds[-1], query_heads, self.head_dim),
            "k": normal(bounds[-1], kv_heads, self.head_dim),
            "v": normal(bounds[-1], kv_heads, self.head_dim),
            "k_pages": pools[0],
            "v_pages": pools[1],
            "page_table": table,
            "seq_len": torch.tensor(self.positions, dtype=torch.int32, device="cuda"),
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device="cuda"),
            "slots": torch.arange(batch, dtype=torch.int32, device="cuda"),
        }


def run(call: dict[str, Tensor], rows: int, **options: object) -> Tensor:
    return paged_attention.verify(**call, max_verify_tokens=rows, backend="triton", **options)


def check(call: dict[str, Tensor], out: Tensor) -> None:
    """Each request within twice the error of PyTorch in the same dtype."""
    bounds = call["cu_seqlens"].tolist()
    size = call["k_pages"].shape[1]
    group = call["q"].shape[1] // call["k"].shape[1]
    for begin, end, slot in zip(bounds, bounds[1:], call["slots"].tolist(), strict=False):
        if slot < 0:
            assert (out[begin:end] == 0).all()
            continue
        if begin == end:
            continue
        length = int(call["seq_len"][slot]) + end - begin
        pages = call["page_table"][slot, : -(-length // size)].long()
        keys, values = (
            call[name][pages].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0)
            for name in ("k_pages", "v_pages")
        )
        for stored, name in ((keys, "k"), (values, "v")):
            new = stored[::group, length - end + begin :]
            assert torch.equal(new, call[name][begin:end].transpose(0, 1))
        mask = torch.ones(end - begin, length, dtype=torch.bool, device="cuda")
        mask = mask.tril(length - end + begin)
        plain, right = (
            F.scaled_dot_product_attention(
                call["q"][begin:end].transpose(0, 1).to(dtype), keys.to(dtype), values.to(dtype),
                attn_mask=mask,
            ).transpose(0, 1)
            for dtype in (out.dtype, torch.float64)
        )  # fmt: skip
        allowed = 2 * (plain.double() - right).abs().max()
        assert (out[begin:end].double() - right).abs().max() <= allowed


CASES = {
    "one request, 64K": Large(lengths=[4], positions=[65_532]),
    "one row, one key": Large(lengths=[1], positions=[0]),
    "two requests, 32K": Large(lengths=[4, 4], positions=[32_764, 32_700], page_size=64),
    "pages of one": Large(lengths=[3, 0, 4], positions=[5000, 7, 1], page_size=1),
    "zero rows first and last": Large(
        lengths=[0, 4, 1, 0, 3, 2, 4, 0], positions=[9, 8188, 0, 70, 4097, 63, 64, 3000],
        page_size=128,
    ),
    "256 requests": Large(
        lengths=[n % 5 for n in range(256)], positions=[37 * n % 1100 for n in range(256)]
    ),
    "eight rows": Large(lengths=[8, 5, 8], positions=[5000, 300, 1024]),
    "two tiles of rows": Large(
        lengths=[8, 1, 6], positions=[900, 400, 30], heads=(16, 1), head_dim=192
    ),
    "one and two blocks": Large(
        lengths=[4, 4, 4, 1, 2], positions=[60, 124, 61, 127, 188], page_size=64
    ),
    "one key head": Large(lengths=[4, 3, 1], positions=[3000, 70, 9000], heads=(8, 1)),
    "three key heads": Large(
        lengths=[4, 2], positions=[5000, 63], heads=(12, 3), head_dim=128, page_size=128
    ),
    "five key heads": Large(lengths=[4, 1, 3], positions=[700, 9000, 63], heads=(10, 5)),
    "fp16, 96": Large(
        lengths=[2, 4], positions=[900, 3333], heads=(8, 8), head_dim=96, dtype=F16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sizes(name: str) -> None:
    call = CASES[name].build()
    check(call, run(call, 8 if max(CASES[name].lengths) > 4 else 4))


def test_one_page_per_slot() -> None:
    """A contiguous cache is a pool whose pages are as long as the longest context."""
    positions = [700, 0, 4000]
    call = Large(lengths=[4, 2, 3], positions=positions, page_size=4096).build()
    assert call["page_table"].shape[1] == 2
    call["page_table"] = call["page_table"][:, :1].contiguous()
    check(call, run(call, 4))


@pytest.mark.usefixtures("large_memory")
def test_pages_past_two_to_the_31_elements() -> None:
    call = Large(lengths=[4, 3], positions=[1000, 77]).build()
    offset = 2**31 // call["k_pages"][0].numel()
    for name in ("k_pages", "v_pages"):
        pages = call[name]
        large = pages.new_empty(offset + len(pages), *pages.shape[1:])
        large[offset:] = pages
        call[name] = large
    call["page_table"] += (call["page_table"] >= 0) * offset
    assert call["k_pages"].numel() > 2**31
    check(call, run(call, 4))


def captured(call: Callable[[], object], pool: object = None) -> torch.cuda.CUDAGraph:
    """Warm a call up and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph


def test_a_graph_follows_its_inputs() -> None:
    """Captured with 8 requests, replayed with fewer: the rest is padding or has no rows."""
    positions = [700, 3, 0, 4000, 90, 64, 2000, 15]
    call = Large(lengths=[4] * 8, positions=[p + 600 for p in positions]).build()
    out = torch.empty_like(call["q"])
    graph = captured(lambda: run(call, 4, out=out))
    for lengths, slots in (
        ([4] * 8, list(range(8))),
        ([4, 2, 1, 0, 0, 0, 0, 0], [6, 0, 3, -1, -1, -1, -1, -1]),
        ([0, 3, 0, 4, 2, 0, 0, 0], [1, 5, -1, 3, -1, 2, 0, -1]),
        ([0] * 8, [-1] * 8),
        ([1, 4, 4, 4, 4, 4, 4, 4], [7, 6, 5, 4, 3, 2, 1, 0]),
    ):
        call["cu_seqlens"].copy_(torch.tensor([0, *itertools.accumulate(lengths)]))
        call["slots"].copy_(torch.tensor(slots))
        call["seq_len"].copy_(torch.tensor(positions))
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        assert (replayed[sum(lengths) :] == 0).all()
        check(call, replayed)
        out.fill_(torch.nan)
        assert torch.equal(run(call, 4, out=out), replayed)
        positions = [p + 1 + 20 * (p % 7) for p in positions]


def test_a_result_survives_another_graph_of_the_pool() -> None:
    target = Large(lengths=[4] * 4, positions=[900, 30, 2000, 1]).build()
    draft = Large(lengths=[1] * 4, positions=[500, 31, 1000, 7]).build()
    pool = torch.cuda.graph_pool_handle()
    kept: list[Tensor] = []
    first = captured(lambda: kept.append(run(target, 4)), pool)
    second = captured(lambda: kept.append(run(draft, 4)), pool)
    first.replay()
    result = kept[1].clone()
    second.replay()
    assert torch.equal(kept[1], result)
    check(target, result)
    check(draft, kept[3])


def test_200_replays_give_the_same_bits() -> None:
    call = Large(lengths=[4, 1, 3, 4], positions=[9000, 60, 300, 4000]).build()
    out = torch.empty_like(call["q"])
    graph = captured(lambda: run(call, 4, out=out))
    graph.replay()
    first = out.clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        out.fill_(torch.nan)
        graph.replay()
        wrong += (out != first).sum()
    assert wrong.item() == 0


def test_a_negative_scale_and_none_at_all() -> None:
    call = Large(lengths=[4, 2], positions=[300, 30]).build()
    for scale in (-0.05, 0.0):
        found = run(call, 4, scale=scale)
        expected = paged_attention.verify(
            **call, max_verify_tokens=4, scale=scale, backend="reference"
        )
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", BATCHES | PROMPTS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_batches_of_prompts(dtype: torch.dtype, name: str) -> None:
    make = (BATCHES | PROMPTS)[name]
    batch = make_attention_batch(**make, page_size=16, head_dim=64, dtype=dtype)
    check_verify(batch, launch_prefill.prefill, device="cuda")


PROMPT_CASES = {
    "one prompt": Large(lengths=[4096], positions=[0], page_size=64, heads=(16, 4)),
    "32 prompts": Large(lengths=[128] * 32, positions=[0] * 32, page_size=64, heads=(16, 4)),
    "later chunks": Large(lengths=[700, 1, 300], positions=[1500, 900, 33], head_dim=128),
    "small pages": Large(lengths=[200, 129], positions=[0, 64], heads=(12, 3), head_dim=192),
    "fp16, 96": Large(lengths=[130, 5], positions=[77, 0], heads=(8, 8), head_dim=96, dtype=F16),
}


@pytest.mark.parametrize("name", PROMPT_CASES)
def test_sizes_of_prompts(name: str) -> None:
    call = PROMPT_CASES[name].build()
    run_prompts(call)  # what is compiled may read the device
    call = PROMPT_CASES[name].build()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = run_prompts(call, max(PROMPT_CASES[name].lengths))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(call, out)


def run_prompts(call: dict[str, Tensor], longest: int | None = None) -> Tensor:
    longest = call["q"].shape[0] if longest is None else longest
    return paged_attention.prefill(**call, max_seqlen=longest, backend="triton")


def test_chunks_do_not_change_a_bit() -> None:
    whole = Large(lengths=[500], positions=[0], page_size=64).build()
    right = run_prompts(whole)
    parts = Large(lengths=[500], positions=[0], page_size=64).build()
    found, start = [], 0
    for rows in (130, 64, 5, 301):
        bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        part = {name: parts[name][start : start + rows] for name in ("q", "k", "v")}
        found.append(run_prompts(parts | part | {"cu_seqlens": bounds}))
        parts["seq_len"] += rows
        start += rows
    assert torch.equal(torch.cat(found), right)
