"""Calls of verify over a raw ring with known answers, for any backend and device.

As `helpers.gdn_cases`: what a call must not read is NaN, what it must not write is compared bit for
bit. What is appended are the bits of the inputs, where the ring has their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from helpers.gdn_cases import DECAYS, Dtypes, Geometry, assert_same_bits, offsets, poisoned
from helpers.gdn_oracle import Tokens, recurrence
from helpers.tolerances import TOLERANCES, assert_close
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.ring import RawRingView

__all__ = [
    "RAW",
    "RAW_CASES",
    "RAW_CUDA_CASES",
    "RAW_LARGE",
    "RAW_NARROW",
    "REGIMES",
    "RawCall",
    "RawCase",
]

RAW = Geometry(heads=1, value_heads=2, key_dim=16, value_dim=16, max_window=8)
RAW_LARGE = Geometry(heads=2, value_heads=4, key_dim=128, value_dim=128, max_window=8)
RAW_NARROW = Geometry(heads=1, value_heads=1, key_dim=128, value_dim=64, max_window=8)

# Spread of A_log and dt_bias, spread of a, magnitude of the states.
REGIMES = {"mild": (0.1, 0.1, 1.0), "strong": (1.0, 1.0, 1.0), "large": (0.1, 0.1, 30.0)}


@dataclass(frozen=True)
class RawCase:
    """One call; as `helpers.gdn_cases.Case`.

    Attributes:
        decay: name in `DECAYS`, on top of the regime's.
        by_row: whether cursors belong to batch rows, so that all lengths are the same.
        fold_threshold: then, the fewest live rows of a request that folds.
    """

    name: str
    lengths: tuple[int, ...]
    history: tuple[int, ...]
    starts: tuple[int, ...] = ()
    slots: tuple[int, ...] | None = None
    folds: tuple[bool, ...] | None = None
    tail: int = 0
    regime: str = "mild"
    decay: str = "medium"
    equal_keys: bool = False
    is_strided: bool = False
    scale: float | None = None
    use_qk_l2norm: bool = True
    beta_scale: float = 1.0
    by_row: bool = False
    fold_threshold: int | None = None
    geometry: Geometry = RAW
    dtypes: Dtypes = field(default_factory=Dtypes)
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.dtypes}"

    def using(self, dtypes: Dtypes, **changes: object) -> RawCase:
        """Return the same case in other dtypes, or otherwise changed."""
        return replace(self, dtypes=dtypes, **changes)


class RawCall:
    """The tensors of a case, the call, and the check of everything that it may change."""

    def __init__(self, case: RawCase, device: str = "cpu") -> None:
        self.case, self.device = case, device
        g, count = case.geometry, len(case.lengths)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.slots = case.slots or tuple(range(g.num_slots - 1, g.num_slots - 1 - count, -1))
        self.starts = case.starts or (0,) * count
        spread, _, self.magnitude = REGIMES[case.regime]
        wide = torch.float64 if case.dtypes.rows == torch.float64 else torch.float32
        params = spread * torch.randn(2, g.value_heads, generator=self.generator)
        self.A_log, self.dt_bias = params.to(wide).to(device)
        self.state, self.ring = self._pools()
        if case.folds is None:
            most = (case.fold_threshold or 99) - 1 if case.by_row else g.max_window
            room = (0,) * count if case.by_row else case.lengths
            pairs = zip(self.slots, case.lengths, case.history, room, strict=True)
            self.folds = tuple(s >= 0 and (n > 0) and p + r > most for s, n, p, r in pairs)
        else:
            self.folds = case.folds
        self.rows = self._rows(sum(case.lengths), case.dtypes.rows)
        for slot, first, last in self._spans():
            if slot < 0:
                for part in self.rows:
                    part[first:last] = torch.nan

    def _pools(self) -> tuple[Tensor, RawRingView]:
        case, g = self.case, self.case.geometry
        dtypes, count = case.dtypes, len(case.lengths)

        def pool(*shape: int, dtype: torch.dtype) -> Tensor:
            margins = (1,) * len(shape) + (16,) if case.is_strided else None
            return poisoned((g.num_slots, *shape), dtype, self.device, margins=margins)

        cursors = torch.zeros(
            2, count if case.by_row else g.num_slots, dtype=torch.int32, device=self.device
        )
        ring = RawRingView(
            pool(g.heads, g.capacity, g.key_dim, dtype=dtypes.ring),
            pool(g.value_heads, g.capacity, g.value_dim, dtype=dtypes.ring),
            pool(g.value_heads, g.capacity, dtype=dtypes.cum),
            pool(g.value_heads, g.capacity, dtype=dtypes.cum),
            *cursors,
            g.max_window,
        )
        state = pool(g.value_heads, g.value_dim, g.key_dim, dtype=dtypes.state)
        for i, (slot, start, history) in enumerate(
            zip(self.slots, self.starts, case.history, strict=True)
        ):
            if slot < 0:
                continue
            at = i if case.by_row else slot
            ring.ring_start[at], ring.history_len[at] = start, history
            rows = [(start + j) % g.capacity for j in range(history)]
            for log, part in zip(ring[:4], self._rows(history, dtypes.ring)[1:], strict=True):
                log[slot][:, rows] = part.transpose(0, 1).to(log.dtype)
            shape = state.shape[1:]
            found = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            state[slot] = self.magnitude * found.to(self.device).to(state.dtype)
        return state, ring

    def _rows(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """Return random q, k, v, a, b of some rows."""
        case, g = self.case, self.case.geometry

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64)

        k = normal(count, g.heads, g.key_dim)
        if case.equal_keys:
            k = torch.ones_like(k) + torch.arange(g.key_dim) / 8
        a = REGIMES[case.regime][1] * normal(count, g.value_heads) + DECAYS[case.decay]
        b = normal(count, g.value_heads) + (6.0 if case.equal_keys else 0.0)
        parts = (normal(*k.shape), k, normal(count, g.value_heads, g.value_dim), a, b)
        return [part.to(dtype).to(self.device) for part in parts]

    def _spans(self) -> list[tuple[int, int, int]]:
        ends = offsets(self.case.lengths).tolist()
        return list(zip(self.slots, ends[:-1], ends[1:], strict=True))

    def inputs(self) -> list[Tensor]:
        """Return q, k, v, a, b as the call gets them."""
        found = []
        for i, part in enumerate(self.rows):
            tail = part.new_full((self.case.tail, *part.shape[1:]), torch.nan)
            part = torch.cat((part, tail))
            if self.case.is_strided:
                wide = part.new_full((*part.shape[:-1], part.shape[-1] + 8 * i + 8), torch.nan)
                wide[..., 8 : 8 + part.shape[-1]] = part
                part = wide[..., 8 : 8 + part.shape[-1]]
            found.append(part)
        return found

    def run(self, backend: str = "auto", **options: object) -> Tensor:
        """Call the op; keyword arguments override those of the case."""
        case = self.case
        slots = torch.tensor(self.slots, dtype=torch.int32, device=self.device)
        common = {
            "scale": case.scale,
            "use_qk_l2norm": case.use_qk_l2norm,
            "backend": backend,
        }
        parameters = (self.A_log, self.dt_bias, self.state, self.ring)
        if case.by_row:
            count = len(case.lengths)
            rows = [part.unflatten(0, (count, -1)) for part in self.inputs()]
            common |= {"slots": slots, "fold_threshold": case.fold_threshold}
            found = gated_delta_rule.verify_raw_rows(*rows, *parameters, **(common | options))
            return found.flatten(0, 1)
        common |= {
            "max_verify_tokens": max((1, *case.lengths)),
            "is_fold": torch.tensor(self.folds, dtype=torch.int8, device=self.device),
            "beta_scale": case.beta_scale,
        }
        bounds = offsets(case.lengths, self.device)
        return gated_delta_rule.verify_raw(
            *self.inputs(), *parameters, bounds, slots, **(common | options)
        )

    def expected(self, i: int) -> tuple[Tensor, Tensor]:
        """Return outputs and the state behind the window of a request, fp64."""
        case, (slot, first, last) = self.case, self._spans()[i]
        start, history = self.starts[i], case.history[i]
        live = [(start + j) % case.geometry.capacity for j in range(history)]
        window = [log[slot][:, live].transpose(0, 1).double().cpu() for log in self.ring[:4]]
        new = [part[first:last].double().cpu() for part in self.rows]
        k, v, a, b = (torch.cat(pair) for pair in zip(window, new[1:], strict=True))
        q = torch.cat((torch.zeros_like(window[0]), new[0]))
        y, _, states = recurrence(
            Tokens(q, k, v, a, b, self.A_log.double().cpu(), self.dt_bias.double().cpu()),
            self.state[slot].double().cpu(),
            scale=case.scale,
            use_qk_l2norm=case.use_qk_l2norm,
            beta_scale=case.beta_scale,
        )
        return y[history:], states[history]

    def check(self, backend: str = "auto", *, is_split: bool = False, **options: object) -> Tensor:
        """Run the call and compare outputs, appended rows, checkpoints and all other bits.

        Args:
            backend: backend to run.
            is_split: whether a kernel multiplies corrections as sums of 16-bit numbers.
            options: arguments of the call that override the case's.

        Returns:
            The outputs.
        """
        case = self.case
        compute = TOLERANCES[case.dtypes.compute] * (8 if is_split else 1)
        pools = [self.state, *self.ring[:4]]
        wholes = [pool if pool._base is None else pool._base for pool in pools]
        before, kept = [whole.clone() for whole in wholes], [pool.clone() for pool in pools]
        cursors = [cursor.clone() for cursor in self.ring[4:6]]
        live = [
            i for i, (slot, first, last) in enumerate(self._spans())
            if slot >= 0 and (last > first or self.folds[i])
        ]  # fmt: skip
        expected = {i: self.expected(i) for i in live}
        out = self.run(backend, **options)
        assert torch.equal(torch.stack(self.ring[4:6]), torch.stack(cursors))
        is_owned = torch.zeros(out.shape[0], dtype=torch.bool)
        for i, (y, state) in expected.items():
            slot, first, last = self._spans()[i]
            is_owned[first:last] = True
            bound = max(compute, TOLERANCES[out.dtype])
            _assert_near(out[first:last], y, bound)
            begin = self.starts[i] + case.history[i]
            rows = [(begin + t) % case.geometry.capacity for t in range(last - first)]
            for log, new, old in zip(self.ring[:4], self.rows[1:], kept[1:], strict=True):
                appended, given = log[slot][:, rows], new[first:last].transpose(0, 1)
                if log.dtype == given.dtype:
                    assert_same_bits(appended, given)
                else:
                    _assert_near(appended, given.cpu(), TOLERANCES[log.dtype])
                log[slot][:, rows] = old[slot][:, rows]
            if self.folds[i] and case.history[i]:
                _assert_near(self.state[slot], state, max(compute, TOLERANCES[case.dtypes.state]))
                self.state[slot] = kept[0][slot]
        assert_same_bits(out[~is_owned], torch.zeros_like(out[~is_owned]))
        for whole, old in zip(wholes, before, strict=True):
            assert_same_bits(whole, old)
        return out


def _assert_near(actual: Tensor, expected: Tensor, bound: float) -> None:
    factor = bound / TOLERANCES[torch.float64]
    assert_close(actual.cpu(), expected, torch.float64, factor=factor)


RAW_CASES = [
    *(RawCase(f"T{n}", (n,), (5,), ((27 + n) % 32,)) for n in range(1, 9)),
    *(RawCase(f"{r}-{n}", (4, 4), (8, n), (30, 3), regime=r) for r in REGIMES for n in (0, 3, 8)),
    *(RawCase(f"{r}-fold", (4, 4, 4), (8, 5, 7), (26, 0, 29), regime=r) for r in REGIMES),
    RawCase("ragged", (1, 5, 0, 8, 3), (2, 0, 4, 8, 6), (0, 31, 5, 17, 30)),
    RawCase("ends-empty", (0, 6, 7, 0), (4, 7, 3, 5), (1, 28, 0, 5)),
    RawCase("padding-tail", (2, 3, 1), (4, 0, 6), slots=(5, -1, 2), tail=5),
    RawCase("only-padding", (2, 2), (0, 0), slots=(-1, -1)),
    RawCase("some-fold-permuted", (8, 1, 8), (4, 8, 0), (25, 25, 25), (4, 0, 6)),
    RawCase("fold-without-rows", (0, 2), (7, 6), (28, 0), folds=(True, False)),
    RawCase("fold-nothing", (2,), (0,), folds=(True,)),
    RawCase("fold-one", (2,), (1,), folds=(True,)),
    RawCase("options", (3,), (4,), folds=(True,), use_qk_l2norm=False, scale=0.1, beta_scale=2.0),
    RawCase("equal-keys", (8,), (8,), decay="none", equal_keys=True),
    RawCase("strongest", (5, 4), (7, 8), decay="-200"),
    RawCase("slow", (4,), (8,), decay="slow"),
    RawCase("no-requests", (), (), tail=3),
    RawCase("strided", (2, 4), (5, 8), (30, 1), is_strided=True),
    RawCase(
        "strided-padding", (2, 3, 1), (4, 0, 8), (1, 0, 9), (3, -1, 2), tail=2, is_strided=True
    ),
    *(
        RawCase(f"ratio-{r}", (3, 2), (4, 8), geometry=replace(RAW, heads=h, value_heads=r * h))
        for r, h in ((1, 3), (3, 1), (4, 1))
    ),
    *(
        RawCase(f"K{k}-V{v}", (4,), (8,), geometry=replace(RAW, key_dim=k, value_dim=v))
        for k, v in ((16, 48), (48, 16), (96, 192), (256, 32))
    ),
    RawCase("ring-of-16", (4,), (12,), (9,), geometry=replace(RAW, capacity=16, max_window=12)),
    RawCase("rows", (4, 4, 4), (8, 5, 8), (26, 3, 29), by_row=True, fold_threshold=6),
    RawCase(
        "rows-padding", (3, 3, 3), (8, 0, 2), (26, 0, 29), (2, -1, 4), by_row=True, fold_threshold=1
    ),
    RawCase("rows-never", (4, 4), (8, 5), (26, 3), by_row=True),
]

# What the CUDA C++ kernel takes.
RAW_CUDA_CASES = [
    *(RawCase(f"T{n}", (n,), (8,), (27,), geometry=RAW_NARROW) for n in range(1, 9)),
    *(RawCase(r, (4, 4), (8, 3), (30, 3), regime=r, geometry=RAW_NARROW) for r in REGIMES),
    RawCase("ragged", (4, 0, 1, 8, 3), (8, 3, 7, 5, 0), (30, 0, 7, 25, 1), geometry=RAW_LARGE),
    RawCase("ends-empty", (0, 6, 7, 0), (4, 7, 3, 5), (1, 28, 0, 5), geometry=RAW_NARROW),
    RawCase("padding-tail", (2, 3, 1), (4, 0, 6), slots=(5, -1, 2), tail=5, geometry=RAW_LARGE),
    RawCase("fold-without-rows", (0, 2), (7, 6), (28, 0), folds=(True, False), geometry=RAW_NARROW),
    RawCase("fold-nothing", (2,), (0,), folds=(True,), geometry=RAW_NARROW),
    RawCase(
        "options", (3,), (4,), folds=(True,), use_qk_l2norm=False, scale=0.1, beta_scale=2.0,
        geometry=RAW_NARROW,
    ),
    RawCase("equal-keys", (8,), (8,), decay="none", equal_keys=True, geometry=RAW_NARROW),
    RawCase("strongest", (5, 4), (7, 8), decay="-200", geometry=RAW_NARROW),
    RawCase("no-requests", (), (), tail=3, geometry=RAW_NARROW),
    RawCase("ratio-3", (4, 2), (8, 5), geometry=replace(RAW_LARGE, heads=1, value_heads=3)),
    RawCase("V192", (4,), (8,), geometry=replace(RAW_NARROW, value_dim=192)),
    RawCase("T4-of-12", (4, 4), (12, 9), geometry=replace(RAW_NARROW, max_window=12)),
    RawCase(
        "strided", (2, 3, 4), (4, 0, 8), (30, 0, 9), slots=(3, -1, 2), tail=2, is_strided=True,
        geometry=replace(RAW_NARROW, heads=2, value_heads=4),
    ),
    RawCase(
        "rows", (4, 4, 4), (8, 5, 8), (26, 3, 29), (4, -1, 2), by_row=True, fold_threshold=6,
        geometry=RAW_LARGE,
    ),
]  # fmt: skip
