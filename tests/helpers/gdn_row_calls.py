"""A call of verify_rows whose backends can be compared with each other."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits, make_tokens
from hybridspec.ops.gated_delta_rule import verify_rows

__all__ = ["RowCall"]

F32 = torch.float32


class RowCall:
    """Three requests, the second without a slot; NaN in everything that must not be read.

    Args:
        num_tokens: rows of each request.
        capacity: ring rows; windows take at most 16, and at most what leaves room for the rows.
        head_dim: K and V.
        dtype: of everything but decays and gate parameters.
    """

    def __init__(
        self,
        num_tokens: int,
        capacity: int,
        *,
        head_dim: int = 16,
        dtype: torch.dtype = F32,
        device: str = "cpu",
    ) -> None:
        window = min(16, capacity - num_tokens)
        self.geometry = Geometry(1, 2, head_dim, head_dim, capacity, window, 4)
        dtypes = Dtypes(dtype, dtype, dtype)
        generator = torch.Generator().manual_seed(num_tokens)
        most = self.geometry.max_window
        history, starts = (most, 1, most // 2), (capacity - 3, 1, 0)
        self.pools = Pools.create(self.geometry, dtypes, device)
        for slot in range(4):
            self.pools.fill_slot(slot, starts[slot % 3], history[slot % 3], generator)
        tokens = make_tokens(self.geometry, 3 * num_tokens, generator, dtype)
        self.rows = [part.to(device).unflatten(0, (3, num_tokens)) for part in tokens.packed()]
        self.A_log, self.dt_bias = tokens.A_log.to(device), tokens.dt_bias.to(device)
        self.history_len, self.ring_start, self.slots = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (history, starts, (3, -1, 2))
        )
        # Slot 3 has what slot 0 has.
        for pool in self.pools.tensors():
            pool[3] = pool[0]

    def run(self, pools: list[Tensor], **options: object) -> Tensor:
        """Call the op on the given state, ring k, u and cumulative log-decay."""
        return verify_rows(
            *self.rows,
            self.A_log,
            self.dt_bias,
            *pools,
            self.history_len,
            ring_start=self.ring_start,
            slots=self.slots,
            max_window=self.geometry.max_window,
            **options,
        )

    def check_widening(self, backend: str, A_log: torch.dtype, dt_bias: torch.dtype) -> None:
        """Raise AssertionError unless parameters of these dtypes do what the same in fp32 do."""
        narrow = self.A_log.to(A_log), self.dt_bias.to(dt_bias)
        found = []
        for parameters in (narrow, [parameter.float() for parameter in narrow]):
            self.A_log, self.dt_bias = parameters
            pools = [pool.clone() for pool in self.pools.tensors()[:4]]
            found.append([self.run(pools, backend=backend, fold_threshold=9), *pools])
        for actual, expected in zip(*found, strict=True):
            assert_same_bits(actual, expected)

    def compare(
        self, backend: str, has_output: bool, *, bound: float = 5e-6, **options: object
    ) -> None:
        """Raise AssertionError unless a backend does what the reference does, within `bound`."""
        found = []
        for name in ("reference", backend):
            pools = [pool.clone() for pool in self.pools.tensors()[:4]]
            out = None
            if has_output:
                out = torch.full_like(self.rows[2], 7.0)
            got = self.run(pools, out=out, backend=name, **options)
            assert out is None or got is out
            found.append([got, *pools])
        if self.slots is not None:
            assert found[1][0][1].eq(7.0 if has_output else 0.0).all()
        for actual, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=bound, equal_nan=True)
        assert any(
            not torch.equal(new.nan_to_num(), old.nan_to_num())
            for new, old in zip(found[1][1:], self.pools.tensors()[:4], strict=True)
        )
