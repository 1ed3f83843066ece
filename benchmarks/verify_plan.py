"""Time planning a decode step on a GPU: select rows and build their parameters, in a CUDA graph.

Two figures per case. `cold`: one call per graph, L2 overwritten before each replay, timed with
events; `step`: a graph of 20 calls, time per call, which is what a call adds to a larger graph.
The empty kernel is timed in the same way. Every case is checked against the reference first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from hybridspec.compat import lightllm
from hybridspec.ops.verify_plan import Step, cpu, launch
from hybridspec.ops.verify_plan.call import Cursors, Drafts
from measured_commit import measured_commit
from spread import median_and_fifths

REPEATS = 80
CALLS = 20


@triton.jit
def empty_kernel(out_ptr):
    tl.store(out_ptr, 0)


def new_case(num_requests: int, num_drafts: int, kind: str, device: str) -> dict:
    """Return the arguments of a step in which half of all rows are verified."""
    generator = torch.Generator().manual_seed(num_requests)
    confidences = torch.rand(num_requests, num_drafts, generator=generator) * 0.7 + 0.3
    if kind == "equal":
        confidences = torch.ones_like(confidences)
    slots = torch.randperm(num_requests, generator=generator).to(torch.int32)
    case = {
        "confidences": confidences,
        "token_ids": torch.randint(0, 1000, (num_requests, num_drafts + 1), generator=generator),
        "slots": slots,
        "seq_len": torch.randint(0, 9000, (num_requests,), generator=generator).to(torch.int32),
        "history_len": torch.randint(0, 17, (num_requests,), generator=generator).to(torch.int32),
        "ring_start": torch.randint(0, 32, (num_requests,), generator=generator).to(torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in case.items()}


def new_call(
    num_requests: int, num_drafts: int, kind: str, config: launch.LaunchConfig | None
) -> Callable[[], None]:
    """Return a call of the kernels that was compared with the reference."""
    num_rows = max(num_requests * (num_drafts + 1) // 2, num_requests)
    plans, steps = [], (cpu.plan_step, launch.plan_step)
    for step, device in zip(steps, ("cpu", "cuda"), strict=True):
        case = new_case(num_requests, num_drafts, kind, device)
        plan = Step.create(
            max_requests=num_requests, max_rows=num_rows, max_drafts=num_drafts, device=device
        )
        options = {} if step is cpu.plan_step else {"config": config}
        drafts = Drafts(case["confidences"], None, None)
        cursors = Cursors(case["seq_len"], case["history_len"], case["ring_start"], 16)
        arguments = (drafts, case["token_ids"], case["slots"], cursors, num_rows, plan)

        def call(step=step, arguments=arguments, options=options) -> None:
            step(*arguments, **options)

        call()
        plans.append(plan)
    for name, expected, found in zip(
        Step.__slots__, plans[0].tensors()[:-1], plans[1].tensors(), strict=False
    ):
        assert torch.equal(expected, found.cpu()), f"{name} differs from the reference"
    return call


def captured(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` calls in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, flush: torch.Tensor | None) -> list[float]:
    """Microseconds of each replay."""
    times = []
    for _ in range(REPEATS):
        if flush is not None:
            flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000 for begin, end in times]


def measure(name: str, call: Callable[[], object], flush: torch.Tensor) -> dict:
    """Time one variant both ways and print a line."""
    cold = replay_us(captured(call, 1), flush)
    step = [t / CALLS for t in replay_us(captured(call, CALLS), None)]
    row = {"name": name}
    for key, times in (("cold", cold), ("step", step)):
        median, p20, p80 = (round(value, 2) for value in median_and_fifths(times))
        row |= {f"{key}_us": median, f"{key}_p20_us": p20, f"{key}_p80_us": p80}
    print(f"{name:46s} cold {row['cold_us']:7.2f}   step {row['step_us']:7.2f} us", flush=True)
    return row


def empty_call() -> Callable[[], object]:
    """Return a call that launches one kernel which does next to nothing."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    return lambda: empty_kernel[(1,)](out)


def groups_call(num_rows: int) -> Callable[[], object]:
    """Return a call of LightLLM's function on groups of four rows."""
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    marks = (rows % 4 == 3).to(torch.int32) * 4
    return lambda: lightllm.build_dynamic_mtp_fa3_decode_params(rows, rows, marks, num_rows, 0)


def variants() -> list[tuple[str, Callable[[], Callable[[], object]]]]:
    """Name every timed call, and say what makes it."""
    found = [("empty kernel", empty_call)]

    def add(num_requests: int, num_drafts: int, kind: str, path: str, *all_warps: int) -> None:
        for warps in all_warps:
            config = launch.LaunchConfig(
                is_fused=path == "fused", is_one_block=path != "many blocks", select_warps=warps
            )
            label = f"{num_requests} x {num_drafts + 1}, {kind}, {path}, {warps} warps"
            found.append((label, partial(new_call, num_requests, num_drafts, kind, config)))

    for kind in ("mixed", "equal"):
        add(256, 3, kind, "fused", 2, 4, 8)
        add(2048, 7, kind, "one block", 4, 8, 16)
        add(2048, 7, kind, "fused", 8, 16)
        add(2048, 7, kind, "many blocks", 4)
    add(8, 3, "mixed", "fused", 1, 4)
    add(64, 3, "mixed", "fused", 1, 2, 4)
    add(128, 7, "mixed", "fused", 2, 4, 8)
    add(512, 3, "mixed", "fused", 4, 8, 16)
    add(512, 3, "mixed", "one block", 8)
    add(1024, 3, "mixed", "fused", 8, 16)
    add(1024, 3, "mixed", "one block", 8)
    add(4096, 7, "mixed", "one block", 8, 16)
    add(16_384, 7, "mixed", "many blocks", 4)
    found += [(f"lightllm, {rows} rows", partial(groups_call, rows)) for rows in (1024, 20_480)]
    # The floor once more: the difference to the first reading is the noise between variants.
    return [*found, ("empty kernel, again", empty_call)]


def main() -> None:
    """Run all variants; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file for the JSON")
    parser.add_argument("--limit", type=int, help="only the first variants")
    parser.add_argument("--commit", help="commit to name in the result; default: ask git")
    arguments = parser.parse_args()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    chosen = variants()[: arguments.limit]
    rows = [measure(name, make_call(), flush) for name, make_call in chosen]
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit or measured_commit(),
        "repeats": REPEATS,
        "rows": rows,
    }
    text = json.dumps(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
