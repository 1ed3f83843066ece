"""One layer's parts over prompts, plain PyTorch against kernels, and the small operations beside.

    python benchmarks/prefill_parts.py --json benchmarks/results/prefill_parts_h200.json

"calls" are calls back to back, whichever of host and device is slower; "device" is the kernels'
time in a captured graph. The library's kernels are timed with the configurations that it picks by
itself too, and those are listed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Variant, environment, time_interleaved
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention
from hybridspec.ops.activations import sigmoid_gate, swiglu
from hybridspec.ops.gated_delta_rule import fla
from hybridspec.ops.norms import gated_rms_norm, rms_norm
from hybridspec.ops.ring import RingView
from spread import median_and_fifths

BATCHES = {"1 x 4096": [4096], "32 x 128": [128] * 32}
HEADS, VALUE_HEADS, DIM = 16, 32, 128  # of a Gated DeltaNet layer
CHANNELS, WIDTH = (2 * HEADS + VALUE_HEADS) * DIM, 4
QUERY_HEADS, KEY_HEADS, HEAD_DIM, PAGE = 16, 4, 256, 64
HIDDEN, INTERMEDIATE = 4096, 12288
CALLS = 8  # back to back, for one time
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
INT = {"device": "cuda", "dtype": torch.int32}


@dataclass(frozen=True)
class Part:
    """What is timed on one batch.

    Attributes:
        run: called with a backend.
        kernel: the backend that is not plain PyTorch.
        flops: of the recurrence or of the attention that the rows see.
        num_bytes: read and written at least.
        restore: puts back what a call changes and another reads.
    """

    run: Callable[[str], Tensor]
    kernel: str
    flops: int
    num_bytes: int
    restore: Callable[[], object] = lambda: None


def metadata(lengths: list[int]) -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(**INT)
    return bounds, torch.arange(len(lengths), **INT)


def convolution(lengths: list[int]) -> Part:
    num_rows, batch = sum(lengths), len(lengths)
    x = torch.randn(num_rows, CHANNELS + 4160, **BF16)[:, :CHANNELS]
    weight = torch.randn(WIDTH, CHANNELS, **BF16).t()
    ring = torch.randn(batch, 16, CHANNELS, **BF16)
    call = (x, weight, ring, torch.zeros(batch, **INT), *metadata(lengths))
    return Part(
        run=lambda backend: causal_conv1d.prefill(*call, max_seqlen=max(lengths), backend=backend),
        kernel="triton",
        flops=2 * WIDTH * num_rows * CHANNELS,
        num_bytes=4 * num_rows * CHANNELS,
    )


def delta_rule(lengths: list[int]) -> Part:
    num_rows, batch = sum(lengths), len(lengths)
    rows = torch.randn(num_rows, CHANNELS, **BF16)
    q, k, v = rows.split((HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM), 1)
    a, b = torch.randn(num_rows, 2 * VALUE_HEADS, **BF16).chunk(2, 1)
    params = torch.zeros(2, VALUE_HEADS, device="cuda")
    state = torch.zeros(batch, VALUE_HEADS, DIM, DIM, device="cuda")
    ring = RingView(
        k=torch.empty(batch, HEADS, 32, DIM, **BF16),
        u=torch.empty(batch, VALUE_HEADS, 32, DIM, **BF16),
        cum_log_decay=torch.empty(batch, VALUE_HEADS, 32, device="cuda"),
        ring_start=torch.zeros(batch, **INT),
        history_len=torch.zeros(batch, **INT),
        max_window=16,
    )
    by_head = (x.unflatten(1, (-1, DIM)) for x in (q, k, v))
    call = (*by_head, a, b, *params, state, ring, *metadata(lengths))
    return Part(
        run=lambda backend: gated_delta_rule.prefill(
            *call, max_seqlen=max(lengths), backend=backend
        ),
        kernel="fla",
        flops=6 * num_rows * VALUE_HEADS * DIM * DIM,
        num_bytes=2 * num_rows * (CHANNELS + VALUE_HEADS * DIM) + 8 * state.numel(),
        restore=state.zero_,
    )


def attention(lengths: list[int]) -> Part:
    num_rows, batch = sum(lengths), len(lengths)
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    q, k, v = torch.randn(num_rows, sum(heads), HEAD_DIM, **BF16).split(heads, 1)
    pages_each = -(-max(lengths) // PAGE)
    pools = torch.zeros(2, batch * pages_each, PAGE, KEY_HEADS, HEAD_DIM, **BF16)
    table = torch.randperm(batch * pages_each, device="cuda").view(batch, pages_each).int()
    call = (q, k, v, *pools, table, torch.zeros(batch, **INT), *metadata(lengths))
    return Part(
        run=lambda backend: paged_attention.prefill(
            *call, max_seqlen=max(lengths), backend=backend
        ),
        kernel="triton",
        flops=4 * QUERY_HEADS * HEAD_DIM * sum(n * (n + 1) // 2 for n in lengths),
        num_bytes=2 * num_rows * HEAD_DIM * (2 * QUERY_HEADS + 4 * KEY_HEADS),
    )


def time_calls(calls: dict[str, Callable[[], object]], iterations: int) -> dict[str, float]:
    """Median microseconds of each call, `CALLS` of them back to back, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(iterations):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            times[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
    return {name: median_and_fifths(values)[0] for name, values in times.items()}


@contextmanager
def own_configurations() -> Iterator[None]:
    """Let the library pick its configurations."""
    fixed = fla.fixed_configurations
    fla.fixed_configurations = lambda target: nullcontext()
    try:
        yield
    finally:
        fla.fixed_configurations = fixed


def chosen_configurations() -> dict[str, str]:
    """What the library picked, by kernel."""
    names = (name for _, name in fla.KERNELS)
    tuners = (tuner for tuner, _, _ in fla._tuners())
    return {
        name: str(getattr(tuner, "best_config", None))
        for name, tuner in zip(names, tuners, strict=True)
    }


def measured_part(name: str, batch: str, part: Part, rate: float, iterations: int) -> dict:
    """Compare both backends, then time them."""
    right = part.run("reference").double()
    part.restore()
    found = part.run(part.kernel).double()
    error = float((found - right).abs().max() / right.abs().max())
    if not error <= 3e-2:
        raise SystemExit(f"{name}, {batch}: wrong by {error:.1e}")
    calls = {
        "plain PyTorch": lambda: part.run("reference"),
        part.kernel: lambda: part.run(part.kernel),
    }
    times = time_calls(calls, iterations)
    if part.kernel == "fla":
        with own_configurations():
            times |= time_calls({"fla, own choice": calls["fla"]}, iterations)
    device = time_interleaved([Variant(part.kernel, calls[part.kernel])], iterations)
    seconds = 1e-6 * device[part.kernel].median
    result = {
        "part": name,
        "batch": batch,
        "error": error,
        "calls_us": {key: round(value, 1) for key, value in times.items()},
        "device_us": round(device[part.kernel].median, 1),
        "tflops": round(1e-12 * part.flops / seconds, 1),
        "share_of_product_rate": round(part.flops / seconds / rate, 3),
        "gbytes_per_s": round(1e-9 * part.num_bytes / seconds, 1),
    }
    print(result, flush=True)
    return result


def small_operations(num_rows: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """By name: as layers do it without kernels, and in one launch."""
    x, fused = torch.randn(num_rows, HIDDEN, **BF16), torch.randn(num_rows, 16384, **BF16)
    weight, short = torch.ones(HIDDEN, device="cuda"), torch.ones(DIM, device="cuda")
    y = torch.randn(num_rows, VALUE_HEADS, DIM, **BF16)
    z = fused[:, 8192 : 8192 + VALUE_HEADS * DIM]
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE, **BF16)

    def gated_norm() -> Tensor:
        wide = F.rms_norm(y.float(), short.shape, short, 1e-6)
        return (wide * F.silu(z.unflatten(1, (-1, DIM)).float())).to(y.dtype)

    def gated() -> Tensor:
        gate, up = gate_up.chunk(2, 1)
        return F.silu(gate).mul_(up)

    return {
        "rms_norm": (
            lambda: F.rms_norm(x.float(), weight.shape, weight, 1e-6).to(x.dtype),
            lambda: rms_norm(x, weight, 1e-6),
        ),
        "gated_rms_norm": (
            gated_norm,
            lambda: gated_rms_norm(y, z.unflatten(1, (-1, DIM)), short, 1e-6),
        ),
        "swiglu": (gated, lambda: swiglu(gate_up)),
        "sigmoid_gate": (lambda: x * z.sigmoid(), lambda: sigmoid_gate(x, z)),
    }


def measured_small(num_rows: int, iterations: int) -> dict:
    result: dict = {"rows": num_rows, "device_us": {}}
    for name, (plain, launch) in small_operations(num_rows).items():
        variants = [Variant("plain PyTorch", plain), Variant("one launch", launch)]
        timings = time_interleaved(variants, iterations)
        result["device_us"][name] = {key: round(t.median, 2) for key, t in timings.items()}
    print(result, flush=True)
    return result


def product_rate(iterations: int) -> float:
    """Flops per second of torch.mm on 4,096 rows and the weight of gate and up."""
    x, weight = torch.randn(4096, HIDDEN, **BF16), torch.randn(HIDDEN, 2 * INTERMEDIATE, **BF16)
    timing = time_interleaved([Variant("mm", lambda: torch.mm(x, weight))], iterations)["mm"]
    return 2 * 4096 * HIDDEN * 2 * INTERMEDIATE / (1e-6 * timing.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--limit", type=int, help="only the first parts, and the last batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts = {"convolution": convolution, "attention": attention, "gated delta rule": delta_rule}
    rate = product_rate(arguments.iterations)
    batches = list(BATCHES.items())[-1 if arguments.limit else 0 :]
    rows = [
        measured_part(name, batch, make(lengths), rate, arguments.iterations)
        for name, make in list(parts.items())[: arguments.limit]
        for batch, lengths in batches
    ]
    document = {
        **environment(),
        "iterations": arguments.iterations,
        "product_tflops": round(1e-12 * rate, 1),
        "parts": rows,
        "small": [measured_small(n, arguments.iterations) for n in (1, 32, 4096)],
        "fla_picks": {} if arguments.limit else chosen_configurations(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
