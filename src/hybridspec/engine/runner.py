"""Runs the model over a batch of requests: prefill, then verify, commit and draft."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hybridspec.engine.request import Request
from hybridspec.models import HybridModel
from hybridspec.ops.ring import advance
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Pools
from hybridspec.speculate import (
    Drafter,
    Verified,
    choose_and_report,
    commit_rows,
    plan_drafts,
    report_logprobs,
    verify_drafts,
)

__all__ = ["Runner"]

_ROWS_WITH_LOGITS = 64  # prompt rows whose logits are held at a time


class Runner:
    """One model over one set of pools.

    Attributes:
        model: the target model.
        pools: the memories of all requests.
        drafter: proposes tokens; None decodes without drafts.
        draft_tokens: most drafts per request and step.
        verify_rows: most rows of a verify step over all requests; None verifies every draft.
    """

    def __init__(
        self,
        model: HybridModel,
        pools: Pools,
        drafter: Drafter | None,
        *,
        draft_tokens: int,
        verify_rows: int | None,
    ) -> None:
        self.model = model
        self.pools = pools
        self.drafter = drafter
        self.draft_tokens = draft_tokens
        self.verify_rows = verify_rows

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Process the next prompt rows of some requests; those at their end get a first token."""
        pools = self.pools
        requests = [request for request, _ in chunks]
        lengths = [rows for _, rows in chunks]
        starts = [request.num_prefilled for request in requests]
        slots = _slots(requests)
        spans = [
            request.prompt_token_ids[start : start + rows + 1]
            for (request, rows), start in zip(chunks, starts, strict=True)
        ]
        fed = [t for span, rows in zip(spans, lengths, strict=True) for t in span[:rows]]
        token_ids = torch.tensor(fed, device=pools.device)
        step = Step.of_rows(slots, lengths, starts, token_ids, is_prefill=True)
        hidden = self.model.forward(step, pools.memories)

        self._report_prompts(requests, hidden, spans, lengths)
        last_rows = (step.cu_seqlens[1:] - 1).to(torch.int64)
        complete = [
            b for b, r in enumerate(requests) if starts[b] + lengths[b] == len(r.prompt_token_ids)
        ]
        if complete:
            chosen, reports = choose_and_report(
                self.model.logits(hidden[last_rows[complete]]),
                [requests[b].rule for b in complete],
                [len(requests[b].prompt_token_ids) for b in complete],
                [()] * len(complete),
            )
            for b, token, report in zip(complete, chosen, reports, strict=True):
                spans[b].append(max(token, 0))  # the drafter reads on also where the request failed
                requests[b].take([token], [report])
        if self.drafter is not None:  # pairs each row with the token after it
            following = [t for span in spans for t in span[1:]]
            head_hidden = self.drafter.absorb(
                torch.tensor(following, device=pools.device), hidden, step
            )
        num_rows = torch.tensor(lengths, dtype=torch.int32, device=pools.device)
        advance(pools.seq_len, step.slots, num_rows)
        for request, rows in chunks:
            request.num_prefilled += rows
        unfinished = [b for b in complete if requests[b].finish_reason is None]
        if self.drafter is not None and unfinished:
            self._draft([requests[b] for b in unfinished], head_hidden[last_rows[unfinished]])
        now = time.perf_counter()
        for b in complete:
            requests[b].stats.prefill_s = now - requests[b].admitted_at
            requests[b].post(["prefill"][: requests[b].num_generated], [], 0, False)

    def _report_prompts(
        self,
        requests: Sequence[Request],
        hidden: torch.Tensor,
        spans: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        """Add log-probabilities of prompt tokens: row i of a span says how likely token i+1 was."""
        start = 0
        for request, span, rows in zip(requests, spans, lengths, strict=True):
            count = request.params.prompt_logprobs
            if count is not None and request.index == 0:
                for first in range(0, len(span) - 1, _ROWS_WITH_LOGITS):
                    tokens = span[first + 1 : first + 1 + _ROWS_WITH_LOGITS]
                    some = hidden[start + first : start + first + len(tokens)]
                    reports = report_logprobs(
                        self.model.logits(some), tokens, [count] * len(tokens)
                    )
                    request.group.add_prompt_reports(reports)
            start += rows

    def decode(self, requests: Sequence[Request]) -> None:
        """Verify every request's drafts, commit what is right, and draft anew."""
        started = time.perf_counter()
        drafted = self._planned(requests)
        verified = verify_drafts(
            self.model,
            self.pools,
            _slots(requests),
            [[r.newest_token, *tokens] for r, tokens in zip(requests, drafted, strict=True)],
            [request.num_tokens - 1 for request in requests],
            [request.rule for request in requests],
        )
        taken = [
            request.take(tokens, reports)
            for request, tokens, reports in zip(
                requests, verified.tokens, verified.logprobs, strict=True
            )
        ]
        self._commit_and_draft(requests, verified, taken)
        elapsed = time.perf_counter() - started
        for b, request in enumerate(requests):
            num_accepted = len(verified.tokens[b]) - 1
            stats = request.stats
            stats.committed_per_step.append(taken[b])
            stats.drafted_per_step.append(len(drafted[b]))
            stats.accepted_per_step.append(num_accepted)
            stats.folds += verified.is_fold[b]
            stats.decode_s += elapsed
            last = "bonus" if num_accepted == len(drafted[b]) else "recovered"
            origins = (["accepted"] * num_accepted + [last])[: taken[b]]
            request.post(origins, drafted[b], verified.history_len[b], verified.is_fold[b])

    def _planned(self, requests: Sequence[Request]) -> list[list[int]]:
        """The drafts of each request that this step verifies."""
        tokens = [request.draft.tokens for request in requests]
        if self.verify_rows is None or len(tokens) + sum(map(len, tokens)) <= self.verify_rows:
            return tokens
        drafts = [request.draft for request in requests]
        counts = plan_drafts(drafts, self.verify_rows, self.pools.device)
        return [mine[:count] for mine, count in zip(tokens, counts, strict=True)]

    def _commit_and_draft(
        self, requests: Sequence[Request], verified: Verified, taken: Sequence[int]
    ) -> None:
        pools = self.pools
        # Finished requests are dropped from drafting: their slot is given back after this step.
        alive = [b for b, request in enumerate(requests) if request.finish_reason is None]
        head_hidden = None
        if self.drafter is not None and alive:
            offsets = verified.step.cu_seqlens.tolist()
            rows = [r for b in alive for r in range(offsets[b], offsets[b] + taken[b])]
            hidden = verified.hidden
            if len(rows) < hidden.shape[0]:
                hidden = hidden[torch.tensor(rows, device=pools.device)]
            lengths = [taken[b] for b in alive]
            following = [t for b in alive for t in verified.tokens[b][: taken[b]]]
            next_tokens = torch.tensor(following, device=pools.device)
            step = Step.of_rows(
                _slots([requests[b] for b in alive]),
                lengths,
                [requests[b].num_tokens - 1 - taken[b] for b in alive],
                next_tokens,
                is_prefill=False,
            )
            # Before the commit: the cursor stands where these rows begin.
            head_hidden = self.drafter.absorb(next_tokens, hidden, step)
            head_hidden = head_hidden[(step.cu_seqlens[1:] - 1).to(torch.int64)]
        commit_rows(pools, verified, taken)
        if head_hidden is not None:
            self._draft([requests[b] for b in alive], head_hidden)

    def _draft(self, requests: Sequence[Request], head_hidden: torch.Tensor) -> None:
        assert self.drafter is not None
        drafts = self.drafter.propose(
            head_hidden,
            _slots(requests),
            [request.num_tokens - 1 for request in requests],
            [min(self.draft_tokens, request.max_useful_drafts) for request in requests],
            [request.rule for request in requests],
            [request.history for request in requests],
            has_confidences=self.verify_rows is not None,
        )
        for request, draft in zip(requests, drafts, strict=True):
            request.draft = draft


def _slots(requests: Sequence[Request]) -> list[int]:
    slots = [request.slot for request in requests]
    assert None not in slots
    return slots  # type: ignore[return-value]
