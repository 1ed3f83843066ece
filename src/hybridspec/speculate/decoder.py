"""The inputs of a step, its options and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hybridspec.models import HybridModel
from hybridspec.ops.accept import RequestTable, StepResult, TokenLog
from hybridspec.ops.sampling import SamplingUses
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Pools, SamplingPool
from hybridspec.speculate.forced import ForcedAcceptance
from hybridspec.speculate.logprobs import LogprobReport
from hybridspec.speculate.row_by_row import forward_row_by_row, logits_row_by_row

__all__ = ["Asks", "Decoder", "Drafter", "Outcome"]

Overflow = Callable[[Tensor, Sequence[tuple[int, Sequence[int]]]], Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What some request of a batch may need; saying more than is true costs time only.

    Attributes:
        uses: parts of choosing a token.
        num_logprobs: most likely tokens to report beside the chosen ones; None reports nothing.
        has_confidences: whether the drafter says how sure it is.
        overflow: what the table of sampling parameters cannot hold: called with logits and, for
            each row, its slot and the tokens in front of it; may edit the logits, and returns a
            mask for `choose` or None. A step that has it waits for the host.
    """

    uses: SamplingUses
    num_logprobs: int | None = None
    has_confidences: bool = False
    overflow: Overflow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step found, on the device.

    Attributes:
        result: tokens, counts, folds and ends of each request of the batch.
        report: log-probabilities of the rows' tokens, None unless requested.
        confidences: of the drafts that each request had, verified or not, 0 where it had none,
            [B, k] fp32; None where nothing is learnt of them.
    """

    result: StepResult
    report: LogprobReport | None = None
    confidences: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens; the output of a request never depends on what it proposes."""

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Take in rows of the target: hidden [N, D] and the tokens [N] that follow them."""
        ...

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Store drafts, confidences and their number in `decoder.requests`.

        Args:
            decoder: the cursors stand behind the rows that were absorbed.
            last_hidden: what `absorb` gave for each request's last committed row, [B, D].
            slots: slot of each request, -1 where nothing is to be drafted, [B] int32.
            asks: what the requests may need.
            num_drafts: most drafts of a request; none is a number, too.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Decoder:
    """Model and memories.

    Attributes:
        model: the target model.
        pools: the logs of all requests, and their cursors.
        requests: newest tokens, drafts and limits of all slots.
        sampling: how each slot's tokens are chosen.
        drafter: proposes tokens.
        forced: decides which drafts are accepted; None: those that are right.
        is_row_by_row: whether every row to verify is a forward pass of its own.
        calibration: acceptance of drafts by position and confidence, [k, M] fp32, by which rows are
            chosen and which follows what steps report; None: the drafter's own confidences are
            taken, and not reported.
    """

    model: HybridModel
    pools: Pools
    requests: RequestTable
    sampling: SamplingPool
    drafter: Drafter
    forced: ForcedAcceptance | None = None
    is_row_by_row: bool = False
    calibration: Tensor | None = None

    def forward(self, step: Step) -> Tensor:
        """Run the trunk over the rows of a step; hidden states [N, D]."""
        if self.is_row_by_row:
            return forward_row_by_row(self.model, step, self.pools)
        return self.model.forward(step, self.pools.memories)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the LM head's logits [N, vocab] of hidden states [N, D], at least fp32."""
        if self.is_row_by_row:
            return logits_row_by_row(self.model, hidden)
        return self.model.logits(hidden)

    def history(self, slot: int, seq_len: Tensor) -> list[int]:
        """Read a slot's tokens up to the newest from the log; on a device this waits.

        Args:
            slot: which.
            seq_len: position of the newest token of each slot, [S] int32.
        """
        pools = self.pools
        length = int(seq_len[slot]) + 1
        pages = pools.page_table[slot, : -(-length // pools.page_size)].long()
        return pools.token_pages[pages].flatten()[:length].tolist()

    def log(self, seq_len: Tensor) -> TokenLog:
        """Return the token log with its newest tokens at these positions, [S] int32."""
        pools = self.pools
        return TokenLog(token_pages=pools.token_pages, page_table=pools.page_table, seq_len=seq_len)
