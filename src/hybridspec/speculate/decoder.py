"""What a step works on, what it is asked for, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hybridspec.models import HybridModel
from hybridspec.ops.accept import RequestTable, StepResult, TokenLog
from hybridspec.ops.sampling import ChoiceUses, SamplingTable
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Pools
from hybridspec.speculate.logprobs import LogprobReport

__all__ = ["Asks", "Decoder", "Drafter", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What some request of a batch may need; saying more than is true costs time only.

    Attributes:
        uses: parts of choosing a token.
        num_logprobs: most likely tokens to report beside the chosen ones; None reports nothing.
        has_confidences: whether the drafter says how sure it is.
    """

    uses: ChoiceUses
    num_logprobs: int | None = None
    has_confidences: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step found, on the device.

    Attributes:
        result: tokens, counts, folds and ends of each request of the batch.
        report: log-probabilities of the rows' tokens, None if nobody asked.
    """

    result: StepResult
    report: LogprobReport | None = None


class Drafter(Protocol):
    """Proposes tokens; the output of a request never depends on what it proposes."""

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Take in rows of the target: hidden [N, D] and the tokens [N] that follow them."""
        ...

    def propose(self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks) -> None:
        """Store drafts, confidences and their number in `decoder.requests`.

        Args:
            decoder: the cursors stand behind the rows that were absorbed.
            last_hidden: what `absorb` gave for each request's last committed row, [B, D].
            slots: slot of each request, -1 where nothing is to be drafted, [B] int32.
            asks: what the requests may need.
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
        drafter: proposes tokens; None decodes without drafts.
    """

    model: HybridModel
    pools: Pools
    requests: RequestTable
    sampling: SamplingTable
    drafter: Drafter | None

    def log(self, seq_len: Tensor) -> TokenLog:
        """Return the token log with its newest tokens at these positions, [S] int32."""
        pools = self.pools
        return TokenLog(token_pages=pools.token_pages, page_table=pools.page_table, seq_len=seq_len)
