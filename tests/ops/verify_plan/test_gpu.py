"""The compiled kernels against the reference on a CUDA device, eager and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers.empty_plans import check_no_requests
from helpers.group_cases import GROUPINGS, group_case
from helpers.plan_cases import (
    KINDS,
    PlanCase,
    differences,
    random_case,
    reference_plan,
    run_plan,
)
from hybridspec.compat import lightllm
from hybridspec.ops.verify_plan import (
    SamplingColumns,
    Step,
    compact_groups,
    compact_hidden,
    compact_sampling,
    copy_page_table,
    cpu,
    plan_step,
    select_rows,
)

pytestmark = pytest.mark.gpu

PATHS = ("fused", "one block", "many blocks")
NUM_CHUNKS, CHUNK = 40, 250


def config_of(path: str, num_requests: int, num_drafts: int):
    from hybridspec.ops.verify_plan import launch

    return launch.LaunchConfig(
        is_fused=path == "fused",
        is_one_block=path != "many blocks",
        select_warps=launch.launch_config(num_requests, num_drafts).select_warps,
    )


def kernel_plan(case: PlanCase, path: str | None = None) -> Step:
    from hybridspec.ops.verify_plan import launch

    config = path and config_of(path, case.max_requests, case.token_ids.shape[1] - 1)
    return run_plan(case, launch.plan_step, config=config)


def on_device(plan: Step) -> Step:
    return Step.of((tensor.cuda() for tensor in plan.tensors()), max_seqlen=plan.max_seqlen)


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_plans(chunk: int) -> None:
    """10,000 cases in all, each on all three paths; few block sizes, to compile few kernels.

    Neighbours have one number of drafts, the first ones go through all options, and large batches
    have one of them for each number.
    """
    generator = torch.Generator().manual_seed(chunk)
    quarter = 4 * chunk // NUM_CHUNKS
    wrong = torch.zeros(len(PATHS), dtype=torch.int64, device="cuda")
    for trial in range(CHUNK):
        is_large = trial % 3 == 2
        low, high = (150, 250) if is_large else (1, 12)
        num_requests = int(torch.randint(low, high, (), generator=generator))
        options = (quarter % 3,) if is_large else (0, 1, 2) if quarter == 0 else (0, 2)
        option = options[trial // 3 % len(options)]
        case = random_case(
            generator, num_requests, (3, 1, 7, 0)[quarter], has_limits=option > 0,
            num_bins=8 if option == 2 else 0, is_staggered=chunk > 0,
        )  # fmt: skip
        expected = on_device(reference_plan(case))
        moved = case.to("cuda")
        found = [differences(kernel_plan(moved, path), expected) for path in PATHS]
        wrong += torch.stack(found)
    assert wrong.tolist() == [0, 0, 0]


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize(
    ("num_requests", "num_drafts"),
    [
        (1, 0), (255, 0), (256, 0), (257, 0), (1023, 0), (1024, 0), (1025, 0), (4097, 0), (64, 3),
        (256, 3), (51, 4), (205, 4), (819, 4), (2048, 7), (2500, 7), (16_384, 7),
    ],
)  # fmt: skip
def test_sizes(num_requests: int, num_drafts: int, path: str | None) -> None:
    if path == "fused" and num_requests > 1025 or path == "one block" and num_requests > 4097:
        path = None
    generator = torch.Generator().manual_seed(num_requests)
    for kind in ("uniform", "ties"):
        case = random_case(generator, num_requests, num_drafts, kind=kind, share_dead=0.1)
        found = kernel_plan(case.to("cuda"), path)
        assert differences(found, on_device(reference_plan(case))).item() == 0


def test_the_reference_on_the_device_equals_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in KINDS:
        case = random_case(generator, 60, 4, kind=kind, has_limits=True, num_bins=5)
        found = run_plan(case.to("cuda"), cpu.plan_step)
        assert differences(found, on_device(reference_plan(case))).item() == 0


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Warm a call up and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_requests", "num_drafts"), [(8, 3), (256, 3), (1000, 7)])
def test_graphs_follow_their_inputs(num_requests: int, num_drafts: int, path: str) -> None:
    from hybridspec.ops.verify_plan import launch

    generator = torch.Generator().manual_seed(1)
    num_rows = num_requests * 2
    cases = [
        random_case(generator, num_requests, num_drafts, kind=kind, num_rows=num_rows)
        for kind in KINDS
    ]
    static = cases[0].to("cuda")
    plan = static.new_plan()
    config = config_of(path, num_requests, num_drafts)

    def call() -> None:
        launch.plan_step(*static.call(), plan, config)

    graph = captured(call)
    names = ("confidences", "token_ids", "slots", "seq_len", "history_len", "ring_start")
    for case in cases:
        for name in names:
            getattr(static, name).copy_(getattr(case, name))
        for tensor in plan.tensors():
            tensor.fill_(77)
        graph.replay()
        expected = Step.create(
            max_requests=static.max_requests, max_rows=static.max_rows, max_drafts=num_drafts
        )
        cpu.plan_step(*case.call(), expected)
        assert differences(plan, on_device(expected)).item() == 0


@pytest.mark.parametrize("path", PATHS)
def test_200_replays_give_the_same_bits(path: str) -> None:
    from hybridspec.ops.verify_plan import launch

    case = random_case(
        torch.Generator().manual_seed(2), 1000, 7, kind="ties", share_dead=0.1, num_rows=3000
    ).to("cuda")
    plan = case.new_plan()
    config = config_of(path, case.max_requests, 7)
    graph = captured(lambda: launch.plan_step(*case.call(), plan, config))
    graph.replay()
    first = Step.of((tensor.clone() for tensor in plan.tensors()), max_seqlen=plan.max_seqlen)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for tensor in plan.tensors()[:-1]:
            tensor.fill_(77)
        graph.replay()
        wrong += differences(plan, first)
    assert wrong.item() == 0


def test_public_functions_choose_the_kernels() -> None:
    case = random_case(torch.Generator().manual_seed(3), 40, 3, has_limits=True, num_bins=6)
    moved = case.to("cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        confidences = case.confidences.to(dtype)
        plan = moved.new_plan()
        plan_step(
            confidences.cuda(), moved.token_ids, moved.slots, moved.seq_len, moved.history_len,
            plan=plan, ring_start=moved.ring_start, num_rows=case.num_rows,
            num_drafts=moved.num_drafts, calibration=moved.calibration,
        )  # fmt: skip
        chosen = select_rows(
            confidences, case.slots, num_rows=case.num_rows, num_drafts=case.num_drafts,
            calibration=case.calibration,
        )  # fmt: skip
        assert torch.equal(plan.cu_seqlens[:41].cpu(), chosen)


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 1023, 1024, 1025, 4097, 20_000])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups(num_rows: int, grouping: str) -> None:
    arguments = group_case(num_rows, grouping)
    moved = [tensor.cuda() for tensor in arguments]
    for num_entries in (num_rows, num_rows + 1500):
        expected = compact_groups(*arguments, num_entries=num_entries, hold_request=-3)
        found = compact_groups(*moved, num_entries=num_entries, hold_request=-3)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    found = lightllm.build_dynamic_mtp_fa3_decode_params(*moved, num_rows, 31)
    expected = lightllm.build_dynamic_mtp_fa3_decode_params(*arguments, num_rows, 31)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_groups_in_a_graph_200_times() -> None:
    moved = [tensor.cuda() for tensor in group_case(20_000, "random")]
    held = []
    graph = captured(
        lambda: held.append(lightllm.build_dynamic_mtp_fa3_decode_params(*moved, 20_000, 31))
    )
    expected = lightllm.build_dynamic_mtp_fa3_decode_params(
        *group_case(20_000, "random"), 20_000, 31
    )
    expected = [tensor.cuda() for tensor in expected]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for tensor in held[-1]:
            tensor.fill_(77)
        graph.replay()
        wrong += sum((a != b).sum() for a, b in zip(held[-1], expected, strict=True))
    assert wrong.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [192, 4096, 7000])
def test_compaction(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(4)
    sources = torch.randint(-1, 500, (3000,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(500, width, generator=generator).to(dtype)
    found = compact_hidden(hidden.cuda(), sources.cuda())
    assert torch.equal(found.cpu(), compact_hidden(hidden, sources))
    requests = SamplingColumns(
        temperature=torch.rand(125, generator=generator),
        top_k=torch.arange(125, dtype=torch.int32),
        top_p=torch.rand(125, generator=generator),
        min_p=torch.rand(125, generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (125,), generator=generator),
    )
    moved = SamplingColumns.of(tensor.cuda() for tensor in requests.tensors())
    found = compact_sampling(moved, sources.cuda(), rows_per_request=4).tensors()
    expected = compact_sampling(requests, sources, rows_per_request=4).tensors()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_page_tables() -> None:
    source = torch.arange(4_000_000, dtype=torch.int32).view(200, 20_000)
    requests = torch.randint(0, 200, (70,), dtype=torch.int32)
    for width, step in ((1, 1), (15_000, 1), (999, 3)):
        buffer = torch.full((70, 16_000), -1, dtype=torch.int32)
        view = (slice(None), slice(5, 5 + width * step, step))
        moved = buffer.cuda()
        copy_page_table(buffer[view], source, requests)
        lightllm.page_table_copy(moved[view], source.cuda(), requests.cuda())
        assert torch.equal(moved.cpu(), buffer)


def test_no_requests() -> None:
    check_no_requests("triton", "cuda")
