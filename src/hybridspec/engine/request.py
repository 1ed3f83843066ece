"""One request, from its prompt to its last token."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from hybridspec.config import SamplingParams
from hybridspec.engine.outbox import Outbox, Posted
from hybridspec.engine.outputs import CompletionOutput, RequestOutput, RequestStats, join_stats
from hybridspec.engine.text import Text
from hybridspec.models import Tokenizer
from hybridspec.ops.sampling import NO_TOKEN
from hybridspec.runtime import SlotOptions
from hybridspec.speculate import TokenLogprobs

__all__ = ["Request", "RequestGroup"]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestGroup:
    """What all continuations of one prompt share.

    Attributes:
        request_id: number, unique in its engine.
        prompt: the prompt's text if it was given as text.
        prompt_token_ids: its tokens.
        params: sampling parameters.
        stop_ids: tokens that end a continuation.
        limit: most tokens to generate.
        tokenizer: names tokens in reports; None where no text is made.
        requests: all continuations by index; empty if there is only one (a reference from it to
            itself would keep it until a garbage collection).
        posted: what steps added and the caller has not fetched, oldest first: see `Request.outbox`.
        prompt_logprobs: a report for each prompt row so far, None for the first; None if not asked.
        num_posted: step outputs made so far.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    tokenizer: Tokenizer | None = None
    requests: list[Request] = field(default_factory=list)
    posted: deque[Posted] = field(default_factory=deque)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_posted: int = 0
    _names: dict[int, str] = field(default_factory=dict)

    def add_prompt_reports(self, reports: Sequence[TokenLogprobs]) -> None:
        """Take in the reports of the next prompt rows."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs += [self.named(report) for report in reports]

    @property
    def lacks_prompt_reports(self) -> bool:
        """Whether the first continuation is still to bring reports of prompt rows."""
        reports = self.prompt_logprobs
        is_short = reports is not None and len(reports) < len(self.prompt_token_ids)
        return is_short and self.requests[0].finish_reason is None

    def named(self, report: TokenLogprobs) -> TokenLogprobs:
        """Return a report with the text of its tokens, where text is made."""
        tokenizer, names = self.tokenizer, self._names
        if tokenizer is None:
            return report
        for token in report:
            if token not in names:
                names[token] = tokenizer.decode([token], skip_special_tokens=False)
        return {token: replace(one, decoded_token=names[token]) for token, one in report.items()}

    def stop_reason(self, token: int) -> int | str | None:
        """Return what the caller gave that makes this token an end; None for the model's EOS."""
        if token in self.params.stop_token_ids:
            return token
        if self.tokenizer is not None:
            for stop in self.params.stop:
                if self.tokenizer.token_id(stop) == token:
                    return stop
        return None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One continuation of a prompt: its tokens, its text and where it stands.

    Attributes:
        group: what it shares with the other continuations of the prompt.
        options: the parameters as the sampler wants them, the seed drawn.
        text: what it says; None where no text is made.
        index: number of the continuation, from 0.
        history: tokens of the prompt and of the continuation.
        logprobs: a report for each token of the continuation if the parameters ask for it.
        slot: index in the pools while running, else None.
        admission: number of its admission to that slot, for results that come late.
        admitted_at: when that was, by `time.perf_counter`.
        arrival: number in the order in which requests came.
        room: tokens that its pages hold; those of its longest form if they hold all of it.
        num_prefilled: rows of the prefill already processed.
        prefill_end: rows of the prefill: the prompt, and where the request begins anew, what it has
            said as well, unless that is decoded again.
        num_replayed: tokens of the continuation that are still to be decoded again.
        prefix_keys: of every page border in front of the last row, where prefixes are reused.
        cuts: where its prefill is cut to keep states, besides the ends of chunks.
        finish_reason, stop_reason: as in CompletionOutput.
        failure: what its caller is to be told where it was dropped.
        stats: what happened to it.
    """

    group: RequestGroup
    options: SlotOptions
    text: Text | None
    index: int = 0
    history: array[int] = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    slot: int | None = None
    admission: int = -1
    admitted_at: float = 0.0
    arrival: int = -1
    room: int = 0
    num_prefilled: int = 0
    prefill_end: int = 0
    num_replayed: int = 0
    prefix_keys: list[bytes] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    failure: Exception | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    # After each step output: the group's number of it, tokens and characters so far, and the end.
    _marks: list[tuple[int, int, int, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = array("i", self.group.prompt_token_ids)

    @property
    def continuations(self) -> list[Request]:
        """All continuations of the prompt by index, this one included."""
        return self.group.requests or [self]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.group.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.group.params

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.group.stop_ids

    @property
    def limit(self) -> int:
        return self.group.limit

    @property
    def outbox(self) -> Outbox:
        """Step outputs of all continuations that were not fetched yet, oldest first."""
        return Outbox(self, self.group.posted)

    @property
    def token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.history[len(self.group.prompt_token_ids) :].tolist()

    @property
    def num_generated(self) -> int:
        return len(self.history) - len(self.group.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.history)

    @property
    def num_to_prefill(self) -> int:
        """Tokens that the prefill of a request that waits runs over."""
        return len(self.history) - self.num_replayed

    @property
    def max_tokens_in_logs(self) -> int:
        """Rows that the request's logs can ever hold."""
        return len(self.group.prompt_token_ids) + self.group.limit

    @property
    def error(self) -> str | None:
        """Why the request failed, if it did."""
        if self.finish_reason != "error":
            return None
        return (
            f"nothing can be chosen as new token {self.num_generated + 1}: the model's logits hold "
            f"NaN or infinity (its weights are damaged, or their dtype overflows), or every token "
            f"is forbidden there"
        )

    def take(
        self, tokens: Sequence[int], reports: Sequence[TokenLogprobs | None] | None = None
    ) -> int:
        """Take in tokens up to the first one that ends the request; none once it has ended.

        Args:
            tokens: what the sampler chose; NO_TOKEN ends the request with an error.
            reports: their log-probabilities, where the parameters ask for them.

        Returns:
            How many were taken.
        """
        if reports is None and self._goes_on(tokens):
            self.history.extend(tokens)
            if self.text is not None:
                self.text.extend(tokens)
            return len(tokens)
        for taken, token in enumerate(tokens):
            if self.finish_reason is not None:
                return taken
            if token == NO_TOKEN:
                self._finish("error")
                return taken
            self._add(token, None if reports is None else reports[taken])
        return len(tokens)

    def post(
        self,
        count: int,
        num_accepted: int,
        drafted: Sequence[int],
        history_len: int,
        is_fold: bool,
        expected_tokens: float | None = None,
    ) -> None:
        """Put what a step added into the outbox.

        Args:
            count: tokens that the step added.
            num_accepted: drafts that were right.
            drafted, history_len, is_fold, expected_tokens: as in StepOutput.
        """
        group, text = self.group, self.text
        group.num_posted += 1
        added = "" if text is None else text.take()
        num_chars = 0 if text is None else text.num_chars
        total = len(self.history) - len(group.prompt_token_ids)
        self._marks.append((group.num_posted, total, num_chars, self.finish_reason))
        group.posted.append(
            (
                group.num_posted,
                self.index,
                len(self.stats.committed_per_step),
                total - count,
                count,
                num_accepted,
                tuple(drafted),
                added,
                history_len,
                is_fold,
                expected_tokens,
                self.finish_reason,
                self.stop_reason,
            )
        )

    def output(self, at: int | None = None) -> RequestOutput:
        """Return the prompt with all its continuations.

        Args:
            at: as they were after the step output of this number in the group; None is now.
        """
        group, together = self.group, self.continuations
        outputs = [one._completion(at) for one in together]
        logprobs = group.prompt_logprobs
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            prompt_logprobs=None if logprobs is None else list(logprobs),
            outputs=outputs,
            finished=all(one.finish_reason is not None for one in outputs),
            stats=self.stats if len(together) == 1 else join_stats([one.stats for one in together]),
        )

    def _completion(self, at: int | None) -> CompletionOutput:
        num_chars = 0 if self.text is None else self.text.num_chars
        count, reason = self.num_generated, self.finish_reason
        if at is not None:
            seen = bisect_right(self._marks, at, key=itemgetter(0))
            _, count, num_chars, reason = self._marks[seen - 1] if seen else (0, 0, 0, None)
        logprobs = self.logprobs[:count] if self.params.logprobs is not None else None
        token_ids, total = self.token_ids[:count], None
        if logprobs is not None:
            pairs = zip(token_ids, logprobs, strict=True)
            total = sum(report[token].logprob for token, report in pairs)
        return CompletionOutput(
            index=self.index,
            token_ids=token_ids,
            text="" if self.text is None else self.text.first(num_chars),
            finish_reason=reason,
            stop_reason=self.stop_reason if reason == "stop" else None,
            error=self.error if reason == "error" else None,
            logprobs=logprobs,
            cumulative_logprob=total,
        )

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether it is plain that none of these tokens ends the request."""
        group, text = self.group, self.text
        return (
            self.finish_reason is None
            and (text is None or not text.has_stops)
            and group.stop_ids.isdisjoint(tokens)
            and NO_TOKEN not in tokens
            and len(self.history) + len(tokens) < len(group.prompt_token_ids) + group.limit
        )

    def _add(self, token: int, report: TokenLogprobs | None) -> None:
        group, text = self.group, self.text
        self.history.append(token)
        if report is not None:
            self.logprobs.append(group.named(report))
        count = len(self.history) - len(group.prompt_token_ids)
        if token in group.stop_ids:
            if text is not None and group.params.include_stop_str_in_output:
                text.push(token, may_stop=False)
            self.stop_reason = group.stop_reason(token)
            self._finish("stop")
        elif text is not None and (
            stop := text.push(token, may_stop=count >= group.params.min_tokens)
        ):
            self.finish_reason, self.stop_reason = "stop", stop
        elif count >= group.limit:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        """End; what was pending of the text can still complete a stop string."""
        may_stop = self.num_generated >= self.params.min_tokens
        stop = None if self.text is None else self.text.finish(may_stop=may_stop)
        if stop:
            self.stop_reason = stop
        self.finish_reason = "stop" if stop else reason
