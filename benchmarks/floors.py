"""What a step or a prompt takes at least: bytes and operations over rates seen on the device."""

from __future__ import annotations

import torch

from hybridspec import LLM
from hybridspec.models import HybridModel

__all__ = ["READ_RATE", "plain_floor_ms", "product_rate", "prompt_share"]

READ_RATE = 4.13e12  # bytes per second, of a kernel that only reads the state pool, H200
_ROWS = 4096
_FOLD_EVERY, _LIVE_ROWS = 16, 8  # tokens from fold to fold without drafts; rows of a window, mean


def product_rate(model: HybridModel) -> float:
    """Measure the operations per second of torch's products with a model's weights, 4,096 rows.

    All its products with the trunk's weights and the LM head's together, each shape timed once.
    """
    flops, seconds = 0.0, 0.0
    times: dict[torch.Size, float] = {}
    for _, weight in model.matrices():
        if weight.shape not in times:
            times[weight.shape] = _seconds(weight)
        flops += 2.0 * weight.numel() * _ROWS
        seconds += times[weight.shape]
    return flops / seconds


def _seconds(weight: torch.Tensor) -> float:
    x = torch.randn(_ROWS, weight.shape[1], device=weight.device).to(weight.dtype)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for count in (3, 10):
        begin.record()
        for _ in range(count):
            torch.mm(x, weight.t())
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10 / 1e3


def prompt_share(model: HybridModel, tokens: int, first_token_ms: float, rate: float) -> float:
    """Say how much of a prompt's time its products would take alone; the LM head sees one row."""
    trunk = sum(weight.numel() for _, weight in model.matrices()) - model.head.numel()
    return 2.0 * trunk * tokens / rate * 1e3 / first_token_ms


def plain_floor_ms(llm: LLM, num_requests: int, context: float, rate: float) -> float:
    """Milliseconds of a step without drafts: the sum over its parts of the slower resource.

    Products take the time of their bytes or of their operations; checkpoints are read once and
    written at every fold, and live rows of rings and keys and values are read.

    Args:
        llm: an engine of a model without experts.
        num_requests: rows of the step.
        context: tokens of a request, mean.
        rate: of products, operations per second.
    """
    products = sum(
        max(weight.nbytes / READ_RATE, 2.0 * weight.numel() * num_requests / rate)
        for _, weight in llm._engine.model.matrices()
    )
    info = llm.describe()
    state = info.request_bytes["GDN state"] * (1 + 1 / _FOLD_EVERY)
    rows = (info.request_bytes["GDN ring"] + info.request_bytes["conv ring"]) * _LIVE_ROWS
    held = state + rows / llm._engine.resolved.specs.options.ring_capacity
    held += context * info.kv_bytes_per_token
    return (products + num_requests * held / READ_RATE) * 1e3
