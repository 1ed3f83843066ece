"""Metrics for Prometheus, under vLLM's names and, the same, under our own."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hybridspec.engine import Counters, StepOutput
from hybridspec.engine.request import Request

if TYPE_CHECKING:
    from hybridspec.serve.stepper import Stream

__all__ = ["Metrics", "render"]

_PREFIXES = ("vllm:", "hybridspec:")
_OWN = ("committed_tokens_per_step", "folds", "slots_used", "slots")  # vLLM has none of these
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _Histogram:
    """Counts values by bucket.

    A step observes a few for every stream, in one thread; prometheus_client's own histogram takes
    locks for each, which was a fifth of what serving cost.
    """

    def __init__(self, what: str, bounds: Sequence[float]) -> None:
        self._what = what
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, labels: Mapping[str, str]) -> Metric:
        upper = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(upper, itertools.accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(name, self._what, labels=tuple(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics:
    """Counts what steps bring to streams; the rest is read from the engine.

    Args:
        labels: of every value, such as the model's name.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._success: dict[str, int] = {}
        self.committed = _Histogram("Tokens committed by a verify step.", range(9))
        self.first_token = _Histogram("From the request to its first token.", _SECONDS)
        self.between = _Histogram("Between outputs of a continuation.", _SECONDS)
        self.whole = _Histogram("From the request to its end.", _SECONDS)
        self.queue = _Histogram("Waiting for room.", _SECONDS)
        self.prefill = _Histogram("From admission to the first token.", _SECONDS)
        self.decode = _Histogram("From the first token to the last.", _SECONDS)
        self.prompt_length = _Histogram("Prompt tokens of a request.", _TOKENS)
        self.length = _Histogram("Tokens of a continuation.", _TOKENS)

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
                reason = step.finish_reason or ""
                self._success[reason] = self._success.get(reason, 0) + 1
                self.whole.observe(now - stream.submitted_at)
                self.decode.observe(now - stream.first_at[key])
                self.length.observe(request.num_generated)

    def _begin(self, stream: Stream, request: Request, now: float) -> None:
        self.first_token.observe(now - stream.submitted_at)
        self.queue.observe(max(request.admitted_at - stream.submitted_at, 0.0))
        self.prefill.observe(now - request.admitted_at)
        self.prompt_length.observe(len(request.prompt_token_ids))

    def collect(self, counters: Counters) -> list[Metric]:
        """Return everything, with what the engine holds and has done, under each prefix."""
        success = CounterMetricFamily(
            "request_success", "Continuations that ended.",
            labels=(*self._labels, "finished_reason"),
        )  # fmt: skip
        for reason, count in list(self._success.items()):
            success.add_metric([*self._labels.values(), reason], count)
        histograms = {
            "committed_tokens_per_step": self.committed,
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.between,
            "e2e_request_latency_seconds": self.whole,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "request_decode_time_seconds": self.decode,
            "request_prompt_tokens": self.prompt_length,
            "request_generation_tokens": self.length,
        }
        families = [one.family(name, self._labels) for name, one in histograms.items()]
        every = [*_engine_metrics(counters, self._labels), success, *families]
        return [
            _renamed(metric, prefix)
            for metric in every
            for prefix in _PREFIXES
            if prefix != "vllm:" or metric.name not in _OWN
        ]


def render(metrics: Iterable[Metric]) -> bytes:
    """Return metrics in Prometheus' text form; those of one name become one family."""
    families: dict[str, Metric] = {}
    for metric in metrics:
        first = families.setdefault(metric.name, metric)
        if first is not metric:
            first.samples += metric.samples
    registry = CollectorRegistry()
    registry.register(_Given(list(families.values())))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


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
        "num_preemptions": ("Requests preempted for want of pages.", counters.num_preemptions),
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


def _renamed(metric: Metric, prefix: str) -> Metric:
    copy = Metric(prefix + metric.name, metric.documentation, metric.type)
    copy.samples = [one._replace(name=prefix + one.name) for one in metric.samples]
    return copy
