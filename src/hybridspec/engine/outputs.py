"""What the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CompletionOutput", "RequestOutput", "RequestStats", "StepOutput"]


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """What happened to one request.

    Attributes:
        committed_per_step: tokens committed by each verify step; the prefill's token not counted.
        drafted_per_step: drafts verified in each verify step.
        accepted_per_step: drafts accepted in each verify step (before a stop cut the step).
        folds: verify steps that folded the ring into the checkpoint.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds in verify steps, drafting included.
    """

    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    folds: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def acceptance_by_position(self) -> list[float | None]:
        """Share of steps that verified a draft at position j in which it was accepted, j = 1...

        None stands for a position at which nothing was drafted.
        """
        return acceptance_by_position([self])


def acceptance_by_position(stats: list[RequestStats]) -> list[float | None]:
    """The same over many requests, each step counting once."""
    longest = max((max(s.drafted_per_step, default=0) for s in stats), default=0)
    rates: list[float | None] = []
    for j in range(1, longest + 1):
        drafted = accepted = 0
        for s in stats:
            drafted += sum(count >= j for count in s.drafted_per_step)
            accepted += sum(count >= j for count in s.accepted_per_step)
        rates.append(accepted / drafted if drafted else None)
    return rates


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: 0, the only continuation of a request.
        token_ids: generated tokens, a final EOS or stop token included.
        text: their text, without special tokens and cut before a stop string; empty without a
            tokenizer.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "abort" (dropped before
            its end), or None while running.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with what has been generated for it."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step added to one request.

    Attributes:
        step: 0 for the prefill, then 1, 2, ... for the verify steps.
        token_ids: tokens committed in this step.
        origins: where each came from: "prefill", "accepted" (a draft), "recovered" (in place of a
            rejected draft) or "bonus" (after the last draft, all accepted; also without drafts).
        drafted: the drafts that were verified.
        text: text added, whole UTF-8 characters only.
        history_len: live ring rows before the step.
        is_fold: whether the step folded the ring into the checkpoint.
        finished, finish_reason: whether and why the request ended.
        output: the request so far.
    """

    step: int
    token_ids: list[int]
    origins: list[str]
    drafted: list[int]
    text: str
    history_len: int
    is_fold: bool
    finished: bool
    finish_reason: str | None
    output: RequestOutput
