"""Forced acceptance, to measure a rate of acceptance that the weights at hand do not have.

Every part of a step runs; only which drafts are accepted, and the drafter's confidences, come from
here. The output of such a run is synthetic. Few operators are added, so that steps cost what they
cost without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["ForcedAcceptance"]

_DRAW, _JUDGE = 1, 2  # streams of the generator
# Odd numbers whose multiples spread over all 64 bits: of the golden ratio, and MurmurHash3's.
_SPREADERS = (-0x61C8864680B583EB, -0x00AE502812AA7333, -0x3B314601E57A13AD)


@dataclass(frozen=True, slots=True)
class ForcedAcceptance:
    """Accepts draft j, if all before it stand, with a probability around `rates[j - 1]`.

    Each draft draws its own probability, P_j + spread (2 u - 1) cut to 0..1, has it for its
    confidence, and stands if another draw is below it. Both draws are functions of slot and
    position only, made where the step runs.

    Captured steps read both where they lie, so they may be written between steps.

    Attributes:
        rates: P_1, P_2, ...; the last one counts for all further drafts, [n] fp32.
        spread: half the width of a draft's own probability, [] fp32.
    """

    rates: Tensor
    spread: Tensor

    @classmethod
    def of(cls, rates: Sequence[float], spread: float, device: torch.device) -> Self:
        """Put rates and spread where the steps run."""
        numbers = torch.tensor([spread, *rates], dtype=torch.float32, device=device)
        return cls(numbers[1:], numbers[0])

    def confidences(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the probability of each draft; slots [B, 1], positions [B, k]: [B, k] fp32."""
        num_drafts, rates = positions.shape[1], self.rates
        if rates.shape[0] < num_drafts:
            rates = torch.cat((rates, rates[-1:].expand(num_drafts - rates.shape[0])))
        draws = _uniform(slots, positions, _DRAW).mul_(2).sub_(1)
        return draws.mul_(self.spread).add_(rates[:num_drafts]).clamp_(0, 1)

    def judge(
        self,
        chosen: Tensor,
        fed: Tensor,
        slots: Tensor,
        positions: Tensor,
        confidences: Tensor,
        vocab_size: int,
    ) -> Tensor:
        """Make chosen tokens agree with the next rows' drafts, or differ from them.

        Args:
            chosen: the target's token after each row, [N] int64; in.
            fed: token of each row, [N] int64; in.
            slots: slot of each row, [N] int32; in.
            positions: position of the chosen token, [N] int64; in.
            confidences: of the draft in the next row, [N] fp32; in.
            vocab_size: tokens there are.

        Returns:
            Tokens [N] int64; rows without a next one get any.
        """
        draft = torch.roll(fed, -1)
        stands = _uniform(slots, positions, _JUDGE) < confidences
        other = torch.where(chosen == draft, (draft + 1) % vocab_size, chosen)
        return torch.where(stands & (chosen >= 0), draft, other)


def _uniform(slots: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Numbers in 0..1 of slots and positions, fp32: the upper bits of a hash of both."""
    mixed = torch.add(positions * _SPREADERS[0], slots.long() + (stream << 32), alpha=_SPREADERS[1])
    for spreader in _SPREADERS[1:]:
        mixed = (mixed ^ (mixed >> 32)).mul_(spreader)
    return (mixed >> 40).bitwise_and_(2**24 - 1).to(torch.float32).mul_(2.0**-24)
