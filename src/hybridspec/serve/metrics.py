"""Metrics for Prometheus, under vLLM's names and, the same, under our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hybridspec.engine import StepOutput
from hybridspec.engine.request import Request

if TYPE_CHECKING:
    from hybridspec.serve.stepper import Stream

__all__ = ["Metrics"]

_PREFIXES = ("vllm:", "hybridspec:")
_OWN = ("committed_tokens_per_step", "folds", "slots_used", "slots")  # vLLM has none of these
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts what steps bring.

    Args:
        model: name of the model, a label of every value.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, what: str, *more: str) -> Counter:
            names = (*labels, *more)
            made = Counter(name, what, names, registry=self._registry)
            return made if more else made.labels(**labels)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, what, tuple(labels), buckets=buckets, registry=self._registry)
            return made.labels(**labels)

        def times(name: str, what: str) -> Histogram:
            return histogram(f"{name}_seconds", what, _SECONDS)

        self._labels = labels
        self._gauges = {
            name: Gauge(name, what, tuple(labels), registry=self._registry).labels(**labels)
            for name, what in (
                ("num_requests_running", "Continuations that were admitted."),
                ("num_requests_waiting", "Continuations that wait for room."),
                ("kv_cache_usage_perc", "Share of the pages of keys and values in use, 0 to 1."),
                ("slots_used", "Slots of the state pool in use."),
                ("slots", "Slots of the state pool."),
            )
        }
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.success = counter("request_success", "Continuations that ended.", "finished_reason")
        self.preemptions = counter("num_preemptions", "Requests that were set back: none ever is.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up for reuse.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens that were reused.")
        self.num_drafts = counter("spec_decode_num_drafts", "Verify steps that had drafts.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafts verified.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted by position.", "position"
        )
        self.folds = counter("folds", "Verify steps that folded the ring into the checkpoint.")
        self.committed = histogram(
            "committed_tokens_per_step", "Tokens committed by a verify step.", range(9)
        )
        self.first_token = times("time_to_first_token", "From the request to its first token.")
        self.between = times("inter_token_latency", "Between outputs of a continuation.")
        self.whole = times("e2e_request_latency", "From the request to its end.")
        self.queue = times("request_queue_time", "Waiting for room.")
        self.prefill = times("request_prefill_time", "From admission to the first token.")
        self.decode = times("request_decode_time", "From the first token to the last.")
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.length = histogram("request_generation_tokens", "Tokens of a continuation.", _TOKENS)

    def on_steps(self, stream: Stream, steps: Sequence[tuple[int, StepOutput]]) -> None:
        """Count what one engine step brought to one stream; in the thread that steps."""
        now = time.perf_counter()
        self.generation_tokens.inc(sum(len(step.token_ids) for _, step in steps))
        for place, step in steps:
            request = stream.requests[place].continuations[step.index]
            key = (place, step.index)
            if key in stream.last_at:
                self.between.observe(now - stream.last_at[key])
            else:
                self._begin(stream, request, now)
                stream.first_at[key] = now
            stream.last_at[key] = now
            if step.step > 0:
                self._count_drafts(step)
            if step.finished:
                self.success.labels(**self._labels, finished_reason=step.finish_reason).inc()
                self.whole.observe(now - stream.submitted_at)
                self.decode.observe(now - stream.first_at[key])
                self.length.observe(request.num_generated)

    def _begin(self, stream: Stream, request: Request, now: float) -> None:
        self.first_token.observe(now - stream.submitted_at)
        self.queue.observe(max(request.admitted_at - stream.submitted_at, 0.0))
        self.prefill.observe(now - request.admitted_at)
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        self.prompt_length.observe(len(request.prompt_token_ids))

    def _count_drafts(self, step: StepOutput) -> None:
        self.committed.observe(len(step.token_ids))
        self.folds.inc(step.is_fold)
        if step.drafted:
            num_accepted = step.origins.count("accepted")
            self.num_drafts.inc()
            self.draft_tokens.inc(len(step.drafted))
            self.accepted_tokens.inc(num_accepted)
            for position in range(num_accepted):
                self.accepted_at.labels(**self._labels, position=str(position)).inc()

    def render(self, **gauges: float) -> bytes:
        """Return everything in Prometheus' text form, the gauges at these values."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        twice = CollectorRegistry()
        twice.register(_Renamed(self._registry.collect))
        return generate_latest(twice)


class _Renamed(Collector):
    """The metrics of another registry under each prefix."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            for prefix in _PREFIXES:
                if prefix == "vllm:" and metric.name in _OWN:
                    continue
                copy = Metric(prefix + metric.name, metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(name=prefix + sample.name)
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield copy
