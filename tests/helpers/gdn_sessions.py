"""Requests that decode for many steps, followed by the oracle token by token.

Every step feeds rows of which only the first few are committed; what the oracle has seen is the
committed ones. A session counts what happened in it, so that a test can insist on it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, Pools, make_tokens, offsets
from helpers.gdn_oracle import recurrence
from helpers.tolerances import tolerance
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops

__all__ = ["Session"]


class Session:
    """Requests in slots of one layer, and the fp64 state of each.

    Args:
        geometry: sizes; the number of slots is set from `num_requests`, one more being scratch.
        dtypes: of rows, state and ring.
        num_requests: requests, in slots 0..num_requests-1.
        seed: of everything random.
        starts: first ring row of each request.
        decay: name in `DECAYS`.
        bound: largest error of outputs and states, relative to the largest magnitude; None: eight
            times the tolerance of the dtypes, because stored rows and states are rounded too.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtypes: Dtypes | None = None,
        *,
        num_requests: int = 1,
        seed: int = 0,
        starts: list[int] | None = None,
        decay: str = "mild",
        bound: float | None = None,
        device: str = "cpu",
        backend: str = "auto",
    ) -> None:
        self.dtypes = dtypes or Dtypes()
        self.geometry = replace(geometry, num_slots=num_requests + 1)
        self.scratch = num_requests
        self.pools = Pools.create(self.geometry, self.dtypes, device)
        self.generator = torch.Generator().manual_seed(seed)
        self.params = 0.3 * torch.randn(
            2, geometry.value_heads, generator=self.generator, dtype=torch.float64
        )
        self.decay, self.device, self.backend = decay, device, backend
        d = self.dtypes
        self.bound = 8 * tolerance(d.rows, d.state, d.ring, d.cum) if bound is None else bound
        self.states: dict[int, Tensor] = {}
        self.coverage: Counter[str] = Counter()
        for slot in range(num_requests):
            self.admit(slot, starts[slot] if starts else 0)

    def tokens(self, count: int):
        """Return `count` random rows."""
        return make_tokens(
            self.geometry,
            count,
            self.generator,
            self.dtypes.rows,
            decay=self.decay,
            params=self.params,
        )

    def slot_tensor(self, *slots: int) -> Tensor:
        """Return slots as the ops take them."""
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    def admit(self, slot: int, start: int = 0) -> None:
        """Put a new request into a slot, whatever is in there; ring rows stay as they are."""
        pools = self.pools
        cursors = [pools.seq_len, pools.ring.ring_start, pools.ring.history_len]
        ring_ops.reset_slots([pools.state, *cursors], self.slot_tensor(slot))
        pools.ring.ring_start[slot] = start
        g = self.geometry
        self.states[slot] = torch.zeros(g.value_heads, g.value_dim, g.key_dim, dtype=torch.float64)

    def step(
        self,
        rows: dict[int, int],
        committed: dict[int, int],
        *,
        early_folds: tuple[int, ...] = (),
        num_padding: int = 0,
        commits: int = 1,
    ) -> None:
        """Verify `rows[slot]` random rows of each slot, in this order, and commit some.

        Args:
            rows: rows to verify of each slot.
            committed: rows to commit of each slot; more than there are rows means all.
            early_folds: slots that fold though their windows have room.
            num_padding: padding requests of two NaN rows each, ahead of the others.
            commits: how often commit runs.
        """
        pools, history_len = self.pools, self.pools.ring.history_len
        slots = [-1] * num_padding + list(rows)
        sizes = [2] * num_padding + list(rows.values())
        slot_tensor = self.slot_tensor(*slots)
        num_verify_tokens = torch.tensor(sizes, dtype=torch.int32, device=self.device)
        is_fold = torch.full_like(slot_tensor, 7, dtype=torch.int8)
        ring_ops.decide_folds(
            history_len, slot_tensor, num_verify_tokens, is_fold, max_window=pools.ring.max_window
        )
        for i, slot in enumerate(slots):
            if slot in early_folds and sizes[i]:
                is_fold[i] = 1
        self._count(rows, committed, slots, is_fold)

        fed = {slot: self.tokens(n) for slot, n in rows.items()}
        packed = []
        for parts in zip(*(one.packed() for one in fed.values()), strict=True):
            shape = (2 * num_padding, *parts[0].shape[1:])
            padding = torch.full(shape, torch.nan, dtype=parts[0].dtype)
            packed.append(torch.cat((padding, *parts)).to(self.device))
        one = next(iter(fed.values()))
        out = gated_delta_rule.verify(
            *packed,
            one.A_log.to(self.device),
            one.dt_bias.to(self.device),
            pools.state,
            pools.ring,
            offsets(sizes, self.device),
            slot_tensor,
            max_verify_tokens=max(1, *sizes),
            is_fold=is_fold,
            backend=self.backend,
        )
        first = 2 * num_padding
        for slot, n in rows.items():
            y, _, states = recurrence(fed[slot], self.states[slot])
            self._compare(out[first : first + n], y)
            first += n
            self.states[slot] = states[min(committed[slot], n)]
        num_committed = torch.tensor(
            [9] * num_padding + [committed[slot] for slot in rows],
            dtype=torch.int32,
            device=self.device,
        )
        for _ in range(commits):
            ring_ops.commit(
                pools.seq_len,
                pools.ring.ring_start,
                history_len,
                slot_tensor,
                is_fold,
                num_verify_tokens,
                num_committed,
                ring_capacity=self.geometry.capacity,
                backend=self.backend,
            )

    def check_states(self) -> None:
        """Compare the state of every slot, window included, with the oracle's."""
        pools = self.pools
        for slot, state in self.states.items():
            gated_delta_rule.materialize(
                pools.state,
                pools.ring,
                self.slot_tensor(slot),
                self.slot_tensor(self.scratch),
                self.slot_tensor(self.geometry.capacity),
                backend=self.backend,
            )
            self._compare(pools.state[self.scratch], state)

    def _compare(self, actual: Tensor, expected: Tensor) -> None:
        scale = max(expected.abs().max().item(), 0.1) if expected.numel() else 0.0
        torch.testing.assert_close(
            actual.double().cpu(), expected, rtol=0.0, atol=self.bound * scale
        )

    def _count(
        self, rows: dict[int, int], committed: dict[int, int], slots: list[int], is_fold: Tensor
    ) -> None:
        ring = self.pools.ring
        for slot, n in rows.items():
            start, history = int(ring.ring_start[slot]), int(ring.history_len[slot])
            kept = min(committed[slot], n)
            self.coverage[f"T={n}"] += 1
            self.coverage[f"commit {kept} of {n}"] += 1
            self.coverage[f"start={start}"] += 1
            self.coverage[f"fill={history}"] += 1
            self.coverage["reject"] += kept < n
            self.coverage["window wraps"] += start + history > self.geometry.capacity
            self.coverage["append wraps"] += (
                start + history < self.geometry.capacity < start + history + n
            )
            if n:
                self.coverage[str(self.dtypes)] += 1
            if is_fold[slots.index(slot)]:
                self.coverage["fold"] += 1
                self.coverage[f"fold at {history}, commit {kept}"] += 1
