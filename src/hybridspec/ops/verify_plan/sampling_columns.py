"""Sampling parameters that travel together: one column each, an entry per request or per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._columns import Columns

__all__ = ["SamplingColumns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns(Columns):
    """Sampling parameters, one entry per request or per row.

    Attributes:
        temperature: fp32, 0 = greedy.
        top_k: int32, 0 = off.
        top_p: fp32, 1 = off.
        min_p: fp32, 0 = off.
        seeds: int64, seed of the noise.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def create(cls, size: int, *, device: torch.device | str = "cpu") -> SamplingColumns:
        """Allocate columns that say: greedy, every filter off."""
        zeros = torch.zeros(size, device=device)
        return cls(
            temperature=zeros,
            top_k=torch.zeros(size, dtype=torch.int32, device=device),
            top_p=torch.ones(size, device=device),
            min_p=zeros.clone(),
            seeds=torch.zeros(size, dtype=torch.int64, device=device),
        )
