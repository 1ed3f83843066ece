"""How one forward pass is laid out: which rows belong to which request, and where they go.

The same type holds the rows that verify, the rows of prompts and the rows that the draft head runs
over. A memory carries its own cursor, so a step has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Step", "Workspace"]


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
class Step:
    """Row layout of one forward pass, shared by all its layers.

    In a step that a graph replays, all tensors are written in place, step after step. Rows past
    `cu_seqlens[-1]` are padding rows: token 0, position 0, source -1. Requests with slot -1 have
    zero lengths.

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
        max_seqlen: most rows of one request.
        is_prefill: whether the rows are prompt rows (stored directly) or rows to verify (appended).
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
    max_seqlen: int
    is_prefill: bool

    @classmethod
    def create(
        cls,
        *,
        max_requests: int,
        max_rows: int,
        max_drafts: int,
        device: torch.device | str = "cpu",
    ) -> Step:
        """Allocate a step to verify in which every row and request is a padding row.

        Args:
            max_requests: requests B of a step, padding included.
            max_rows: rows N of a step, padding included; at least `max_requests`.
            max_drafts: most drafts k of one request.
            device: where the tensors live.

        Returns:
            The step, with `max_seqlen` k + 1.

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
            max_seqlen=max_drafts + 1,
            is_prefill=False,
        )

    @classmethod
    def single_rows(cls, slots: Tensor) -> Step:
        """Lay out one row per request; what it is fed, and where it stands, is not filled in.

        Args:
            slots: slot of each request, -1 = padding, [B] int32.
        """
        bounds = torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device)
        rows = bounds[:-1]
        return cls(
            cu_seqlens=bounds,
            num_verify_tokens=torch.ones_like(slots),
            kv_len=rows,
            slots=slots,
            is_fold=torch.zeros_like(slots, dtype=torch.int8),
            token_ids=rows,
            positions=rows,
            sources=rows,
            workspace=rows,
            max_seqlen=1,
            is_prefill=False,
        )

    @classmethod
    def of_rows(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int],
        token_ids: Tensor,
        *,
        is_prefill: bool,
    ) -> Step:
        """Lay out rows that the host knows, without a fold; sources are numbered by `max_seqlen`.

        Args:
            slots: slot of each request.
            lengths: rows of each request, at least 1 of one of them.
            starts: position of the first row of each request.
            token_ids: what the rows are fed, [N] int64; its device is the step's.
            is_prefill: whether they are prompt rows.
        """
        device, longest = token_ids.device, max(lengths)
        offsets = [0]
        positions: list[int] = []
        sources: list[int] = []
        for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            offsets.append(offsets[-1] + length)
            positions.extend(range(start, start + length))
            sources.extend(range(b * longest, b * longest + length))

        def column(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            host = torch.tensor(values, dtype=dtype)
            # From other memory than pinned one a copy waits for the steps in flight.
            return (host.pin_memory() if device.type == "cuda" else host).to(
                device, non_blocking=True
            )

        return cls(
            cu_seqlens=column(offsets),
            num_verify_tokens=column(lengths),
            kv_len=column([start + n for start, n in zip(starts, lengths, strict=True)]),
            slots=column(slots),
            is_fold=torch.zeros(len(slots), dtype=torch.int8, device=device),
            token_ids=token_ids,
            positions=column(positions, torch.int64),
            sources=column(sources),
            workspace=torch.empty(0, dtype=torch.int32, device=device),
            max_seqlen=longest,
            is_prefill=is_prefill,
        )

    def tensors(self) -> list[Tensor]:
        """List the tensors in the order of the fields, as the registered ops take them."""
        return [getattr(self, name) for name in self.__slots__[:_NUM_TENSORS]]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], *, max_seqlen: int, is_prefill: bool = False) -> Step:
        """Name the tensors that `tensors` listed."""
        named = dict(zip(cls.__slots__[:_NUM_TENSORS], tensors, strict=True))
        return cls(**named, max_seqlen=max_seqlen, is_prefill=is_prefill)


_NUM_TENSORS = len(Step.__slots__) - 2
