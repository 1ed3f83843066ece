"""The compiled kernels against the oracle on a CUDA device, eager and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.gdn_cases import Case, Dtypes, Geometry, Pools, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import KERNEL_CASES, SMALL
from helpers.gdn_sessions import Session
from hybridspec.errors import UnsupportedError
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.ring import RingView

pytestmark = pytest.mark.gpu

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MODES = {
    "bf16": Dtypes(BF16, BF16, BF16),
    "fp16_io": Dtypes(F16, F16, F16),
    "fp16_state": Dtypes(BF16, F16, BF16),
    "ring_fp16": Dtypes(BF16, BF16, F16),
    "fp16_state_cache": Dtypes(BF16, F16, F16),
    "fp32_state": Dtypes(BF16, F32, BF16),
    "fp32_state_ring": Dtypes(BF16, F32, F32),
    "fp32": Dtypes(F32, F32, F32),
}
MODEL = Geometry(heads=2, value_heads=8, key_dim=128, value_dim=128)
MODEL_CASES = [
    *(Case(f"model-T{n}", (n, n), (8, 14), (20, 30), geometry=MODEL) for n in range(1, 9)),
    Case("model-T16", (16, 11), (16, 3), (5, 30), geometry=MODEL),
    Case("model-ragged", (4, 0, 1, 8, 3), (12, 3, 16, 9, 0), (30, 0, 7, 25, 1), geometry=MODEL),
    Case("model-decay", (8, 5), (12, 0), (28, 0), decay="-90", history_gap=30.0, geometry=MODEL),
    Case("model-equal-keys", (8,), (0,), decay="none", equal_keys=True, geometry=MODEL),
    Case("model-strided", (4, 3), (13, 6), (30, 1), is_strided=True, geometry=MODEL),
    *(
        Case(f"model-ratio-{r}", (4, 2), (14, 5), geometry=replace(MODEL, value_heads=2 * r))
        for r in (1, 2, 3)
    ),
    Case("model-K96-V192", (4,), (13,), geometry=Geometry(2, 4, 96, 192)),
    Case("model-K256-V256", (4,), (13,), geometry=Geometry(1, 2, 256, 256)),
]


def operand(dtypes: Dtypes) -> torch.dtype:
    """Coarsest type that coefficients of matrix products are rounded to."""
    return F32 if dtypes.rows == F32 else BF16 if BF16 in (dtypes.rows, dtypes.state) else F16


def modes_of(case: Case) -> tuple[str, ...]:
    """Every mode where a case costs none or one compilation per mode in all; else a few.

    Cases of one geometry differ in their data alone and share a kernel of each mode. What has a
    kernel of its own runs with 16-bit and with exact operands; where tile sizes depend on the
    state's dtype too, also with an fp32 state. Numbers of heads only move addresses.
    """
    if "ratio" in case.name:
        return ("bf16",) if case in MODEL_CASES else ("fp32",)
    if max(case.lengths, default=0) > 8 or case.geometry.key_dim > 128:
        return ("bf16", "fp32_state", "fp32")
    is_shared = case.geometry in (SMALL, MODEL) and case.use_qk_l2norm and not case.is_strided
    return tuple(MODES) if is_shared else ("bf16", "fp32")


# Mode by mode, so that a worker that takes neighbours finds their kernels compiled.
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(mode, case, id=f"{case.name}-{mode}")
        for mode in MODES
        for case in KERNEL_CASES + MODEL_CASES
        if mode in modes_of(case)
    ],
)
def test_verify(mode: str, case: Case) -> None:
    dtypes = MODES[mode]
    VerifyCall(case.using(dtypes), "cuda").check("triton", operand(dtypes))


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_without_is_fold_the_checkpoints_are_not_written(mode: str) -> None:
    case = Case("plain", (4, 3), (12, 0), (30, 1), geometry=MODEL, dtypes=MODES[mode])
    VerifyCall(case, "cuda").check("triton", operand(MODES[mode]), is_fold=None)


@pytest.mark.parametrize("mode", ["bf16", "fp32_state", "fp32"])
def test_sessions(mode: str) -> None:
    session = Session(
        Geometry(1, 3, 64, 32), MODES[mode], num_requests=3, starts=[30, 5, 17],
        device="cuda", backend="triton",
    )  # fmt: skip
    for step in range(40):
        rows = {2: step % 9, 0: 4, 1: 1 + step % 8}
        session.step(rows, {0: step % 5, 1: 8, 2: step % 3}, num_padding=step % 2, commits=2)
        if step % 10 == 9:
            session.check_states()
    assert session.coverage["fold"] > 10 and session.coverage["window wraps"] > 10


def test_more_programs_than_a_second_grid_axis_takes() -> None:
    geometry = Geometry(1, 256, 16, 16, num_slots=301)
    lengths = tuple(i % 3 for i in range(300))
    call = Case("wide", lengths, tuple(i % 17 for i in range(300)), geometry=geometry)
    VerifyCall(call.using(MODES["fp32"]), "cuda").check("triton")


def call_in(pools: Pools, source: VerifyCall, slot: int) -> torch.Tensor:
    """Run the one request of a call in a slot of other pools."""
    call = VerifyCall(source.case, "cuda")
    call.pools = pools
    call.slot_tensor = torch.tensor([slot], dtype=torch.int32, device="cuda")
    return call.run("triton")


@pytest.mark.usefixtures("large_memory")
def test_a_slot_past_two_to_the_31st_element() -> None:
    case = Case("far", (4,), (14,), (29,), slots=(1,), dtypes=MODES["bf16"])
    case = replace(case, geometry=Geometry(16, 64, 128, 128, num_slots=2))
    source = VerifyCall(case, "cuda")
    num_slots = 2**31 // (64 * 128 * 128) + 3
    far = Pools.create(replace(case.geometry, num_slots=num_slots), case.dtypes, "cuda")
    for near, other in zip(source.pools.tensors(), far.tensors(), strict=True):
        other[num_slots - 1] = near[1]
    assert far.state[: num_slots - 1].numel() > 2**31
    expected = source.run("triton")
    assert_same_bits(call_in(far, source, num_slots - 1), expected)
    for near, other in zip(source.pools.tensors(), far.tensors(), strict=True):
        assert_same_bits(other[num_slots - 1], near[1])
    slots = torch.tensor([num_slots - 1], dtype=torch.int32, device="cuda")
    gated_delta_rule.fold(
        far.state, far.ring, slots, is_fold=torch.ones_like(slots, dtype=torch.int8)
    )
    ring_ops.copy_slots(far.tensors(), slots, torch.zeros_like(slots))
    for tensor in far.tensors():
        assert_same_bits(tensor[0], tensor[num_slots - 1])
    ring_ops.reset_slots(far.tensors(), slots)
    assert not any(tensor[num_slots - 1].any() for tensor in far.tensors())


@pytest.mark.parametrize("mode", ["bf16", "fp32_state"])
def test_two_hundred_repeats_agree_in_every_bit(mode: str) -> None:
    """All fold, many programs a request: a race would show as other bits."""
    geometry = Geometry(16, 64, 128, 128, num_slots=17)
    case = Case(
        "race", (4,) * 16, (13, 14, 15, 16) * 4, tuple(range(16, 32)), geometry=geometry,
        dtypes=MODES[mode],
    )  # fmt: skip
    call = VerifyCall(case, "cuda")
    inputs = call.inputs()
    call.inputs = lambda: inputs
    pristine, first = call.pools.copies(), None
    for _ in range(200):
        for tensor, copy in zip(call.pools.tensors(), pristine, strict=True):
            tensor.copy_(copy)
        found = [call.run("triton"), *call.pools.copies()]
        first = first or found
        for actual, expected in zip(found, first, strict=True):
            assert_same_bits(actual, expected)


def graph_of(run) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_a_graph_follows_lengths_folds_and_slots() -> None:
    """Batches of 8 down to 3 requests in one graph, each step equal to the eager call's bits."""
    geometry = Geometry(2, 6, 64, 64, num_slots=12)
    dtypes, batch, num_rows = MODES["bf16"], 8, 40
    generator = torch.Generator().manual_seed(5)
    pools = Pools.create(geometry, dtypes, "cuda")
    for slot in range(12):
        pools.fill_slot(slot, 3 * slot % 32, slot, generator)
    other = Pools.create(geometry, dtypes, "cuda")
    shapes = ((2, 64), (2, 64), (6, 64), (6,), (6,))
    rows = [torch.empty(num_rows, *shape, dtype=BF16, device="cuda") for shape in shapes]
    params = torch.randn(2, 6, generator=generator).cuda()
    slots, verified, committed = (torch.zeros(batch, dtype=torch.int32).cuda() for _ in range(3))
    cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32).cuda()
    is_fold = torch.zeros(batch, dtype=torch.int8).cuda()
    out = torch.empty(num_rows, 6, 64, dtype=BF16, device="cuda")

    def step(pools: Pools) -> None:
        ring = pools.ring
        ring_ops.decide_folds(ring.history_len, slots, verified, is_fold, max_window=16)
        gated_delta_rule.verify(
            *rows, *params, pools.state, ring, cu_seqlens, slots, max_verify_tokens=8,
            is_fold=is_fold, out=out,
        )  # fmt: skip
        ring_ops.commit(
            pools.seq_len, ring.ring_start, ring.history_len, slots, is_fold, verified, committed,
            ring_capacity=32,
        )  # fmt: skip

    slots.fill_(-1)
    graph = graph_of(lambda: step(pools))
    num_folds = 0
    for trial in range(30):
        live = 3 + trial % 6
        order = torch.randperm(12, generator=generator)[:live].tolist()
        sizes = torch.randint(0, 9, (live,), generator=generator).clamp(max=5).tolist()
        sizes += [2] * (batch - live)
        for part in rows:
            part.copy_(torch.randn(part.shape, generator=generator))
            part[sum(sizes[:live]) :] = torch.nan
        for tensor, values in (
            (slots, order + [-1] * (batch - live)),
            (committed, [trial % 4] * live + [0, -1, 0, -1, 0][: batch - live]),
            (cu_seqlens, [0, *torch.tensor(sizes).cumsum(0).tolist()]),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
        for tensor, copy in zip(other.tensors(), pools.copies(), strict=True):
            tensor.copy_(copy)
        counts = torch.tensor(sizes, dtype=torch.int32)
        verified.copy_(counts)
        step(other)
        expected = out.clone()
        verified.copy_(counts)
        before = pools.ring.ring_start.clone()
        graph.replay()
        num_folds += int((before != pools.ring.ring_start).sum())
        assert_same_bits(out, expected)
        assert not out[sum(sizes[:live]) :].any()
        for actual, wanted in zip(pools.tensors(), other.tensors(), strict=True):
            assert_same_bits(actual, wanted)
    assert num_folds > 5


def test_an_output_outlives_the_next_call() -> None:
    call = VerifyCall(Case("kept", (4,), (3,), geometry=MODEL, dtypes=MODES["bf16"]), "cuda")
    first = call.run("triton")
    kept = first.clone()
    call.run("triton")
    assert_same_bits(first, kept)


def test_auto_takes_the_kernels_and_the_reference_for_fp64() -> None:
    for dtypes in (MODES["bf16"], Dtypes()):
        VerifyCall(Case("auto", (3,), (14,), dtypes=dtypes), "cuda").check("auto")
    with pytest.raises(UnsupportedError, match="q has dtype float64"):
        VerifyCall(Case("fp64", (3,), (14,)), "cuda").run("triton")


def test_head_dimensions_that_no_kernel_takes_go_to_the_reference() -> None:
    case = Case("odd", (3,), (14,), geometry=Geometry(1, 2, 24, 20), dtypes=MODES["fp32"])
    VerifyCall(case, "cuda").check("auto")
    with pytest.raises(UnsupportedError, match="K is 24"):
        VerifyCall(case, "cuda").run("triton")


def test_kernels_on_cursors_and_slots_equal_the_reference() -> None:
    def filled(device: str) -> Pools:
        pools = Pools.create(Geometry(2, 6, 96, 48), MODES["fp32"], device, is_strided=True)
        generator = torch.Generator().manual_seed(0)
        for slot, (start, history) in enumerate(((30, 5), (0, 16), (9, 1), (31, 12), (4, 0))):
            pools.fill_slot(slot, start, history, generator)
        return pools

    def run(device: str) -> list[torch.Tensor]:
        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        pools = filled(device)
        ring: RingView = pools.ring
        slots, rows, mark = int32(3, 1, -1, 0), int32(4, 3, 2, 8), int32(0, 0, 0, 0).to(torch.int8)
        ring_ops.decide_folds(ring.history_len, slots, rows, mark, max_window=16)
        marks = mark.clone()
        gated_delta_rule.fold(pools.state, ring, slots, is_fold=mark)
        ring_ops.commit(
            pools.seq_len, ring.ring_start, ring.history_len, slots, mark, rows,
            int32(1, 99, 7, -3), ring_capacity=32,
        )  # fmt: skip
        gated_delta_rule.materialize(
            pools.state, ring, int32(2, 3, -1), int32(6, 3, 0), int32(1, 2, 2)
        )
        ring_ops.copy_slots(pools.tensors(), int32(0, 1, -1), int32(1, 0, 2))
        ring_ops.reset_slots(pools.tensors(), int32(2, -1))
        return [marks, mark, rows, *pools.tensors()]

    for actual, expected in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True, check_dtype=True
        )


def test_the_comparison_has_teeth() -> None:
    call = VerifyCall(Case("teeth", (4,), (9,), geometry=MODEL, dtypes=MODES["bf16"]), "cuda")
    call.pools.ring.history_len.sub_(1)
    wrong = call.run("triton")
    call.pools.ring.history_len.add_(1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(call.run("triton"), wrong, rtol=0.0, atol=8e-3)
