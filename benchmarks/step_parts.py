"""What a captured step is made of: its kernels by part, the bytes it must move, experts hit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec import LLM, SamplingParams
from hybridspec.engine.request import Request
from hybridspec.models import mlp as mlp_module
from hybridspec.models.mlp import MoeMlp
from hybridspec.ops import experts
from hybridspec.ops.experts.cpu import route
from hybridspec.ops.norms import rms_norm

__all__ = ["RECURRENT", "step_bytes", "step_parts"]

RECURRENT = "recurrent verify"
_REPLAYS = 4
_STEPS = 2 * _REPLAYS + 1  # that a batch is replayed for

# Which part a kernel belongs to, by its name; the first that fits.
_PARTS = (
    ("experts", r"^(gate_up|down|route|sum)_kernel|^mix_row|grouped"),
    (RECURRENT, r"^verify(_ordered)?$|gdn|replay|^ordered_verify"),
    ("convolution", r"conv|^verify_kernel"),
    ("attention", r"^(split|finish|append|piece|join)_kernel|flash"),
    ("norms and gates", r"rms_norm|norm_and_rotate|gate_kernel"),
    ("products", r"nvjet|gemm|gemv|splitK|cublas|cutlass|xmma|^(multiply|add_parts)_kernel"),
)
_REST = "plan, choose, accept, commit"


def _part_of(name: str) -> str:
    return next((part for part, pattern in _PARTS if re.search(pattern, name)), _REST)


def _running(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    """Bring a batch to where all of it decodes."""
    engine = llm._engine
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not all(request.num_generated > 2 for request in requests):
        engine.step()
    torch.cuda.synchronize()
    new = _STEPS * (llm.config.draft_tokens + 1)
    if any(request.num_generated + new > params.max_tokens for request in requests):
        raise SystemExit(f"tokens: {params.max_tokens} are too few, some end before others begin")
    return requests


def _give_room(llm: LLM, num_steps: int) -> None:
    """Give running requests the pages that so many replays of a step can need."""
    scheduler = llm._engine.scheduler
    scheduler.grow(num_steps)
    if scheduler.allocator.has_grown:
        scheduler.allocator.upload([])


def _drop(llm: LLM, requests: Sequence[Request]) -> None:
    llm._engine.drop(requests)
    while llm._engine.has_work:
        llm._engine.step()


@torch.inference_mode()
def step_parts(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, step_ms: float
) -> dict[str, float]:
    """Split the wall time of a step into milliseconds by part; the sum is the wall time.

    The graphs of a running batch are replayed, with the profiler and without: what kernels leave of
    the time of a replay is "between kernels", what a replay leaves of the wall time is "host".
    Launches that overlap, as the two of attention, are counted in full: what they share is taken
    off between kernels, which is then less than nothing.

    Args:
        llm: an engine with graphs.
        prompts, params: of a batch that one of its graphs has the size of.
        step_ms: wall time of a step of such a batch.
    """
    requests = _running(llm, prompts, params)
    graphs = llm._engine.runner.graphs
    assert graphs is not None
    _give_room(llm, _STEPS)
    size = next(size for size in graphs.sizes if size >= len(prompts))

    def replay() -> None:
        for _ in range(_REPLAYS):
            graphs.verify(size, graphs.budgets[size][-1])
            graphs.draft(size, graphs.drafts[-1])

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    replay_ms = begin.elapsed_time(end) / _REPLAYS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    parts: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            part = _part_of(event.name)
            parts[part] = parts.get(part, 0.0) + event.device_time / 1e3 / _REPLAYS
    _drop(llm, requests)
    between = replay_ms - sum(parts.values())
    return {**parts, "between kernels": between, "host": step_ms - replay_ms}


@contextmanager
def _counted_experts(num_rows: int, found: list[Tensor]) -> Iterator[None]:
    """Note how many experts each mixture of so many rows has, where it runs."""

    def mix(x: Tensor, scores: Tensor, *rest: Any, **options: Any) -> Tensor:
        if x.shape[0] == num_rows:
            numbers = route(scores[:, :-1], options["experts_per_row"], True)[1].flatten()
            hit = torch.zeros(scores.shape[1], device=x.device).index_fill_(0, numbers, 1.0)
            found.append(hit.sum())
        return experts.mix(x, scores, *rest, **options)

    def norm_and_mix(
        x: Tensor, weight: Tensor, eps: float, router: Tensor, *rest: Any, meeting: Tensor,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        y = rms_norm(x, weight, eps)
        return mix(y, F.linear(y, router), *rest, x, **options)

    stand_in = SimpleNamespace(mix=mix, norm_and_mix=norm_and_mix)
    with mock.patch.object(mlp_module, "experts", stand_in):
        yield


def step_bytes(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, float]:
    """Count the weights that a plain step reads; experts as a run of the same prompts hits them.

    That run is not captured and not timed: experts are counted on the device, step by step and
    layer by layer.

    Returns:
        Bytes of weights besides routed experts, bytes of experts that were hit, and their number in
        a layer, on average.
    """
    model, runner = llm._engine.model, llm._engine.runner
    dense, expert, layers = model.head.nbytes, 0, 0
    for layer in model.layers:
        for part in (layer.mixer, layer.mlp):
            held = [getattr(part, name) for name in part.__dataclass_fields__]
            dense += sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
        if isinstance(layer.mlp, MoeMlp):
            matrices = layer.mlp.matrices
            dense += matrices.shared_gate_up.nbytes + matrices.shared_down.nbytes
            expert, layers = matrices.gate_up[0].nbytes + matrices.down[0].nbytes, layers + 1
    hit = 0.0
    if layers:
        found: list[Tensor] = []
        graphs, runner.graphs = runner.graphs, None
        with _counted_experts(len(prompts), found):
            requests = _running(llm, prompts, params)
            for _ in range(8):
                llm._engine.step()
            _drop(llm, requests)
        runner.graphs = graphs
        hit = float(torch.stack(found).mean())
    return {"dense_bytes": dense, "expert_bytes": hit * layers * expert, "experts_hit": hit}
