"""One request from its prompt to its last token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridspec.config import SamplingParams
from hybridspec.engine.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestStats,
    StepOutput,
    join_stats,
)
from hybridspec.errors import CapacityError
from hybridspec.models.tokenizer import Detokenizer
from hybridspec.speculate import NO_TOKEN, ChoiceRule, Draft, Logprob, TokenLogprobs

__all__ = ["Request"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One continuation of a prompt: its tokens, its text and where it stands.

    Attributes:
        request_id: number that all continuations of the prompt share, unique in its engine.
        prompt: the prompt's text if it was given as text.
        prompt_token_ids: its tokens.
        params: sampling parameters.
        rule: the same as the sampler wants them, the seed drawn.
        stop_ids: tokens that end the request.
        limit: most tokens to generate.
        detokenizer: turns tokens into text; None without a tokenizer.
        index: number of the continuation, from 0.
        group: all continuations of the prompt by index, this one included; empty if there is only
            this one (a reference to itself would keep it until a garbage collection).
        token_ids: tokens generated so far.
        history: the prompt and these, in one array.
        logprobs: a report for each of them if the parameters ask for it, else empty.
        prompt_logprobs: a report for each prompt row so far, None for the first; None if not asked
            for, or if another continuation of the group has it.
        draft: what is proposed for the next step.
        slot: index in the pools while running, else None.
        num_prefilled: prompt rows already processed.
        failure: why the request was dropped without having run, if it was.
        outbox: step outputs that were not fetched yet, of all continuations of the prompt in one
            list, oldest first.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    rule: ChoiceRule
    stop_ids: frozenset[int]
    limit: int
    detokenizer: Detokenizer | None
    index: int = 0
    group: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    history: array[int] = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    draft: Draft = Draft([], [])
    slot: int | None = None
    num_prefilled: int = 0
    outbox: list[StepOutput] = field(default_factory=list)
    admitted_at: float = 0.0
    finish_reason: str | None = None
    failure: CapacityError | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    _text: str = ""
    _num_emitted: int = 0
    _cumulative_logprob: float = 0.0

    def __post_init__(self) -> None:
        self.history = array("i", self.prompt_token_ids)

    @property
    def continuations(self) -> list[Request]:
        """All continuations of the prompt by index, this one included."""
        return self.group or [self]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def max_tokens_in_logs(self) -> int:
        """Rows that the request's logs can ever hold."""
        return len(self.prompt_token_ids) + self.limit

    @property
    def max_useful_drafts(self) -> int:
        """Drafts that the request wants and can still commit in one step."""
        room = max(self.limit - len(self.token_ids) - 1, 0)
        wanted = self.params.draft_tokens
        return room if wanted is None else min(room, wanted)

    @property
    def newest_token(self) -> int:
        return self.token_ids[-1]

    @property
    def error(self) -> str | None:
        """Why the request failed, if it did."""
        if self.finish_reason != "error":
            return None
        return (
            f"the model's logits for new token {len(self.token_ids) + 1} hold NaN, so none can be "
            f"chosen: its weights are damaged, or their dtype overflows"
        )

    def extend(
        self, tokens: Sequence[int], reports: Sequence[TokenLogprobs | None] | None = None
    ) -> int:
        """Take in tokens up to the first one that ends the request.

        Args:
            tokens: what the sampler chose; NO_TOKEN ends the request with an error.
            reports: their log-probabilities, where the parameters ask for them.

        Returns:
            How many were taken.
        """
        edits = self.rule.edits
        for taken, token in enumerate(tokens, start=1):
            if token == NO_TOKEN:
                self._finish("error")
                return taken - 1
            self.token_ids.append(token)
            self.history.append(token)
            if edits is not None:
                edits.extend([token])
            if reports is not None and (report := reports[taken - 1]) is not None:
                self.logprobs.append(report)
                self._cumulative_logprob += report[token].logprob
            if token in self.stop_ids:
                self._finish("stop")
            elif self._add_text(token):
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.limit:
                self._finish("length")
            if self.finish_reason is not None:
                return taken
        return len(tokens)

    def take_text(self) -> str:
        """Text that was not handed out yet and that no stop string can take back."""
        end = len(self._text) - self._held_back()
        text = self._text[self._num_emitted : end]
        self._num_emitted = max(end, self._num_emitted)
        return text

    def output(self) -> RequestOutput:
        """The prompt with all its continuations so far."""
        together = self.continuations
        logprobs = together[0].prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if logprobs is None else list(logprobs),
            outputs=[one._completion() for one in together],
            finished=all(one.finish_reason is not None for one in together),
            stats=join_stats([one.stats for one in together]) if self.group else self.stats,
        )

    def logprobs_of_last(self, count: int) -> list[dict[int, Logprob]] | None:
        """Reports of the last `count` tokens, None if the parameters ask for none."""
        if self.params.logprobs is None:
            return None
        return self.logprobs[len(self.logprobs) - count :]

    def _completion(self) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            token_ids=list(self.token_ids),
            text=self._text[: len(self._text) - self._held_back()],
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=list(self.logprobs) if has_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
        )

    def _finish(self, reason: str) -> None:
        self.finish_reason = "stop" if self._add_text(None) else reason

    def _add_text(self, token: int | None) -> bool:
        """Add a token's text, or what is pending at the end, and cut it before a stop string.

        Only a stop string that ends inside the added text counts, so that the outcome does not
        depend on how many tokens a step brings.
        """
        if self.detokenizer is None:
            return False
        before = len(self._text)
        self._text += self.detokenizer.finish() if token is None else self.detokenizer.push([token])
        if len(self.token_ids) < self.params.min_tokens:
            return False
        found = [self._text.find(s, max(before - len(s) + 1, 0)) for s in self.params.stop]
        found = [start for start in found if start >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _held_back(self) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        if self.finish_reason is not None:
            return 0
        longest = 0
        for stop in self.params.stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
