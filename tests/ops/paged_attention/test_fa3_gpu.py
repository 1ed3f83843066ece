"""FlashAttention-3 itself on a CUDA device against the oracle, from plans made there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.append_cases import CASES, check_append, moved
from helpers.attention_cases import AttentionBatch, expected_output, make_attention_batch
from hybridspec.ops import paged_attention
from hybridspec.ops.paged_attention import cpu, fa3
from hybridspec.ops.verify_plan import Step, plan_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        isinstance(fa3.installed_build(), str), reason=f"FlashAttention-3: {fa3.installed_build()}"
    ),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# (Hq, Hkv, D)
GEOMETRIES = [(16, 2, 256), (32, 8, 128), (8, 8, 64), (6, 1, 96), (12, 4, 192), (16, 1, 80)]


def make_caches(
    lengths: list[int],
    positions: list[int],
    slots: list[int],
    *,
    heads: tuple[int, int, int] = (16, 2, 256),
    num_slots: int | None = None,
    capacity: int | None = None,
    tail_rows: int = 2,
    dtype: torch.dtype = BF16,
) -> AttentionBatch:
    """A batch over caches of one page per slot; what nobody owns is NaN, or a page out of range."""
    num_heads, num_kv_heads, head_dim = heads
    num_slots = max(slots) + 1 if num_slots is None else num_slots
    capacity = (
        max(p + n for p, n in zip(positions, lengths, strict=True))
        if capacity is None
        else capacity
    )
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": dtype}
    num_rows = sum(lengths)
    rows = torch.full((num_rows + tail_rows, num_heads + 2 * num_kv_heads, head_dim), math.nan)
    rows = rows.to("cuda", dtype)
    rows[:num_rows] = torch.randn(rows[:num_rows].shape, **options)
    q, k, v = rows.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    pages = torch.zeros(2, num_slots, capacity, num_kv_heads, head_dim, device="cuda", dtype=dtype)
    page_table = torch.full((num_slots, 1), 10**6, device="cuda", dtype=torch.int32)
    seq_len = torch.full((num_slots,), 10**6, device="cuda", dtype=torch.int32)
    bounds = [0]
    for length, position, slot in zip(lengths, positions, slots, strict=True):
        bounds.append(bounds[-1] + length)
        if slot >= 0:
            page = num_slots - 1 - slot
            seq_len[slot], page_table[slot, 0] = position, page
            pages[:, page, :position] = torch.randn(pages[:, page, :position].shape, **options)
    integers = {"device": "cuda", "dtype": torch.int32}
    return AttentionBatch(
        q=q,
        k=k,
        v=v,
        k_pages=pages[0],
        v_pages=pages[1],
        page_table=page_table,
        seq_len=seq_len,
        cu_seqlens=torch.tensor(bounds, **integers),
        slots=torch.tensor(slots, **integers),
        past_keys=[],
        past_values=[],
    )


def attend(batch: AttentionBatch, backend: str = "fa3", **options: object) -> Tensor:
    out = torch.full_like(batch.q, math.nan, memory_format=torch.contiguous_format)
    longest = max(1, batch.longest)
    return paged_attention.verify(
        *batch.tensors, max_verify_tokens=longest, out=out, backend=backend, **options
    )


def oracle(batch: AttentionBatch) -> Tensor:
    """The reference in fp64 over the same pages, with its own copy of them."""
    out = torch.empty_like(batch.q, dtype=torch.float64)
    copied = replace(
        batch, q=batch.q.double(), k_pages=batch.k_pages.clone(), v_pages=batch.v_pages.clone()
    )
    cpu.verify(*copied.call(max(1, batch.longest), None, out))
    return out


def plain(batch: AttentionBatch) -> Tensor:
    """PyTorch in the dtype of the batch, from pages in which the rows are stored already."""
    out = torch.zeros_like(batch.q)
    group = batch.q.shape[1] // batch.k.shape[1]
    for start, stop, slot in batch.requests():
        if slot < 0 or start == stop:
            continue
        page, length = int(batch.page_table[slot, 0]), int(batch.seq_len[slot]) + stop - start
        keys, values = (
            pool[page, :length].repeat_interleave(group, 1)
            for pool in (batch.k_pages, batch.v_pages)
        )
        scores = torch.einsum("thd,lhd->htl", batch.q[start:stop], keys) * batch.q.shape[2] ** -0.5
        ends = torch.arange(length - (stop - start), length, device="cuda")
        scores.masked_fill_(torch.arange(length, device="cuda") > ends[:, None], -math.inf)
        out[start:stop] = torch.einsum("htl,lhd->thd", scores.softmax(-1), values)
    return out


def check(batch: AttentionBatch) -> None:
    """Output, appended rows, and that nothing else of the pages moved."""
    right = oracle(batch)
    plainly = [pages.clone() for pages in (batch.k_pages, batch.v_pages)]
    untouched = replace(batch, k_pages=plainly[0], v_pages=plainly[1])
    attend(untouched, "reference")
    out = attend(batch)
    assert torch.equal(batch.k_pages, plainly[0]) and torch.equal(batch.v_pages, plainly[1])
    allowed = 2 * (plain(batch).double() - right).abs().max() + torch.finfo(F32).eps
    found = (out.double() - right).abs().max()
    assert found <= allowed, (float(found), float(allowed))
    dead = torch.ones(len(out), dtype=torch.bool)
    for start, stop, slot in batch.requests():
        dead[start:stop] = slot < 0
    assert out[dead].eq(0).all()


@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_head_sizes_and_groups(heads: tuple[int, int, int]) -> None:
    check(make_caches([0, 4, 1, 0, 8, 2, 0], [9, 0, 1000, 3, 127, 64, 5], [0, 6, 2, 3, 1, 4, 5],
                      heads=heads))  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "positions", "slots"),
    [
        ([1], [0], [0]),
        ([8], [0], [3]),
        ([1], [65_535], [0]),
        ([4], [65_000], [0]),
        ([2, 3, 1, 0], [70, 0, 2000, 0], [-1, 3, -1, 0]),
        ([0, 2], [0, 0], [-1, -1]),
        ([i % 9 for i in range(256)], [37 * i % 2048 for i in range(256)], [*range(256)]),
    ],
    ids=["first row", "first rows", "one of 64K", "four of 64K", "padding", "only padding", "256"],
)
def test_batches(lengths: list[int], positions: list[int], slots: list[int]) -> None:
    check(make_caches(lengths, positions, slots, num_slots=max(4, len(slots))))


def test_integers_of_64_bits_and_another_scale() -> None:
    batch = make_caches([3, 1], [40, 7], [1, 0])
    names = ("page_table", "seq_len", "cu_seqlens", "slots")
    wide = replace(batch, **{name: getattr(batch, name).to(torch.int64) for name in names})
    found, right = attend(wide, scale=0.2), attend(batch, "reference", scale=0.2)
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(found, attend(batch), atol=2e-2)


@pytest.mark.usefixtures("large_memory")
def test_caches_past_2_31_elements() -> None:
    batch = make_caches([4, 1], [33_000, 90], [0, 33], num_slots=34, capacity=1 << 17)
    assert batch.k_pages.numel() > 2**31 and int(batch.page_table[0, 0]) == 33
    check(batch)


def test_a_prompt_in_chunks() -> None:
    """Prefill: the same call with many rows."""
    batch = make_caches([300, 0, 77], [0, 50, 512], [2, 0, 1])
    right = oracle(batch)
    out = paged_attention.prefill(*batch.tensors, max_seqlen=300, backend="fa3")
    allowed = 2 * (plain(batch).double() - right).abs().max()
    assert (out.double() - right).abs().max() <= allowed
    auto = paged_attention.prefill(*batch.tensors, max_seqlen=300)
    assert torch.equal(auto, out)


def test_graph_replay_follows_the_plan() -> None:
    """Plan, append, attend in one graph whose capacity is above the live requests."""
    capacity, num_drafts = 8, 3
    batch = make_caches([0] * capacity, [0] * capacity, [*range(capacity)], capacity=700,
                        tail_rows=24)  # fmt: skip
    batch.q.nan_to_num_(1.0), batch.k.nan_to_num_(0.5), batch.v.nan_to_num_(0.25)
    generator = torch.Generator("cuda").manual_seed(1)
    for rows in (batch.q, batch.k, batch.v, batch.k_pages, batch.v_pages):
        rows.copy_(torch.randn(rows.shape, device="cuda", generator=generator))
    plan = Step.create(max_requests=capacity, max_rows=24, max_drafts=num_drafts, device="cuda")
    slots, confidences = batch.slots.clone(), torch.rand(capacity, num_drafts, device="cuda")
    tokens = torch.zeros(capacity, num_drafts + 1, dtype=torch.int64, device="cuda")
    history = torch.zeros_like(batch.seq_len)
    planned = replace(batch, cu_seqlens=plan.cu_seqlens, slots=plan.slots)
    out = torch.empty_like(batch.q, memory_format=torch.contiguous_format)

    def step() -> None:
        plan_step(confidences, tokens, slots, batch.seq_len, history, plan=plan, num_rows=12)
        paged_attention.verify(
            *planned.tensors, max_verify_tokens=num_drafts + 1, out=out, backend="fa3"
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seen = set()
    for live, length in ((8, 3), (1, 690), (5, 256), (0, 5), (3, 0)):
        slots.copy_(torch.tensor([*range(live)] + [-1] * (capacity - live)).cuda().flip(0))
        batch.seq_len.copy_(torch.arange(capacity).cuda() + length)
        confidences.uniform_(generator=generator)
        out.fill_(math.nan)
        graph.replay()
        replayed, bounds = out.clone(), plan.cu_seqlens.tolist()
        right = oracle(planned)
        out.fill_(math.nan)
        step()
        assert torch.equal(out, replayed) and plan.cu_seqlens.tolist() == bounds
        assert (replayed.double() - right).abs().max() <= 2 * (
            plain(planned).double() - right
        ).abs().max()
        assert replayed[bounds[-1] :].eq(0).all()
        seen.add(tuple(bounds))
    assert len(seen) == 5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F32, F16)], ids=str)
def test_append(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_append(name, dtypes, "cuda")


def test_pages_are_refused_or_right() -> None:
    """A build with page tables serves them; fa3-fwd says that it does not."""
    batch = make_attention_batch([3, 0, 2], [30, 4, 0], [0, 1, 2], head_dim=64, dtype=BF16,
                                 page_size=16)  # fmt: skip
    call = moved(batch, "cuda")
    names = ("q", "k", "v", "k_pages", "v_pages")  # side by side, as what lies apart is refused too
    call = replace(call, **{n: getattr(call, n).nan_to_num(0).contiguous() for n in names})
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    reason = fa3.explain(*call.call(3, None, out))
    if isinstance(fa3.installed_build(True), str):
        assert "built without page tables" in reason
        return
    right = expected_output(batch)
    torch.testing.assert_close(attend(call).cpu().double(), right, rtol=2e-2, atol=2e-2)
