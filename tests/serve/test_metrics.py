"""Metrics: vLLM's names and ours, and that they count what happened."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from helpers.serving import Running
from hybridspec.serve.metrics import _Histogram

ROOT = Path(__file__).resolve().parent.parent.parent
BOTH = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip


def values(running: Running) -> dict[str, float]:
    """Every value by name, and by name and label for those with more than the model's labels."""
    text = urllib.request.urlopen(f"{running.url}/metrics").read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = [v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")]
            assert sample.labels["model_name"] == "small"
            found["/".join([sample.name, *more])] = sample.value
    return found


def test_they_count_what_happened(running: Running) -> None:
    client = running.client()
    options = {"model": "small", "temperature": 0, "max_tokens": 40}
    before = values(running)
    asked = {"return_speculation": True}
    answer = client.completions.create(prompt="import os\n", n=2, extra_body=asked, **options)
    after = values(running)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    counts = answer.usage.speculation
    assert grown["vllm:generation_tokens_total"] == 80
    assert grown["vllm:prompt_tokens_total"] == 2 * 11
    assert grown["vllm:request_success_total/length"] == 2
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == counts["drafted_tokens"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == counts["accepted_tokens"]
    by_position = [grown[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{j}"] for j in (0, 1)]
    assert by_position[0] >= by_position[1] > 0
    assert grown["hybridspec:folds_total"] == counts["folds"]
    assert grown["hybridspec:committed_tokens_per_step_count"] == counts["verify_steps"]
    assert grown["hybridspec:committed_tokens_per_step_sum"] == counts["committed_tokens"]
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    for name in BOTH:
        assert after[f"vllm:{name}"] == after[f"hybridspec:{name}"]


def test_what_runs_is_seen(running: Running) -> None:
    stream = running.client().completions.create(
        model="small", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    now = values(running)
    assert now["vllm:num_requests_running"] == now["hybridspec:slots_used"] == 1
    assert 0 < now["vllm:kv_cache_usage_perc"] <= 1
    stream.close()
    running.wait_idle()
    assert values(running)["hybridspec:slots_used"] == 0


def test_the_dashboard_shows_metrics_that_there_are(running: Running) -> None:
    names = {name.split("/")[0] for name in values(running)}
    names |= {name.removesuffix("_count") + "_bucket" for name in names}
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 8
    for expression in targets:
        used = [
            word for word in expression.replace("(", " ").replace("[", " ").split()
            if word.startswith("hybridspec:")
        ]  # fmt: skip
        for word in used:
            assert word.split("{")[0].rstrip(",)") in names, expression


def test_histograms_are_those_of_the_client_library() -> None:
    """Bounds belong to their buckets; one that is on none, under or over all of them counts too."""
    registry = CollectorRegistry()
    right = Histogram("request_prompt_tokens", "-", registry=registry, buckets=(1, 2, 5, 10))
    values = [0, 1, 1.5, 2, 5, 5.5, 10, 11, 1000]
    ours = _Histogram("-", (1, 2, 5, 10))
    for value in values:
        right.observe(value)
        ours.observe(value)
    expected = [s for s in next(iter(registry.collect())).samples if "_created" not in s.name]
    found = ours.family("request_prompt_tokens", {}).samples
    assert {(s.name, *s.labels.values(), s.value) for s in found} == {
        (s.name, *s.labels.values(), s.value) for s in expected
    }
