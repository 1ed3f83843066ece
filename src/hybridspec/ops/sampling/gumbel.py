"""Gumbel noise from a counter-based generator.

The noise of a token is a pure function of (seed, position, token): no generator state exists, so
the target and the drafter see the same noise whatever the batch, the order or the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check, check_dtype

__all__ = ["gumbel_noise", "philox"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF

_constants_of_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}


def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Key increments [rounds, 2, 1, 1], the 32-bit mask and the shift, made once per device."""
    found = _constants_of_device.get(device)
    if found is None:
        steps = [[r * step for step in _KEY_STEPS] for r in range(_ROUNDS)]
        found = _constants_of_device[device] = (
            torch.tensor(steps, dtype=torch.int64, device=device).view(_ROUNDS, 2, 1, 1),
            torch.tensor(_MASK, dtype=torch.int64, device=device),
            torch.tensor(32, dtype=torch.int64, device=device),
        )
    return found


def _rounds(even: Tensor, odd: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Ten rounds on counter words (c0, c2) = even and (c1, c3) = odd, [2, N, M] int64.

    A product of two 32-bit words wraps in int64, but bits 32..63 are still right: an arithmetic
    shift and a mask recover them. `odd` may carry junk above bit 31; the mask after the xor drops
    it, and the caller masks the odd words once at the end.
    """
    increments, mask, shift = _constants(key.device)
    # (N, 2) seeds become one [rounds, 2, N, 1] table, masked because sums may pass bit 31.
    keys = ((key + increments) & mask).unbind(0)
    high_multiplier, low_multiplier = _MULTIPLIERS
    for round_key in keys:
        product = torch.empty_like(even)
        torch.mul(even[1], low_multiplier, out=product[0])
        torch.mul(even[0], high_multiplier, out=product[1])
        even = torch.bitwise_right_shift(product, shift)
        even.bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(mask)
        odd = product
    return even, odd


def philox(seeds: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Philox4x32-10: four 32-bit words per counter; nothing is modified.

    Args:
        seeds: 64-bit keys, low word first, [N], int64; in.
        counter: the four counter words, each broadcastable to [N, M], int64 with values in
            0..2^32-1; in.

    Returns:
        The output words, [N, M, 4], int64 with values in 0..2^32-1.

    Source:
        Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), which
        is also Triton's `tl.philox` on 32-bit counters.
    """
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK)).view(2, -1, 1)
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    shape = (2, seeds.shape[0], c0.shape[-1])
    even, odd = _rounds(
        torch.stack((c0, c2)).expand(shape).contiguous(), torch.stack((c1, c3)).expand(shape), key
    )
    return torch.stack((even[0], odd[0] & _MASK, even[1], odd[1] & _MASK), dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token at every row; nothing is modified.

        w = philox(key = seed, counter = (token // 4, position, 0, 0))[token % 4]
        u = (w + 1/2) / 2^32                     strictly between 0 and 1
        noise = -log(-log(u))

    Args:
        seeds: seed of each row's request, [N], int64; in.
        positions: position of the token to be sampled, [N], int64, in 0..2^32-1; in.
        vocab_size: number of tokens V.

    Returns:
        Noise [N, V], fp32. A token's value depends on (seed, position, token) only, so a smaller
        vocabulary or another batch gives the same bits.

    Raises:
        ValueError: if the shapes disagree or `vocab_size` is not positive.
        TypeError: if a dtype is wrong.

    Numerics:
        Both logarithms in fp64, one rounding to fp32: the values lie in [-3.2, 22.9].

    Source:
        Salmon et al. 2011 (the generator); Gumbel 1954 (argmax(logits + noise) ~ softmax(logits)).
    """
    dims: Dims = {}
    check("seeds", seeds, "N", dims)
    check("positions", positions, "N", dims)
    check_dtype("seeds", seeds, torch.int64)
    check_dtype("positions", positions, torch.int64)
    if vocab_size <= 0:
        raise ValueError(f"vocab_size: expected a positive number, got {vocab_size}")
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)
    num_rows, num_groups = seeds.shape[0], groups.shape[0]
    even = torch.zeros((2, num_rows, num_groups), dtype=torch.int64, device=seeds.device)
    even[0] = groups
    odd = torch.zeros((2, num_rows, 1), dtype=torch.int64, device=seeds.device)
    odd[0, :, 0] = positions
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK)).unsqueeze(-1)
    even, odd = _rounds(even, odd, key)
    words = torch.stack((even, odd), dim=1).view(4, num_rows, num_groups).permute(1, 2, 0)
    words = (words & _MASK).to(torch.float64)
    uniform = words.add_(0.5).mul_(2.0**-32)
    noise = uniform.log_().neg_().log_().neg_().to(torch.float32)
    return noise.reshape(num_rows, 4 * num_groups)[:, :vocab_size]
