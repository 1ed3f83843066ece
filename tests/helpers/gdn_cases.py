"""Calls of the gated delta rule ops with known answers, for any backend and device.

Everything that a call must not read is NaN: dead ring rows, slots of other requests, padded rows,
and (for strided pools) the allocation around the pools. Everything that it must not write is
compared bit for bit, that allocation too: slot -1 of a strided pool lies in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from helpers.gdn_oracle import Tokens, gates, prepared, recurrence, window_state
from helpers.tolerances import KERNEL_FACTOR, assert_close, assert_rounded
from hybridspec.ops import gated_delta_rule
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE, quantise, widen
from hybridspec.ops.ring import RingView

__all__ = [
    "DECAYS",
    "Case",
    "Dtypes",
    "Geometry",
    "Pools",
    "VerifyCall",
    "assert_same_bits",
    "make_tokens",
    "offsets",
    "poisoned",
]

# a of every token (its own noise aside); A_log is 0 and dt_bias 0, so g is about -softplus(a)
DECAYS = {
    "none": -100.0,
    "slow": -9.0,
    "mild": -3.0,
    "medium": 0.0,
    "-30": 30.0,
    "-90": 90.0,
    "-200": 200.0,
}


@dataclass(frozen=True)
class Dtypes:
    """The three dtypes that a caller chooses."""

    rows: torch.dtype = torch.float64
    state: torch.dtype = torch.float64
    ring: torch.dtype = torch.float64

    @property
    def cum(self) -> torch.dtype:
        """The dtype of cumulative log-decays: fp32, or fp64 where all is fp64."""
        return torch.float64 if self.ring == torch.float64 else torch.float32

    @property
    def compute(self) -> torch.dtype:
        """The dtype that the ops compute in."""
        return torch.float64 if torch.float64 in (self.rows, self.state) else torch.float32

    def __str__(self) -> str:
        return "-".join(
            str(dtype).removeprefix("torch.") for dtype in (self.rows, self.state, self.ring)
        )


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer and its pools."""

    heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    capacity: int = 32
    max_window: int = 16
    num_slots: int = 7


def poisoned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    margins: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a tensor of NaN (-128 in int8); with margins it is a slice of a larger one of these.

    `margins` are the elements on both sides of each dimension.
    """
    poison = torch.nan if dtype.is_floating_point else -128
    if margins is None:
        return torch.full(shape, poison, dtype=dtype, device=device)
    larger = [size + 2 * margin for size, margin in zip(shape, margins, strict=True)]
    whole = torch.full(larger, poison, dtype=dtype, device=device)
    return whole[tuple(slice(m, m + size) for size, m in zip(shape, margins, strict=True))]


def _assert_poison_around(part: Tensor) -> None:
    """Raise AssertionError unless all that a strided view leaves out is NaN."""
    whole = part._base.clone()
    whole.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(torch.nan)
    assert whole.isnan().all()


def assert_same_bits(actual: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """Raise AssertionError unless two tensors agree in every bit (where `mask` is set)."""
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    kind = width[actual.element_size()]
    actual, expected = actual.contiguous().view(kind), expected.contiguous().view(kind)
    if mask is not None:
        actual, expected = actual[mask], expected[mask]
    assert torch.equal(actual, expected)


def offsets(lengths: list[int] | tuple[int, ...], device: str = "cpu") -> Tensor:
    """Return cu_seqlens [B+1] int32 of row counts."""
    total = torch.tensor([0, *lengths], dtype=torch.int32, device=device)
    return total.cumsum(0, dtype=torch.int32)


def make_tokens(
    geometry: Geometry,
    count: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    *,
    decay: str = "medium",
    equal_keys: bool = False,
    params: Tensor | None = None,
) -> Tokens:
    """Return random rows of one request, already rounded to their dtype, on the CPU.

    `params` is A_log and dt_bias, [2, HV]; random if None.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, value_heads = geometry.heads, geometry.value_heads
    k = normal(count, heads, geometry.key_dim)
    if equal_keys:
        k = k[:1].expand(count, -1, -1).contiguous()
    b = normal(count, value_heads) + (6.0 if equal_keys else 0.0)
    rows = (
        normal(count, heads, geometry.key_dim),
        k,
        normal(count, value_heads, geometry.value_dim),
        normal(count, value_heads) + DECAYS[decay],
        b,
    )
    if params is None:
        params = 0.3 * normal(2, value_heads)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Tokens(*(part.to(dtype) for part in rows), *params.to(wide))


@dataclass
class Pools:
    """State and ring of one layer, and the cursors; NaN wherever no request lives."""

    geometry: Geometry
    dtypes: Dtypes
    state: Tensor
    ring: RingView
    seq_len: Tensor
    state_scale: Tensor | None = None

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        dtypes: Dtypes,
        device: str = "cpu",
        *,
        is_strided: bool = False,
        is_aligned: bool = False,
    ) -> Pools:
        """Return pools full of NaN, cursors 0.

        Strided pools are slices of larger ones; aligned ones lie on 16-byte boundaries, and factors
        of a head side by side.
        """
        g, slots = geometry, geometry.num_slots

        def pool(*shape: int, dtype: torch.dtype, aligned: tuple[int, ...] = (16,)) -> Tensor:
            inner = aligned if is_aligned else (1,) * len(aligned)
            margins = (1,) * (1 + len(shape) - len(inner)) + inner
            return poisoned((slots, *shape), dtype, device, margins=margins if is_strided else None)

        def cursor() -> Tensor:
            if not is_strided:
                return torch.zeros(slots, dtype=torch.int32, device=device)
            whole = torch.full((slots + 4,), 77, dtype=torch.int32, device=device)
            return whole[2:-2].zero_()

        ring = RingView(
            k=pool(g.heads, g.capacity, g.key_dim, dtype=dtypes.ring),
            u=pool(g.value_heads, g.capacity, g.value_dim, dtype=dtypes.ring),
            cum_log_decay=pool(g.value_heads, g.capacity, dtype=dtypes.cum),
            ring_start=cursor(),
            history_len=cursor(),
            max_window=g.max_window,
        )
        state = pool(g.value_heads, g.value_dim, g.key_dim, dtype=dtypes.state)
        scale = None
        if dtypes.state == torch.int8:
            groups = g.key_dim // GROUP_SIZE
            scale = pool(g.value_heads, g.value_dim, groups, dtype=SCALE_DTYPE, aligned=(8, 0))
        return cls(geometry, dtypes, state, ring, cursor(), scale)

    def tensors(self) -> list[Tensor]:
        """Return everything that is keyed by slot."""
        ring = self.ring
        cursors = [ring.ring_start, ring.history_len, self.seq_len]
        scales = [] if self.state_scale is None else [self.state_scale]
        return [self.state, ring.k, ring.u, ring.cum_log_decay, *cursors, *scales]

    def copies(self) -> list[Tensor]:
        """Return copies of `tensors()`, to compare with later."""
        return [tensor.clone() for tensor in self.tensors()]

    def surroundings(self) -> list[Tensor]:
        """Return copies of the allocations that strided pools lie in, with zeros for the pools."""
        found = []
        for tensor in self.tensors():
            if tensor._base is not None:
                whole = tensor._base.clone()
                whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
                found.append(whole)
        return found

    def checkpoint(self, slot: int) -> Tensor:
        """Return the checkpoint of a slot, [HV, V, K], in fp64 where it is stored in 8 bits."""
        if self.state_scale is None:
            return self.state[slot]
        return widen(self.state[slot], self.state_scale[slot], torch.float64)

    def quantum(self, slot: int) -> Tensor | None:
        """Return the distance of neighbouring values of an 8-bit checkpoint, [HV, V, K], fp64."""
        if self.state_scale is None:
            return None
        return self.state_scale[slot].double().repeat_interleave(GROUP_SIZE, -1)

    def live_rows(self, slot: int) -> list[int]:
        """Return the ring rows of a slot's window, oldest first."""
        start, count = int(self.ring.ring_start[slot]), int(self.ring.history_len[slot])
        return [(start + j) % self.geometry.capacity for j in range(count)]

    def free_rows(self, slot: int, count: int) -> list[int]:
        """Return the ring rows that the next rows of a slot go to."""
        first = int(self.ring.ring_start[slot]) + int(self.ring.history_len[slot])
        return [(first + t) % self.geometry.capacity for t in range(count)]

    def window(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return k [P, H, K], u [P, HV, V] and cum_log_decay [P, HV] of a slot's live rows."""
        ring, rows = self.ring, self.live_rows(slot)
        return (
            ring.k[slot][:, rows].transpose(0, 1),
            ring.u[slot][:, rows].transpose(0, 1),
            ring.cum_log_decay[slot][:, rows].transpose(0, 1),
        )

    def fill_slot(
        self, slot: int, start: int, history: int, generator: torch.Generator, gap: float = 0.5
    ) -> None:
        """Give a slot a random checkpoint and a random window of `history` rows."""
        g = self.geometry

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.ring.ring_start[slot], self.ring.history_len[slot] = start, history
        self.seq_len[slot] = 100 + history
        rows = self.live_rows(slot)
        k = prepared(normal(g.heads, history, g.key_dim))
        u = normal(g.value_heads, history, g.value_dim)
        steps = gap * torch.rand((g.value_heads, history), generator=generator, dtype=torch.float64)
        for pool, values in (
            (self.ring.k, k),
            (self.ring.u, u),
            (self.ring.cum_log_decay, -steps.cumsum(1)),
        ):
            pool[slot][:, rows] = values.to(pool.dtype).to(pool.device)
        state = normal(g.value_heads, g.value_dim, g.key_dim).to(self.state.device)
        if self.state_scale is None:
            self.state[slot] = state.to(self.state.dtype)
        else:
            quantise(state, self.state[slot], self.state_scale[slot])


@dataclass(frozen=True)
class Case:
    """One verify call.

    Attributes:
        lengths: rows of each request.
        history: live rows of each request.
        starts: first ring row of each request's window.
        slots: slot of each request; None: descending from the last slot; -1: padding.
        folds: which requests fold; None: those whose window would overflow.
        tail: packed rows that belong to nobody.
        decay: name in `DECAYS`.
        history_gap: largest log-decay between live rows.
        magnitude: factor of q, k and v.
        is_strided: whether rows, outputs and pools are slices of larger tensors.
        is_aligned: whether strided pools lie on 16-byte boundaries.
    """

    name: str
    lengths: tuple[int, ...]
    history: tuple[int, ...]
    starts: tuple[int, ...] = ()
    slots: tuple[int, ...] | None = None
    folds: tuple[bool, ...] | None = None
    tail: int = 0
    decay: str = "medium"
    history_gap: float = 0.5
    magnitude: float = 1.0
    equal_keys: bool = False
    is_strided: bool = False
    is_aligned: bool = False
    scale: float | None = None
    use_qk_l2norm: bool = True
    beta_scale: float = 1.0
    geometry: Geometry = field(default_factory=Geometry)
    dtypes: Dtypes = field(default_factory=Dtypes)
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.dtypes}"

    def using(self, dtypes: Dtypes) -> Case:
        """Return the same case in other dtypes."""
        return replace(self, dtypes=dtypes)


class VerifyCall:
    """The tensors of a case, the call, and the check of everything that it may change."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(case.seed)
        g, count = case.geometry, len(case.lengths)
        self.slots = case.slots or tuple(range(g.num_slots - 1, g.num_slots - 1 - count, -1))
        starts = case.starts or (0,) * count
        self.pools = Pools.create(
            g, case.dtypes, device, is_strided=case.is_strided, is_aligned=case.is_aligned
        )
        for slot, start, history in zip(self.slots, starts, case.history, strict=True):
            if slot >= 0:
                self.pools.fill_slot(slot, start, history, generator, case.history_gap)
        self.tokens = make_tokens(
            g,
            sum(case.lengths),
            generator,
            case.dtypes.rows,
            decay=case.decay,
            equal_keys=case.equal_keys,
        )
        q, k, v = (case.magnitude * part for part in self.tokens.packed()[:3])
        self.tokens = replace(self.tokens, q=q, k=k, v=v)
        self.folds = case.folds or tuple(
            slot >= 0 and n > 0 and history + n > g.max_window
            for slot, n, history in zip(self.slots, case.lengths, case.history, strict=True)
        )
        self.cu_seqlens = offsets(case.lengths, device)
        self.is_fold = torch.tensor(self.folds, dtype=torch.int8, device=device)
        self.slot_tensor = torch.tensor(self.slots, dtype=torch.int32, device=device)

    def inputs(self) -> list[Tensor]:
        """Return q, k, v, a, b with rows of padded requests and of the tail poisoned."""
        packed = []
        for i, part in enumerate(self.tokens.packed()):
            tail = part.new_full((self.case.tail, *part.shape[1:]), torch.nan)
            rows = torch.cat((part, tail))
            for slot, (first, last) in zip(self.slots, self._bounds(), strict=True):
                if slot < 0:
                    rows[first:last] = torch.nan
            rows = rows.to(self.device)
            packed.append(_embedded(rows, 8 * i + 8) if self.case.is_strided else rows)
        return packed

    def run(self, backend: str = "auto", **options: object) -> Tensor:
        """Call verify; keyword arguments override those of the case."""
        case = self.case
        shape = (sum(case.lengths) + case.tail, *self.tokens.v.shape[1:])
        arguments = {
            "out": poisoned(shape, case.dtypes.rows, self.device, margins=(1, 1, 8))
            if case.is_strided
            else None,
            "max_verify_tokens": max((1, *case.lengths)),
            "is_fold": self.is_fold,
            "scale": case.scale,
            "use_qk_l2norm": case.use_qk_l2norm,
            "beta_scale": case.beta_scale,
            "state_scale": self.pools.state_scale,
            "backend": backend,
        }
        return gated_delta_rule.verify(
            *self.inputs(),
            self.tokens.A_log.to(self.device),
            self.tokens.dt_bias.to(self.device),
            self.pools.state,
            self.pools.ring,
            self.cu_seqlens,
            self.slot_tensor,
            **(arguments | options),
        )

    def check(
        self, backend: str = "auto", operands: torch.dtype | None = None, **options: object
    ) -> Tensor:
        """Run the call and compare outputs, appended rows, checkpoints and all other bits.

        Args:
            backend: backend to run.
            operands: dtype to which a kernel rounds operands of its products.
            options: arguments of the call that override the case's.

        Returns:
            The outputs.
        """
        pools, dtypes = self.pools, self.case.dtypes
        inner = (dtypes.compute, operands or dtypes.compute)
        factor = KERNEL_FACTOR if operands in (torch.bfloat16, torch.float16) else 1.0
        before, around = pools.copies(), pools.surroundings()
        may_change = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in before]
        expected = []
        for i, (slot, n) in enumerate(zip(self.slots, self.case.lengths, strict=True)):
            if slot >= 0 and n > 0:
                expected.append((i, slot, *self._expected(i, slot)))
                rows = pools.free_rows(slot, n)
                for mask in may_change[1:4]:
                    mask[slot][:, rows] = True
                for j in (0, *range(7, len(before))):
                    may_change[j][slot] = self.folds[i]
        out = self.run(backend, **options)
        after, is_owned = pools.tensors(), torch.zeros(out.shape[0], dtype=torch.bool)
        for i, slot, y, u, cum, state in expected:
            first, last = self._bounds()[i]
            is_owned[first:last] = True
            rows = pools.free_rows(slot, last - first)
            assert_close(out[first:last], y, dtypes.rows, *inner, factor=factor)
            keys = prepared(self.tokens.k[first:last], self.case.use_qk_l2norm).to(out.device)
            assert_close(pools.ring.k[slot][:, rows], keys.transpose(0, 1), dtypes.ring, *inner)
            assert_close(
                pools.ring.u[slot][:, rows], u.transpose(0, 1), dtypes.ring, *inner, factor=factor
            )
            stored = pools.ring.cum_log_decay[slot][:, rows]
            assert_close(stored, cum.transpose(0, 1), dtypes.cum, dtypes.compute)
            if self.folds[i]:
                assert_rounded(
                    pools.checkpoint(slot), state, pools.quantum(slot),
                    dtypes.state, *inner, factor=factor,
                )  # fmt: skip
        assert_same_bits(out[~is_owned], torch.zeros_like(out[~is_owned]))
        for actual, old, mask in zip(after, before, may_change, strict=True):
            assert_same_bits(actual, old, ~mask)
        for actual, old in zip(pools.surroundings(), around, strict=True):
            assert_same_bits(actual, old)
        if self.case.is_strided:
            _assert_poison_around(out)
        return out

    def _bounds(self) -> list[tuple[int, int]]:
        ends = offsets(self.case.lengths).tolist()
        return list(zip(ends[:-1], ends[1:], strict=True))

    def _expected(self, i: int, slot: int) -> tuple[Tensor, ...]:
        case, (first, last) = self.case, self._bounds()[i]
        k, u, cum = self.pools.window(slot)
        state = window_state(*(part.cpu() for part in (self.pools.checkpoint(slot), k, u, cum)))
        rows = self.tokens.rows(first, last)
        y, new_u, _ = recurrence(
            rows,
            state,
            scale=case.scale,
            use_qk_l2norm=case.use_qk_l2norm,
            beta_scale=case.beta_scale,
        )
        total = gates(rows, case.beta_scale)[0].cumsum(0)
        if not self.folds[i] and len(cum):
            total = total + cum[-1].double().cpu()
        return tuple(part.to(self.device) for part in (y, new_u, total, state))


def _embedded(rows: Tensor, gap: int) -> Tensor:
    """Return the same rows inside a larger tensor of NaN, last stride 1, `gap` wider everywhere."""
    sizes = rows.shape[1:]
    wide = rows.new_full((rows.shape[0], *(size + gap for size in sizes)), torch.nan)
    part = wide[(slice(None), *(slice(8, 8 + size) for size in sizes))]
    part.copy_(rows)
    return part
