"""Tensors that travel together: the plan of one step, and the sampling parameters of its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["SamplingColumns", "VerifyPlan", "Workspace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where the parts of the kernels' scratch begin, in int32 from its start.

    Attributes:
        live: number of live requests; with the histograms the part that starts as zeros.
        search: (threshold, rows still wanted) before each of the three passes and after the last.
        block_sums: (rows without ties, ties) of each block of requests.
        keys: sort key of each draft, [B, k].
        size: int32 in total.
    """

    NUM_BINS: ClassVar[int] = 1024
    BLOCK: ClassVar[int] = 256

    live: int
    search: int
    block_sums: int
    keys: int
    size: int

    @classmethod
    def of(cls, num_requests: int, num_drafts: int) -> Workspace:
        """Lay out the scratch of a batch; a larger batch's scratch holds every smaller one's."""
        live = 3 * cls.NUM_BINS
        search = live + 8
        block_sums = search + 8
        # 16-byte boundaries, so that keys are loaded four at a time.
        keys = block_sums + 4 * -(-num_requests // (2 * cls.BLOCK))
        return cls(
            live=live,
            search=search,
            block_sums=block_sums,
            keys=keys,
            size=keys + num_requests * num_drafts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """Which rows one decode step verifies; all tensors are written in place, step after step.

    Rows past `cu_seqlens[-1]` are hold rows: token 0, position 0, source -1. Requests with slot -1
    have zero lengths.

    Attributes:
        cu_seqlens: [B+1] int32, row offsets of the requests.
        num_verify_tokens: [B] int32, rows of each request (the query lengths of attention).
        kv_len: [B] int32, tokens that the request's last row sees, its own included.
        slots: [B] int32, -1 = padding.
        is_fold: [B] int8, whether the request's window is folded in this step.
        token_ids: [N] int64, token fed to each row.
        positions: [N] int64, position of each row in its request.
        sources: [N] int32, request * (k + 1) + row within the request, or -1.
        workspace: [...] int32, scratch of the kernels; its content means nothing between calls.
    """

    cu_seqlens: Tensor
    num_verify_tokens: Tensor
    kv_len: Tensor
    slots: Tensor
    is_fold: Tensor
    token_ids: Tensor
    positions: Tensor
    sources: Tensor
    workspace: Tensor

    @classmethod
    def create(
        cls,
        *,
        max_requests: int,
        max_rows: int,
        max_drafts: int,
        device: torch.device | str = "cpu",
    ) -> VerifyPlan:
        """Allocate a plan in which every row and request is a hold row.

        Args:
            max_requests: requests B of a step, padding included.
            max_rows: rows N of a step, padding included; at least `max_requests`.
            max_drafts: most drafts k of one request.
            device: where the tensors live.

        Returns:
            The plan.

        Raises:
            ValueError: if `max_rows` cannot hold one row of every request.
        """
        if max_rows < max_requests:
            raise ValueError(
                f"max_rows: expected at least max_requests = {max_requests}, got {max_rows}"
            )

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            cu_seqlens=zeros(max_requests + 1),
            num_verify_tokens=zeros(max_requests),
            kv_len=zeros(max_requests),
            slots=zeros(max_requests) - 1,
            is_fold=zeros(max_requests, torch.int8),
            token_ids=zeros(max_rows, torch.int64),
            positions=zeros(max_rows, torch.int64),
            sources=zeros(max_rows) - 1,
            workspace=zeros(Workspace.of(max_requests, max_drafts).size),
        )

    def tensors(self) -> list[Tensor]:
        """List the tensors in the order of the fields, as the registered ops take them."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> VerifyPlan:
        """Name the tensors that `tensors` listed."""
        return cls(**dict(zip(cls.__slots__, tensors, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
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

    def tensors(self) -> list[Tensor]:
        """List the tensors in the order of the fields, as the registered ops take them."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> SamplingColumns:
        """Name the tensors that `tensors` listed."""
        return cls(**dict(zip(cls.__slots__, tensors, strict=True)))
