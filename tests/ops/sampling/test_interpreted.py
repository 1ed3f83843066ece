"""The noise's generator against Triton's own, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hybridspec.ops.sampling import gumbel_noise, philox

pytestmark = pytest.mark.interpreted


@triton.jit
def philox_kernel(seeds_ptr, positions_ptr, words_ptr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    seed = tl.load(seeds_ptr + row)
    group = tl.arange(0, GROUPS).to(tl.uint32)
    position = (tl.load(positions_ptr + row) + tl.zeros([GROUPS], tl.int64)).to(tl.uint32)
    zero = tl.zeros([GROUPS], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, position, zero, zero)
    out = words_ptr + (row * GROUPS + tl.arange(0, GROUPS)) * 4
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


def test_equals_triton() -> None:
    seeds = torch.tensor([0, 1, -1, 2**40 + 3, -(2**62), 1234567])
    positions = torch.tensor([0, 5, 2**31, 77, 2**32 - 1, 100_000])
    words = torch.zeros(6, 64, 4, dtype=torch.int64)
    philox_kernel[(6,)](seeds, positions, words, GROUPS=64)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    counter = (torch.arange(64)[None], positions[:, None], zero, zero)
    assert torch.equal(philox(seeds, counter), words)
    uniform = (words.view(6, 256).double() + 0.5) / 2**32
    noise = (-(-uniform.log()).log()).float()
    assert torch.equal(gumbel_noise(seeds, positions, 250), noise[:, :250])
