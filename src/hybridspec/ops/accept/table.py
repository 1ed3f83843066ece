"""A request's data between steps, and a step's result: slot-keyed tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from hybridspec.ops._columns import Columns
from hybridspec.ops._library import Written

__all__ = ["Counts", "Ends", "RequestTable", "StepResult", "StepRows", "Taken", "TokenLog"]


class StepRows(NamedTuple):
    """The rows of a step, by request.

    Attributes:
        cu_seqlens: [B+1] int32.
        num_verify_tokens: [B] int32.
        slots: [B] int32, -1 = padding.
        is_fold: [B] int8.
    """

    cu_seqlens: Tensor
    num_verify_tokens: Tensor
    slots: Tensor
    is_fold: Tensor


class Ends(NamedTuple):
    """Tokens that end a request.

    Attributes:
        bits: a bit for each token, [S, words] int32.
        begin: position from which they do, [S] int32.
    """

    bits: Tensor
    begin: Tensor


class Counts(NamedTuple):
    """How often a request has said each token.

    Attributes:
        table: [C, V] int16.
        row: its row of the table, -1 = none, [S] int32.
    """

    table: Written[Tensor]
    row: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLog:
    """Token ids of every request, in pages beside its keys.

    The token at position p of a slot is token_pages[page_table[slot, p // page_size],
    p % page_size]; the newest one stands at position seq_len[slot].

    Attributes:
        token_pages: [P, page_size] int32.
        page_table: [S, pages] int32, -1 where no page is held.
        seq_len: position of the newest token of each slot, [S] int32.
    """

    token_pages: Written[Tensor]
    page_table: Tensor
    seq_len: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTable(Columns):
    """One row per slot, and one more that is scratch: slot -1 writes there.

    Attributes:
        next_tokens: the newest committed token, which is not fed yet, then the drafts behind it,
            [S+1, k+1] int64.
        confidences: the drafter's probability of each draft, [S+1, k] fp32.
        num_drafts: drafts to verify in the next step, [S+1] int32; never more than fit before
            `last_position`.
        draft_limit: most drafts that the request wants, [S+1] int32.
        last_position: last position that a token of the request may take, [S+1] int32.
        is_done: 0 while the request runs, then one of `DONE_*`, [S+1] int8.
    """

    DONE_BY_TOKEN: ClassVar[int] = 1
    DONE_BY_LENGTH: ClassVar[int] = 2
    DONE_BY_NAN: ClassVar[int] = 3

    next_tokens: Tensor
    confidences: Tensor
    num_drafts: Tensor
    draft_limit: Tensor
    last_position: Tensor
    is_done: Tensor

    @classmethod
    def create(
        cls, *, num_slots: int, num_drafts: int, device: torch.device | str = "cpu"
    ) -> RequestTable:
        """Allocate a table in which no slot holds a running request.

        Args:
            num_slots: slots S.
            num_drafts: most drafts k of one request.
            device: where the tensors live.
        """
        size = num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            next_tokens=zeros(size, num_drafts + 1, dtype=torch.int64),
            confidences=zeros(size, num_drafts, dtype=torch.float32),
            num_drafts=zeros(size, dtype=torch.int32),
            draft_limit=zeros(size, dtype=torch.int32),
            last_position=zeros(size, dtype=torch.int32),
            is_done=torch.full((size,), cls.DONE_BY_TOKEN, dtype=torch.int8, device=device),
        )

    @property
    def num_slots(self) -> int:
        """Slots S, the scratch row aside."""
        return self.is_done.shape[0] - 1

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows of slots, the scratch row for -1; int32 like `slots`, never negative."""
        return slots.remainder(self.num_slots + 1)

    @property
    def most_drafts(self) -> int:
        """Most drafts k of one request."""
        return self.next_tokens.shape[1] - 1

    @property
    def drafts(self) -> Tensor:
        """The drafts of every slot, [S, k] int64, a view."""
        return self.next_tokens[:-1, 1:]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def resized(self, num_slots: int) -> RequestTable:
        """Return a table of more or fewer slots; those that stay keep their rows."""
        device = self.is_done.device
        larger = self.create(num_slots=num_slots, num_drafts=self.most_drafts, device=device)
        kept = min(self.num_slots, num_slots)
        for old, new in zip(self.tensors(), larger.tensors(), strict=True):
            new[:kept] = old[:kept]
        return larger


@dataclass(slots=True)  # frozen ones take three times as long to make
class Taken:
    """What one step did for one request, as the host sees it.

    Attributes:
        tokens: committed tokens.
        drafts: the drafts that were verified.
        num_rows: rows that the request had in the step.
        num_accepted: how many of them were right, before an end cut the step.
        is_fold: whether the step folded the window into the checkpoint.
        history_len: live ring rows before the step.
        done: 0 while the request runs, then one of `RequestTable.DONE_*`.
    """

    tokens: list[int]
    drafts: list[int]
    num_rows: int
    num_accepted: int
    is_fold: bool
    history_len: int
    done: int

    @classmethod
    def of(cls, row: list[int]) -> Self:
        """Read one row of `StepResult.packed`."""
        committed, accepted, num_rows, is_fold, history_len, done = row[: StepResult.NUM_HEAD]
        first = StepResult.NUM_HEAD
        middle = first + (len(row) - first + 1) // 2
        return cls(
            tokens=row[first : first + committed],
            drafts=row[middle : middle + max(num_rows - 1, 0)],
            num_rows=num_rows,
            num_accepted=accepted,
            is_fold=bool(is_fold),
            history_len=history_len,
            done=done,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did for each request of its batch, one row of integers each.

    Attributes:
        packed: [B, 7 + 2 k] int32: tokens committed, drafts that were right, rows, is_fold,
            history_len, is_done; then k + 1 tokens, -1 behind the committed ones; then the k drafts
            that stood behind the newest token. `Taken.of` reads a row.
        num_committed: tokens that each request takes in, [B] int32: the first column once more,
            as `commit` wants it.
    """

    NUM_HEAD: ClassVar[int] = 6

    packed: Tensor
    num_committed: Tensor

    @classmethod
    def create(
        cls, *, num_requests: int, num_drafts: int, device: torch.device | str = "cpu"
    ) -> StepResult:
        """Allocate the result of a batch.

        Args:
            num_requests: requests B.
            num_drafts: most drafts k of one request.
            device: where the tensor lives.
        """
        shapes = ((num_requests, cls.width(num_drafts)), (num_requests,))
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))

    @classmethod
    def width(cls, num_drafts: int) -> int:
        """Columns of a result with at most `num_drafts` drafts."""
        return cls.NUM_HEAD + 2 * num_drafts + 1
