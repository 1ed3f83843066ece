"""Prompts in slots that hold states, and what the recurrence makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, Pools, assert_same_bits, make_tokens, offsets
from helpers.gdn_oracle import Tokens, recurrence
from helpers.tolerances import HALF_QUANTUM, assert_close, tolerance
from hybridspec.ops import gated_delta_rule

__all__ = ["Prompts"]


@dataclass
class Prompts:
    """Prompts of some lengths in slots that hold random states."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    geometry: Geometry
    dtypes: Dtypes
    pools: Pools
    tokens: Tokens
    device: str = "cpu"

    @classmethod
    def create(
        cls,
        *lengths: int,
        slots: tuple[int, ...] | None = None,
        geometry: Geometry | None = None,
        dtypes: Dtypes | None = None,
        is_strided: bool = False,
        device: str = "cpu",
        **options: object,
    ) -> Prompts:
        geometry, dtypes = geometry or Geometry(), dtypes or Dtypes()
        slots = slots or tuple(range(geometry.num_slots - 1, -1, -1))[: len(lengths)]
        generator = torch.Generator().manual_seed(sum(lengths))
        pools = Pools.create(geometry, dtypes, device, is_strided=is_strided)
        for slot in slots:
            if slot >= 0:
                pools.fill_slot(slot, 3, 0, generator)
        tokens = make_tokens(geometry, sum(lengths), generator, dtypes.rows, **options)
        return cls(lengths, slots, geometry, dtypes, pools, tokens, device)

    def call(self, tail: int = 0) -> dict[str, object]:
        """The arguments of a call, with rows of NaN for padding and `tail` more behind."""
        names, rows = ("q", "k", "v", "a", "b"), {}
        bounds = offsets(self.lengths)
        for name, part in zip(names, self.tokens.packed(), strict=True):
            part = torch.cat((part, part.new_full((tail, *part.shape[1:]), torch.nan)))
            for i, slot in enumerate(self.slots):
                if slot < 0:
                    part[int(bounds[i]) : int(bounds[i + 1])] = torch.nan
            rows[name] = part.to(self.device)
        return rows | {
            "A_log": self.tokens.A_log.to(self.device),
            "dt_bias": self.tokens.dt_bias.to(self.device),
            "state": self.pools.state,
            "ring": self.pools.ring,
            "cu_seqlens": bounds.to(self.device),
            "slots": torch.tensor(self.slots, dtype=torch.int32, device=self.device),
            "max_seqlen": max(self.lengths),
            "state_scale": self.pools.state_scale,
        }

    def run(self, tail: int = 0, **options: object) -> Tensor:
        return gated_delta_rule.prefill(**(self.call(tail) | options))

    def check(self, tail: int = 0, factor: float = 1.0, **options: object) -> Tensor:
        before, bounds = self.pools.copies(), offsets(self.lengths).tolist()
        states = {
            s: self.pools.checkpoint(s).to("cpu", torch.float64, copy=True)
            for s in self.slots
            if s >= 0
        }
        out = self.run(tail, **options)
        written, is_owned = [], torch.zeros(len(out), dtype=torch.bool)
        names = ("scale", "use_qk_l2norm", "beta_scale")
        semantics = {name: options[name] for name in names if name in options}
        for i, slot in enumerate(self.slots):
            if slot < 0 or not self.lengths[i]:
                continue
            first, last = bounds[i], bounds[i + 1]
            rows = self.tokens.rows(first, last)
            y, _, after = recurrence(rows, states[slot], **semantics)
            dtypes = self.dtypes.rows, self.dtypes.compute
            assert_close(out[first:last].cpu(), y, *dtypes, factor=factor)
            self._check_state(slot, after[-1], factor)
            is_owned[first:last] = True
            written.append(slot)
        nobody = out.cpu()[~is_owned]
        assert_same_bits(nobody, torch.zeros_like(nobody))
        kept = torch.tensor([s not in written for s in range(self.geometry.num_slots)])
        for i, (actual, old) in enumerate(zip(self.pools.tensors(), before, strict=True)):
            is_state = i == 0 or actual is self.pools.state_scale
            mask = kept if is_state else torch.ones_like(kept)
            assert_same_bits(actual.cpu()[mask], old.cpu()[mask])
        return out

    def _check_state(self, slot: int, right: Tensor, factor: float) -> None:
        found, quantum = self.pools.checkpoint(slot).cpu(), self.pools.quantum(slot)
        if factor > 1.0:  # of a kernel whose operands have the dtype of the rows
            dtypes = self.dtypes.rows, self.dtypes.compute
        else:
            dtypes = self.dtypes.state, self.dtypes.compute
        if quantum is None:
            assert_close(found, right, *dtypes, factor=factor)
        else:
            allowed = HALF_QUANTUM * quantum.cpu()
            allowed = allowed + factor * tolerance(*dtypes) * right.abs().max()
            assert ((found - right).abs() <= allowed).all()
