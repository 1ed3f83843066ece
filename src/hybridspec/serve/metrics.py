"""Metrics for Prometheus, under vLLM's names and, the same, under our own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridspec.engine import Counters, StepOutput
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
    """Counts what steps bring to streams; the rest is read from the engine.

    Args:
        model: name of the model, a label of every value.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, what, tuple(labels), buckets=buckets, registry=self._registry)
            return made.labels(**labels)

        def times(name: str, what: str) -> Histogram:
            return histogram(name, what, _SECONDS)

        self._labels = labels
        self.success = Counter(
            "request_success", "Continuations that ended.", (*labels, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self.committed = histogram(
            "committed_tokens_per_step", "Tokens committed by a verify step.", range(9)
        )
        self.first_token = times(
            "time_to_first_token_seconds", "From the request to its first token."
        )
        self.between = times("inter_token_latency_seconds", "Between outputs of a continuation.")
        self.whole = times("e2e_request_latency_seconds", "From the request to its end.")
        self.queue = times("request_queue_time_seconds", "Waiting for room.")
        self.prefill = times("request_prefill_time_seconds", "From admission to the first token.")
        self.decode = times("request_decode_time_seconds", "From the first token to the last.")
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.length = histogram("request_generation_tokens", "Tokens of a continuation.", _TOKENS)

    def on_steps(self, stream: Stream, steps: Sequence[tuple[int, StepOutput]]) -> None:
        """Count what one engine step brought to one stream; in the thread that steps."""
        now = time.perf_counter()
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
                self.committed.observe(len(step.token_ids))
            if step.finished:
                self.success.labels(**self._labels, finished_reason=step.finish_reason).inc()
                self.whole.observe(now - stream.submitted_at)
                self.decode.observe(now - stream.first_at[key])
                self.length.observe(request.num_generated)

    def _begin(self, stream: Stream, request: Request, now: float) -> None:
        self.first_token.observe(now - stream.submitted_at)
        self.queue.observe(max(request.admitted_at - stream.submitted_at, 0.0))
        self.prefill.observe(now - request.admitted_at)
        self.prompt_length.observe(len(request.prompt_token_ids))

    def render(self, counters: Counters) -> bytes:
        """Return everything in Prometheus' text form, with what the engine holds and has done."""
        twice = CollectorRegistry()
        engine = _engine_metrics(counters, self._labels)
        twice.register(_Renamed(lambda: [*engine, *self._registry.collect()]))
        return generate_latest(twice)


def _engine_metrics(counters: Counters, labels: Mapping[str, str]) -> list[Metric]:
    """Name what the engine counts."""
    accepted = counters.accepted_by_position
    gauges: dict[str, tuple[str, float]] = {
        "num_requests_running": (
            "Continuations that were admitted.", counters.num_prefilling + counters.num_running,
        ),
        "num_requests_waiting": ("Continuations that wait for room.", counters.num_waiting),
        "kv_cache_usage_perc": (
            "Share of the pages of keys and values in use, 0 to 1.",
            counters.pages_used / max(counters.num_pages, 1),
        ),
        "slots_used": ("Slots of the state pool in use.", counters.slots_used),
        "slots": ("Slots of the state pool.", counters.num_slots),
    }  # fmt: skip
    totals: dict[str, tuple[str, float]] = {
        "prompt_tokens": ("Prompt tokens processed.", counters.prompt_tokens),
        "generation_tokens": ("Tokens generated.", counters.generated_tokens),
        "num_preemptions": ("Requests set back for want of pages.", counters.num_preemptions),
        "prefix_cache_queries": ("Prompt tokens looked up for reuse.", counters.prefix_queries),
        "prefix_cache_hits": ("Prompt tokens that were reused.", counters.prefix_hits),
        "spec_decode_num_drafts": ("Verify steps that had drafts.", counters.draft_steps),
        "spec_decode_num_draft_tokens": ("Drafts verified.", sum(counters.drafted_by_position)),
        "spec_decode_num_accepted_tokens": ("Drafts accepted.", sum(accepted)),
        "folds": ("Verify steps that folded the ring into the checkpoint.", counters.folds),
    }
    names = (*labels, "position")
    at = CounterMetricFamily(
        "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted by position.", labels=names
    )
    for position, count in enumerate(accepted):
        at.add_metric([*labels.values(), str(position)], count)
    found: list[Metric] = [at]
    for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, totals)):
        for name, (what, value) in values.items():
            family = kind(name, what, labels=tuple(labels))
            family.add_metric(list(labels.values()), value)
            found.append(family)
    return found


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
