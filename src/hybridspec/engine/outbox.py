"""Step outputs on their way to the caller.

A step posts for every running request, and callers may fetch late or never. What is kept meanwhile
is a tuple of plain values, which the garbage collector need not follow: with hundreds of requests
the objects themselves would make it go through the whole process every few dozen steps.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridspec.engine.outputs import StepOutput

if TYPE_CHECKING:
    from hybridspec.engine.request import Request

__all__ = ["Outbox", "Posted"]

# Number in its group, index of the continuation, step, tokens before it, tokens added, drafts
# accepted, drafts, text added, history_len, is_fold, expected tokens, finish_reason, stop_reason. A
# plain tuple: the collector follows named ones for ever.
Posted = tuple[
    int, int, int, int, int, int, tuple[int, ...], str, int, bool, float | None, str | None,
    int | str | None,
]  # fmt: skip


class Outbox:
    """A queue of step outputs, each made when it is looked at.

    Args:
        request: a continuation of the prompt.
        posted: what the steps added to all of them, oldest first.
    """

    def __init__(self, request: Request, posted: deque[Posted]) -> None:
        self._request = request
        self._posted = posted

    def __len__(self) -> int:
        return len(self._posted)

    def __iter__(self) -> Iterator[StepOutput]:
        return map(self._output, self._posted)

    def __getitem__(self, place: int) -> StepOutput:
        return self._output(self._posted[place])

    def popleft(self) -> StepOutput:
        """Take the oldest one out."""
        return self._output(self._posted.popleft())

    def clear(self) -> None:
        """Drop all that are there."""
        self._posted.clear()

    def _output(self, posted: Posted) -> StepOutput:
        (
            number, index, step, first, count, num_accepted, drafted, text, history_len, is_fold,
            expected_tokens, finish_reason, stop_reason,
        ) = posted  # fmt: skip
        request = self._request.continuations[index]
        begin = len(request.prompt_token_ids) + first
        has_logprobs = request.params.logprobs is not None
        return StepOutput(
            step=step,
            token_ids=request.history[begin : begin + count].tolist(),
            origins=_origins(step, count, num_accepted, len(drafted)),
            drafted=list(drafted),
            text=text,
            history_len=history_len,
            is_fold=is_fold,
            expected_tokens=expected_tokens,
            finished=finish_reason is not None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            index=index,
            logprobs=request.logprobs[first : first + count] if has_logprobs else None,
            make_output=functools.partial(request.output, number),
        )


def _origins(step: int, count: int, num_accepted: int, num_drafts: int) -> list[str]:
    """Return where each token that a step added came from."""
    if step == 0:
        return ["prefill"] * count
    last = "bonus" if num_accepted == num_drafts else "recovered"
    return (["accepted"] * num_accepted + [last])[:count]
