"""Ragged batches for paged attention and a loop over rows and heads that says what is right.

Every number that an op must not read is NaN: padding rows, page rows without a live position,
and the memory around the strided views. Entries of the page table behind the live pages are -1, far
out of range, or a page of somebody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from helpers.far_memory import far_apart
from hybridspec.ops._requests import Batch
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = [
    "BATCHES",
    "PROMPTS",
    "AttentionBatch",
    "check_verify",
    "expected_output",
    "expected_pages",
    "make_attention_batch",
    "with_far_pages",
]

# What a kernel must get right, small enough for Triton's interpreter.
BATCHES: dict[str, dict] = {
    "one row": {"lengths": [1], "positions": [37], "slots": [2]},
    "no context": {"lengths": [3, 1, 4], "positions": [0, 0, 0], "slots": [5, 1, 0]},
    "key length 0": {"lengths": [0, 1, 0, 4], "positions": [0, 0, 9, 0], "slots": [3, 1, 0, 2]},
    "ragged": {"lengths": [2, 4, 8, 1], "positions": [17, 33, 0, 64], "slots": [1, 5, 2, 0]},
    "no rows first": {"lengths": [0, 3, 2], "positions": [20, 31, 16], "slots": [4, 0, 1]},
    "no rows between": {"lengths": [2, 0, 3], "positions": [20, 31, 16], "slots": [4, 0, 1]},
    "no rows last": {"lengths": [2, 3, 0], "positions": [20, 31, 16], "slots": [4, 0, 1]},
    "padding": {
        "lengths": [2, 4, 3, 1], "positions": [17, 33, 3, 6], "slots": [1, -1, 0, -1],
        "tail_rows": 3,
    },
    "nobody": {"lengths": [2, 0], "positions": [3, 3], "slots": [-1, 0], "tail_rows": 2},
    "room left": {
        "lengths": [3, 1, 0, 0], "positions": [17, 5, 0, 0], "slots": [2, 0, -1, -1],
        "tail_rows": 4,
    },
    "odd lengths": {"lengths": [5, 6, 7], "positions": [30, 11, 26], "slots": [4, 5, 0]},
    "wide group": {
        "lengths": [8, 2, 5], "positions": [31, 40, 5], "slots": [1, 0, 4],
        "num_query_heads": 16, "num_kv_heads": 1,
    },
}  # fmt: skip
PROMPTS: dict[str, dict] = {
    "prompt": {"lengths": [50], "positions": [0], "slots": [3]},
    "prompts": {"lengths": [33, 16, 1, 17], "positions": [0, 0, 0, 0], "slots": [3, 1, 0, 5]},
    "later chunks": {
        "lengths": [20, 5, 0, 33], "positions": [12, 0, 3, 31], "slots": [4, -1, 2, 0],
        "tail_rows": 3,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """The tensors of one call, and all keys and values [position, Hkv, D] stored before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    seq_len: Tensor
    cu_seqlens: Tensor
    slots: Tensor
    past_keys: list[Tensor]
    past_values: list[Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The positional arguments of the ops."""
        return (
            self.q, self.k, self.v, self.k_pages, self.v_pages, self.page_table, self.seq_len,
            self.cu_seqlens, self.slots,
        )  # fmt: skip

    def call(self, max_rows: int, scale: float | None, out: Tensor) -> tuple[Rows, Pages, Batch]:
        """The arguments of a backend."""
        return (
            Rows(self.q, self.k, self.v, out, scale),
            Pages(self.k_pages, self.v_pages, self.page_table, self.seq_len),
            Batch(self.cu_seqlens, self.slots, max_rows),
        )

    @property
    def longest(self) -> int:
        return max((stop - start for start, stop, _ in self.requests()), default=0)

    def to(self, device: str) -> AttentionBatch:
        """The batch on another device, its strided views still views of larger allocations."""
        if device == "cpu":
            return self
        moved = {}
        for name in ("page_table", "seq_len", "cu_seqlens", "slots"):
            moved[name] = getattr(self, name).to(device)
        bases: dict[int, Tensor] = {}
        for name in ("q", "k", "v", "k_pages", "v_pages"):
            mine = getattr(self, name)
            base = bases.setdefault(id(mine._base), mine._base.to(device))
            moved[name] = base.as_strided(mine.shape, mine.stride(), mine.storage_offset())
        return replace(self, **moved)

    def requests(self) -> list[tuple[int, int, int]]:
        """(start, stop, slot) of every request."""
        bounds = self.cu_seqlens.tolist()
        return list(zip(bounds, bounds[1:], self.slots.tolist(), strict=False))


def make_attention_batch(
    lengths: list[int],
    positions: list[int],
    slots: list[int],
    *,
    num_slots: int = 6,
    page_size: int = 4,
    num_query_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tail_rows: int = 0,
    has_ordered_pages: bool = False,
    dtype: torch.dtype = torch.float64,
    page_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> AttentionBatch:
    """Build a batch whose rows and pages are strided views of larger allocations.

    q and k lie in one, v in another with other strides.
    """
    generator = torch.Generator().manual_seed(seed)
    page_dtype = page_dtype or dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    num_rows = bounds[-1] + tail_rows
    heads = num_query_heads + 2 * num_kv_heads
    rows = torch.full((num_rows, heads, head_dim + 4), math.nan, dtype=dtype)[:, :, 2:-2]
    q, k = rows[:, num_kv_heads:].split((num_query_heads, num_kv_heads), dim=1)
    v = torch.full((num_rows, num_kv_heads + 2, head_dim + 8), math.nan, dtype=dtype)
    v = v[:, 1:-1, 4:-4]

    needed = [-(-(p + n) // page_size) for n, p in zip(lengths, positions, strict=True)]
    num_pages, max_pages = sum(needed) + 3, max(needed, default=0) + 2
    free = list(range(num_pages))
    if not has_ordered_pages:
        free = torch.randperm(num_pages, generator=generator).tolist()
    pool = torch.full(
        (num_pages, 2, page_size + 1, num_kv_heads, head_dim + 2), math.nan, dtype=page_dtype
    )[:, :, :page_size, :, 1:-1]
    k_pages, v_pages = pool.unbind(1)
    junk = torch.tensor([-1, 10**6, 0, num_pages - 1], dtype=torch.int32)
    # Where slot -1 would be there are other positions and pages.
    page_table = junk[torch.randint(4, (1 + num_slots, max_pages), generator=generator)][1:]
    seq_len = torch.tensor([50] + num_slots * [10**6], dtype=torch.int32)[1:]
    past_keys, past_values = [], []
    for index, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        for past, pages in ((past_keys, k_pages), (past_values, v_pages)):
            past.append(random(position, num_kv_heads, head_dim).to(pages.dtype))
        if slot < 0:
            continue
        mine = slice(bounds[index], bounds[index + 1])
        for tensor in (q, k, v):
            tensor[mine] = random(lengths[index], *tensor.shape[1:]).to(dtype)
        seq_len[slot] = position
        for entry in range(needed[index]):
            page_table[slot, entry] = free.pop(0)
        for p in range(position):
            place = int(page_table[slot, p // page_size]), p % page_size
            k_pages[place] = past_keys[index][p]
            v_pages[place] = past_values[index][p]
    return AttentionBatch(
        q=q,
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        seq_len=seq_len,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        past_keys=past_keys,
        past_values=past_values,
    )


def expected_output(
    batch: AttentionBatch, *, scale: float | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The right output, one row and one head at a time; plain PyTorch in `dtype` throughout."""
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    group = batch.q.shape[1] // batch.k.shape[1]
    out = torch.zeros(batch.q.shape, dtype=dtype)
    for index, (start, stop, slot) in enumerate(batch.requests()):
        if slot < 0:
            continue
        past = batch.past_keys[index]
        keys = torch.cat((past, batch.k[start:stop].to(past.dtype))).to(dtype)
        values = torch.cat((batch.past_values[index], batch.v[start:stop].to(past.dtype))).to(dtype)
        for row in range(start, stop):
            end = len(past) + row - start + 1
            for head in range(batch.q.shape[1]):
                scores = keys[:end, head // group] @ batch.q[row, head].to(dtype) * scale
                weights = torch.exp(scores - scores.max())
                out[row, head] = weights @ values[:end, head // group] / weights.sum()
    return out


def expected_pages(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """The right pages: every live row at its position, all else as it was."""
    k_pages, v_pages = batch.k_pages.clone(), batch.v_pages.clone()
    for index, (start, stop, slot) in enumerate(batch.requests()):
        if slot < 0:
            continue
        for row in range(start, stop):
            entry, offset = divmod(len(batch.past_keys[index]) + row - start, k_pages.shape[1])
            k_pages[batch.page_table[slot, entry], offset] = batch.k[row]
            v_pages[batch.page_table[slot, entry], offset] = batch.v[row]
    return k_pages, v_pages


def check_verify(
    batch: AttentionBatch,
    run: Callable[..., object],
    *,
    device: str = "cpu",
    scale: float | None = None,
    **options: object,
) -> None:
    """Compare a launch with the loops: every output, every page element, nothing of padding.

    Args:
        batch: on the CPU.
        run: called with the arguments of a backend's `verify` and the options.
        device: where to run.
        scale: factor of the scores; None is the usual one.
        **options: passed on.
    """
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    right, pages = expected_output(batch, scale=scale), expected_pages(batch)
    plain = expected_output(batch, scale=scale, dtype=batch.q.dtype)
    moved = batch.to(device)
    out = torch.full(batch.q.shape, math.nan, dtype=batch.q.dtype, device=device)
    run(*moved.call(max(batch.longest, 1), scale, out), **options)
    # Twice the error of PyTorch in that dtype; sums in another order round differently in fp32.
    allowed = 2 * (plain.double() - right).abs().max() + 8 * torch.finfo(torch.float32).eps
    assert (out.cpu().double() - right).abs().max() <= allowed
    for found, expected in zip((moved.k_pages, moved.v_pages), pages, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def with_far_pages(batch: AttentionBatch, folder: Path) -> AttentionBatch:
    """Return the batch with its pages 2**30 elements apart, in files of a folder."""
    far = {}
    for name in ("k_pages", "v_pages"):
        pages = getattr(batch, name)
        far[name] = far_apart(pages, len(pages), 2**30, folder / name).copy_(pages)
    return replace(batch, **far)
