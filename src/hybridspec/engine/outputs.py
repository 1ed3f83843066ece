"""The results of an engine: outputs of requests and of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hybridspec.speculate import TokenLogprobs

__all__ = ["CompletionOutput", "RequestOutput", "RequestStats", "StepOutput", "join_stats"]


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """What happened to one request.

    Attributes:
        committed_per_step: tokens committed by each verify step; the prefill's token not counted.
        drafted_per_step: drafts verified in each verify step.
        accepted_per_step: drafts accepted in each verify step (before a stop cut the step).
        folds: verify steps that folded the ring into the checkpoint.
        preemptions: how often it was preempted because pages ran out; a verify step without drafts
            stands for each prefill that took it up again.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds in verify steps, drafting included.
    """

    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    folds: int = 0
    preemptions: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def acceptance_by_position(self) -> list[float | None]:
        """Share of steps that verified a draft at position j in which it was accepted, j = 1...

        None stands for a position at which nothing was drafted.
        """
        return acceptance_by_position([self])


def join_stats(stats: list[RequestStats]) -> RequestStats:
    """Statistics of several continuations that ran side by side.

    Steps follow one another in the order of the continuations; times are the longest.
    """
    return RequestStats(
        committed_per_step=[n for s in stats for n in s.committed_per_step],
        drafted_per_step=[n for s in stats for n in s.drafted_per_step],
        accepted_per_step=[n for s in stats for n in s.accepted_per_step],
        folds=sum(s.folds for s in stats),
        preemptions=sum(s.preemptions for s in stats),
        prefill_s=max(s.prefill_s for s in stats),
        decode_s=max(s.decode_s for s in stats),
    )


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
        index: number of the continuation, 0..n-1.
        token_ids: generated tokens, a final EOS or stop token included.
        text: their text, without special tokens and cut before a stop string; empty without a
            tokenizer.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "abort" (dropped before
            its end), "error" (see `error`), or None while running.
        stop_reason: the stop string or stop token of the parameters that ended it; None after an
            EOS or another end.
        logprobs: for each token, by token id, its log-probability and those of the most likely
            tokens, of the model's own distribution (before bias, penalties and temperature); None
            unless SamplingParams.logprobs asks for them.
        cumulative_logprob: sum of the log-probabilities of the tokens; None with `logprobs`.
        error: what went wrong where the model's logits held NaN, else None.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt with what has been generated for it.

    Attributes:
        request_id: number, unique in its engine.
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids: its tokens.
        outputs: its n continuations, in order of their index.
        finished: whether all of them have ended.
        stats: what happened; with n > 1 the steps of all continuations, one after the other, and
            the longest times.
        prompt_logprobs: for each prompt token, as CompletionOutput.logprobs; None for the first
            token, which nothing predicts; None altogether unless asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: RequestStats
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True, kw_only=True)  # frozen ones take three times as long to make
class StepOutput:
    """What one step added to one continuation.

    Attributes:
        step: 0 for the prefill, then 1, 2, ... for the verify steps.
        token_ids: tokens committed in this step.
        origins: where each came from: "prefill", "accepted" (a draft), "recovered" (in place of a
            rejected draft) or "bonus" (after the last draft, all accepted; also without drafts).
        drafted: the drafts that were verified.
        text: text added, whole UTF-8 characters only.
        history_len: live ring rows before the step.
        is_fold: whether the step folded the ring into the checkpoint.
        expected_tokens: tokens that the policy expected of a request in this step, as it chose its
            sizes; None where nothing is chosen.
        finished, finish_reason, stop_reason: whether and why the continuation ended.
        index: which continuation the step belongs to.
        logprobs: of `token_ids`, as in CompletionOutput.
        make_output: makes `output`.
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
    make_output: Callable[[], RequestOutput] = field(repr=False, compare=False)
    stop_reason: int | str | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    expected_tokens: float | None = None

    @property
    def output(self) -> RequestOutput:
        """The prompt with all its continuations up to this step, made anew at each call.

        Its `stats` are those so far.
        """
        return self.make_output()
