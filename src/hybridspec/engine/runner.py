"""Runs the model over a batch of requests, and hands each request its results."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridspec.engine.counters import Counters
from hybridspec.engine.graphs import StepGraphs
from hybridspec.engine.launch import Launch
from hybridspec.engine.prompt_graphs import PromptGraphs
from hybridspec.engine.request import Request
from hybridspec.engine.sizing import tell_calibration
from hybridspec.ops.accept import RequestTable, Taken
from hybridspec.ops.sampling import NO_TOKEN
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import Allocator, to_device, upload_parts
from hybridspec.speculate import (
    Asks,
    Decoder,
    Outcome,
    Policy,
    StepPlan,
    StepSeen,
    TokenLogprobs,
    decode_step,
    prefill_step,
    report_logprobs,
)

__all__ = ["Runner"]

_ROWS_WITH_LOGITS = 64  # prompt rows whose logits are held at a time
_MOST_STEPS = 256  # sizes of plans that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The requests of a decode step, and what follows from their admissions.

    Attributes:
        admissions: of each request; they tell one batch from another.
        requests, slots: the requests and where they are.
        asks: what they need together.
    """

    admissions: list[int]
    requests: list[Request]
    slots: list[int]
    asks: Asks


class Runner:
    """One model over one set of pools.

    Attributes:
        decoder: model and memories.
        allocator: says which pages requests have.
        policy: sizes the steps.
        graphs: captured steps; None runs every step operator by operator.
        prompts: captured forwards of prompt rows; None runs them operator by operator.
        has_confidences: whether rows or sizes are chosen by the drafter's confidences.
        launched: steps whose outcome was not read yet, oldest first.
        turn: number of the engine's present step, which can launch first tokens and a decode step.
        counters: told of every forward and of what it brought.
    """

    def __init__(
        self,
        decoder: Decoder,
        allocator: Allocator,
        policy: Policy,
        *,
        graphs: StepGraphs | None = None,
        prompts: PromptGraphs | None = None,
        has_confidences: bool = False,
    ) -> None:
        self.decoder = decoder
        self.allocator = allocator
        self.policy = policy
        self.has_confidences = has_confidences
        self.graphs = graphs
        self.prompts = prompts
        self.launched: deque[Launch] = deque()
        self.turn = 0
        self._read_at = 0.0  # when an outcome was read last
        self.counters = Counters.create(decoder.requests.most_drafts)
        self._steps: dict[tuple[int, int], Step] = {}
        self._lanes: tuple[list[int], Tensor] = ([], torch.empty(0))
        self._last: _Batch | None = None

    def admit(self, request: Request) -> bool:
        """Write a request's options into its slot; `write` brings the rest.

        Returns:
            False if the space for them is taken, so that it has to wait.
        """
        slot = request.slot
        assert slot is not None
        self.fit_tables()
        return self.decoder.sampling.write(
            slot,
            request.options,
            prompt=request.prompt_token_ids,
            output=request.token_ids[request.num_replayed :],
        )

    def write(self, admitted: Sequence[Request]) -> None:
        """Write limits and tokens of requests into their slots and pages.

        Nothing is waited for, and all requests share the copy and the launches.
        """
        table, pools = self.decoder.requests, self.decoder.pools
        most, size = table.most_drafts, pools.page_size
        slots, limits, ends, places, tokens = (array("i") for _ in range(5))
        for request in admitted:
            history, wish = request.history, request.params.draft_tokens
            first, end = request.num_prefilled // size, -(-len(history) // size)
            assert request.slot is not None
            slots.append(request.slot)
            limits.append(most if wish is None else min(wish, most))
            ends.append(request.max_tokens_in_logs - 1)
            places.extend(self.allocator.pages_of(request.slot)[first:end])
            tokens.extend(history[first * size :])
            tokens.extend([0] * (end * size - len(history)))
        numbers, draft_limit, last_position, at, ids = upload_parts(
            [slots, limits, ends, places, tokens], pools.device
        )
        rows = numbers.long()
        table.draft_limit.index_copy_(0, rows, draft_limit)
        table.last_position.index_copy_(0, rows, last_position)
        table.num_drafts.index_fill_(0, rows, 0)
        table.is_done.index_fill_(0, rows, 0)
        pools.token_pages.index_copy_(0, at.long(), ids.view(-1, size))

    def fit_tables(self) -> None:
        """Give the tables as many slots as the pools have, which grow and shrink on a CPU."""
        decoder, num_slots = self.decoder, self.decoder.pools.num_slots
        if decoder.requests.num_slots != num_slots:
            decoder.sampling.resize(num_slots)
            # Last, so that both are tried again where one does not fit the memory.
            decoder.requests = decoder.requests.resized(num_slots)

    def release(self, slot: int) -> None:
        """Give back the space that `admit` took."""
        self._last = None  # it holds on to its requests
        self.decoder.sampling.release(slot)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Process the next prompt rows of some requests; those at their end get a first token."""
        started = time.perf_counter()
        requests = [request for request, _ in chunks]
        lengths = [rows for _, rows in chunks]
        self.counters.num_prefills += 1
        self.counters.prompt_rows += sum(lengths)
        spans = [
            request.history[request.num_prefilled : request.num_prefilled + rows + 1]
            for request, rows in chunks
        ]
        complete = []
        for b, (request, rows) in enumerate(chunks):
            request.num_prefilled += rows
            if request.num_prefilled == request.prefill_end:
                complete.append(b)
        fed = [t for span, rows in zip(spans, lengths, strict=True) for t in span[:rows]]
        step = Step.of_rows(
            [slot for request in requests if (slot := request.slot) is not None],
            lengths,
            [request.num_prefilled - rows for request, rows in chunks],
            self._upload(fed, torch.int64),
            is_prefill=True,
        )
        following = [
            t for span, rows in zip(spans, lengths, strict=True) for t in _next(span, rows)
        ]
        hidden, outcome = prefill_step(
            self.decoder,
            step,
            self._upload(following, torch.int64),
            self._upload(complete, torch.int64),
            self._asks([requests[b] for b in complete]),
            self.policy.drafts,
            hidden=None if self.prompts is None else self.prompts.forward(step),
        )
        self._report_prompts(requests, hidden, lengths)
        if outcome is not None:
            firsts = [requests[b] for b in complete]
            self.launched.append(Launch.of(firsts, outcome, started, turn=self.turn))

    def _report_prompts(
        self, requests: Sequence[Request], hidden: Tensor, lengths: Sequence[int]
    ) -> None:
        """Add log-probabilities of prompt tokens: row i says how likely token i+1 was.

        A request that begins anew has some already.
        """
        start = 0
        for request, rows in zip(requests, lengths, strict=True):
            group, count = request.group, request.params.prompt_logprobs
            if count is not None and request.index == 0:
                assert group.prompt_logprobs is not None
                shift = start - (request.num_prefilled - rows)  # from a position to its row
                end = min(request.num_prefilled + 1, len(group.prompt_token_ids))
                for first in range(len(group.prompt_logprobs), end, _ROWS_WITH_LOGITS):
                    tokens = group.prompt_token_ids[first : min(first + _ROWS_WITH_LOGITS, end)]
                    some = hidden[shift + first - 1 : shift + first - 1 + len(tokens)]
                    logits = self.decoder.logits(some)
                    group.add_prompt_reports(report_logprobs(logits, tokens, [count] * len(tokens)))
            start += rows

    def decode(self, requests: Sequence[Request]) -> None:
        """Launch a step that verifies every request's drafts, commits what is right, drafts anew.

        It is not waited for: `collect` tells the requests what it brought.
        """
        started = time.perf_counter()
        self.counters.num_steps += 1
        batch = self._batch(requests)
        plan, outcome = self.policy.choose(len(batch.slots)), None
        begun = _clock(self.decoder.pools.device)
        if self.graphs is not None:
            outcome = self.graphs.run(batch.slots, batch.asks, plan)
        if outcome is None:
            plan, outcome = self._run(batch.slots, batch.asks, plan)
        self.launched.append(
            Launch.of(batch.requests, outcome, started, turn=self.turn, plan=plan, begun=begun)
        )

    def _batch(self, requests: Sequence[Request]) -> _Batch:
        """Describe a batch; most are the same as the one before."""
        admissions = [request.admission for request in requests]
        if self._last is None or self._last.admissions != admissions:
            self._last = _Batch(
                admissions=admissions,
                requests=list(requests),
                slots=[slot for request in requests if (slot := request.slot) is not None],
                asks=self._asks(requests),
            )
        return self._last

    def _run(self, slots: list[int], asks: Asks, plan: StepPlan) -> tuple[StepPlan, Outcome]:
        """Run a step operator by operator; the plan says how many rows it really had."""
        decoder, count = self.decoder, len(slots)
        if slots != self._lanes[0]:
            self._lanes = (slots, self.allocator.upload(slots))
        elif self.allocator.has_grown:
            self.allocator.upload(())
        lanes = self._lanes[1]
        num_rows = min(plan.rows, count * (decoder.requests.most_drafts + 1))
        if not lanes.is_cuda:  # a device keeps its shapes; here dead rows cost time
            num_rows = min(num_rows, count + int(decoder.requests.num_drafts[lanes].sum()))
        step = self._step(count, num_rows)
        outcome = decode_step(
            decoder, lanes, step, num_rows=num_rows, num_drafts=plan.drafts, asks=asks
        )
        return replace(plan, rows=num_rows, is_captured=False), outcome

    def collect(self, turns_kept: int) -> None:
        """Tell requests what their steps brought.

        Those of so many last turns stay unread, but first tokens that nothing was launched before:
        nobody waits for other tokens meanwhile.
        """
        oldest = self.launched[0] if self.launched else None
        while self.launched and (
            self.launched[0].turn <= self.turn - turns_kept
            or (self.launched[0] is oldest and oldest.plan is None)
        ):
            launch = self.launched.popleft()
            seconds = launch.wait()
            now = time.perf_counter()
            # Steps overlap where the next one is launched before this one is read.
            elapsed, self._read_at = now - max(launch.started, self._read_at), now
            first = 0
            packed = launch.outcome.result.packed[: len(launch.requests)]
            committed = 0
            for request, admission, row in zip(
                launch.requests, launch.admissions, packed.tolist(), strict=True
            ):
                taken = Taken.of(row)
                if request.finish_reason is None and request.admission == admission:
                    self._tell(request, taken, launch, first, elapsed)
                first += taken.num_rows
                committed += len(taken.tokens)
            if launch.plan is not None:
                self._learn(launch.plan, launch.outcome, packed, committed, seconds)

    def _learn(
        self, plan: StepPlan, outcome: Outcome, packed: Tensor, committed: int, seconds: float
    ) -> None:
        """Let the policy know what a step brought, and the steps to come what it has learnt."""
        sure = outcome.confidences
        # What is run apart from the graphs says nothing of what they cost.
        is_typical = plan.is_captured or self.graphs is None
        seen = StepSeen(
            committed=committed,
            seconds=seconds if is_typical else None,
            outcomes=packed[:, :3],
            confidences=None if sure is None else sure[: packed.shape[0]],
        )
        self.policy.note(plan, seen)
        tell_calibration(self.policy, self.decoder.calibration)

    def _tell(
        self, request: Request, taken: Taken, launch: Launch, first: int, elapsed: float
    ) -> None:
        """Hand a request its tokens and post what the step added."""
        tokens, drafts, report = taken.tokens, taken.drafts, launch.outcome.report
        num_accepted = taken.num_accepted
        reports: list[TokenLogprobs] | None = None
        if report is not None and (count := request.params.logprobs) is not None:
            reports = report.read(tokens, [count] * len(tokens), first)
        if request.num_replayed:  # they are there already
            known = min(len(tokens), request.num_replayed)
            request.num_replayed -= known
            tokens, reports = tokens[known:], None if reports is None else reports[known:]
            drafts, num_accepted = drafts[known:], max(num_accepted - known, 0)
            if not tokens and not taken.done:
                return
        if taken.done == RequestTable.DONE_BY_NAN:
            tokens, reports = [*tokens, NO_TOKEN], None if reports is None else [*reports, {}]
        is_first = launch.plan is None and request.num_generated == 0
        num_taken = request.take(tokens, reports)
        stats, counters = request.stats, self.counters
        counters.generated_tokens += num_taken
        if is_first:
            counters.prompt_tokens += len(request.prompt_token_ids)
            stats.prefill_s = time.perf_counter() - request.admitted_at
            request.post(num_taken, 0, [], 0, False)
            return
        stats.committed_per_step.append(num_taken)
        stats.drafted_per_step.append(len(drafts))
        stats.accepted_per_step.append(num_accepted)
        stats.folds += taken.is_fold
        counters.outcomes[len(drafts)][num_accepted] += 1
        counters.folds += taken.is_fold
        stats.decode_s += elapsed
        request.post(
            num_taken,
            num_accepted,
            drafts,
            taken.history_len,
            taken.is_fold,
            None if launch.plan is None else launch.plan.expected_per_request,
        )

    def _asks(self, requests: Sequence[Request]) -> Asks:
        counts = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        slots = [request.slot for request in requests if request.slot is not None]
        is_large = any(self.decoder.sampling.needs_eager(slot) for slot in slots)
        return Asks(
            uses=self.decoder.sampling.uses(slots),
            num_logprobs=max(counts, default=None),
            has_confidences=self.has_confidences,
            overflow=self.decoder.sampling.overflow if is_large else None,
        )

    def _step(self, num_requests: int, num_rows: int) -> Step:
        """Return the tensors of a plan of this size, the same ones every time."""
        size = (num_requests, num_rows)
        if size not in self._steps:
            if len(self._steps) >= _MOST_STEPS:
                self._steps.clear()
            self._steps[size] = Step.create(
                max_requests=num_requests,
                max_rows=num_rows,
                max_drafts=self.decoder.requests.most_drafts,
                device=self.decoder.pools.device,
            )
        return self._steps[size]

    def _upload(self, values: Sequence[int | None], dtype: torch.dtype = torch.int32) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.decoder.pools.device)


def _clock(device: torch.device) -> torch.cuda.Event | float:
    """Return the time now where steps run."""
    if device.type != "cuda":
        return time.thread_time()
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    return now


def _next(span: Sequence[int], rows: int) -> Sequence[int]:
    """The token after each row; 0 after the prompt's last one, which is not known yet."""
    return span[1:] if len(span) > rows else [*span[1:], 0]
