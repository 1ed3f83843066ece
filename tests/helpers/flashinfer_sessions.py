"""Requests that decode through FlashInfer's signatures, followed by the oracle token by token.

The caller's side is played as an engine would: cursors live in a table by request, a batch picks
requests in any order, its rows carry their cursors along, and what was accepted is added after.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, Pools, make_tokens
from helpers.gdn_oracle import Tokens, recurrence
from helpers.tolerances import tolerance
from hybridspec.compat import flashinfer

__all__ = ["FlashSession"]


class FlashSession:
    """Requests in slots 1, 3, 5, ... of one layer; the other slots stay NaN.

    Args:
        dtypes: of rows, state and ring.
        num_requests: requests.
        is_flat: whether rings have 16 rows and no state is written.
        restarts: whether the call moves the cursors of flushed windows, not the caller.
        flush_min: shortest window that is flushed.
        bases: first ring row of each request.
    """

    def __init__(
        self,
        dtypes: Dtypes | None = None,
        *,
        num_requests: int = 3,
        is_flat: bool = False,
        restarts: bool = True,
        flush_min: int | None = None,
        bases: tuple[int, ...] = (0, 30, 17),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.dtypes = dtypes or Dtypes()
        self.is_flat, self.restarts, self.flush_min = is_flat, restarts, flush_min
        capacity = 16 if is_flat else 32
        self.geometry = Geometry(2, 4, 16, 32, capacity, 8, 2 * num_requests + 1)
        self.device = device
        self.pools = Pools.create(self.geometry, self.dtypes, device)
        self.generator = torch.Generator().manual_seed(seed)
        g = self.geometry
        self.params = 0.3 * torch.randn(
            2, g.value_heads, generator=self.generator, dtype=torch.float64
        )
        self.hist_len = [0] * num_requests
        self.base = [0] * num_requests if is_flat else list(bases[:num_requests])
        self.states = []
        for request in range(num_requests):
            state = torch.randn(
                g.value_heads, g.value_dim, g.key_dim, generator=self.generator, dtype=torch.float64
            ).to(self.dtypes.state)
            self.pools.state[2 * request + 1] = state.to(device)
            self.states.append(state.double())
        d = self.dtypes
        self.bound = 8 * tolerance(d.rows, d.state, d.ring, d.cum)
        self.coverage: Counter[str] = Counter()

    def integers(self, values: list[int]) -> Tensor:
        """Return int32 values on the session's device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def step(self, requests: list[int], num_tokens: int, accepted: dict[int, int]) -> None:
        """Verify rows of some requests (-1 is padding), compare, accept some of them."""
        fed = [
            make_tokens(
                self.geometry,
                num_tokens,
                self.generator,
                self.dtypes.rows,
                decay="mild",
                params=self.params,
            )
            for _ in requests
        ]
        hist_len = self.integers([5 if r < 0 else self.hist_len[r] for r in requests])
        base = self.integers([7 if r < 0 else self.base[r] for r in requests])
        states = self.pools.state.clone()
        out = self.call(fed, requests, hist_len, base)
        for i, request in enumerate(requests):
            if request < 0:
                assert out[i].eq(0).all()
                continue
            y, _, after = recurrence(fed[i], self.states[request])
            scale = max(y.abs().max().item(), 0.1)
            torch.testing.assert_close(out[i].double().cpu(), y, rtol=0, atol=self.bound * scale)
            self.states[request] = after[accepted[request]]
            self.coverage["rejected"] += accepted[request] < num_tokens
        self.move_cursors(requests, num_tokens, accepted, hist_len.tolist(), base.tolist())
        if self.is_flat:
            assert torch.equal(self.pools.state.nan_to_num(), states.nan_to_num())

    def call(
        self, fed: list[Tokens], requests: list[int], hist_len: Tensor, base: Tensor
    ) -> Tensor:
        """Call the function under test; padding has NaN rows."""
        packed = []
        for parts in zip(*(one.packed() for one in fed), strict=True):
            rows = torch.stack(parts)
            rows[[r < 0 for r in requests]] = torch.nan
            packed.append(rows.to(self.device))
        q, k, v, a, b = packed
        arguments = {
            "A_log": fed[0].A_log.to(self.device),
            "a": a,
            "dt_bias": fed[0].dt_bias.to(self.device),
            "q": q,
            "k": k,
            "v": v,
            "b": b,
            "initial_state_source": self.pools.state,
            "initial_state_indices": self.integers([-9 if r < 0 else 2 * r + 1 for r in requests]),
            "k_cache": self.pools.ring.k,
            "u_cache": self.pools.ring.u,
            "g_cache": self.pools.ring.cum_log_decay,
            "hist_len": hist_len,
        }
        if self.is_flat:
            return flashinfer.gated_delta_rule_mtp_ucache(**arguments)
        return flashinfer.gated_delta_rule_mtp_ucache_flush(
            **arguments,
            cache_base=base,
            flush_min=self.flush_min,
            restart_hist_on_flush=self.restarts,
        )

    def move_cursors(
        self,
        requests: list[int],
        num_tokens: int,
        accepted: dict[int, int],
        hist_len: list[int],
        base: list[int],
    ) -> None:
        """Do what FlashInfer leaves to the caller, with the cursors that the call left behind."""
        threshold = self.flush_min or 17 - num_tokens
        for request, length, start in zip(requests, hist_len, base, strict=True):
            if request < 0:
                assert (length, start) == (5, 7)
                continue
            before = self.hist_len[request]
            flushes = not self.is_flat and before >= threshold
            if self.restarts and flushes:
                assert length == 0 and start == (self.base[request] + before) % 32
            else:
                assert (length, start) == (before, self.base[request])
                if flushes:
                    length, start = 0, (start + length) % 32
            self.coverage["flushed"] += flushes
            self.coverage["wrapped"] += start + length + num_tokens > 32
            self.hist_len[request] = length + accepted[request]
            self.base[request] = start
