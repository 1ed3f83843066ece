"""Pools whose slots have windows of all kinds, for tests of what happens to whole windows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits


def filled_pools(dtypes: Dtypes | None = None, *, is_strided: bool = False) -> Pools:
    """Return pools whose slots 0..5 have windows of 0, 1, 5, 16, 7 (wrapped), 16 (wrapped) rows."""
    pools = Pools.create(Geometry(), dtypes or Dtypes(), is_strided=is_strided)
    generator = torch.Generator().manual_seed(3)
    for slot, (start, history) in enumerate([(0, 0), (31, 1), (8, 5), (16, 16), (28, 7), (20, 16)]):
        pools.fill_slot(slot, start, history, generator)
    return pools


def kernel_pools() -> Pools:
    pools = Pools.create(
        Geometry(2, 4, 32, 48), Dtypes(torch.float32, torch.float32, torch.float32), is_strided=True
    )
    generator = torch.Generator().manual_seed(0)
    for slot, (start, history) in enumerate(((30, 5), (0, 16), (9, 1), (31, 12), (4, 0))):
        pools.fill_slot(slot, start, history, generator)
    return pools


def compare_backends(run: Callable[[Pools, str], object]) -> None:
    """Run on two equal sets of pools, kernel and reference; what is written must agree.

    Nothing around the pools may change, which is where a kernel would find slot -1.
    """
    found = []
    for backend in ("triton", "reference"):
        pools = kernel_pools()
        around = pools.surroundings()
        run(pools, backend)
        for actual, old in zip(pools.surroundings(), around, strict=True):
            assert_same_bits(actual, old)
        assert len(around) == len(pools.tensors())
        found.append(pools.tensors())
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
