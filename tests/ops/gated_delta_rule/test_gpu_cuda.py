"""The CUDA C++ kernel on a device: the cases of its CPU tests, far slots, repeats, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.gdn_cases import Case, Dtypes, Pools, VerifyCall, assert_same_bits
from helpers.gdn_kernel_cases import CUDA_CASES, CUDA_MODES, LARGE
from helpers.gdn_row_calls import RowCall
from hybridspec.ops.gated_delta_rule import launch_cuda

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def operand(dtypes: Dtypes) -> torch.dtype:
    return torch.float16 if dtypes.rows == torch.float16 else BF16


def geometry_of(case: Case) -> tuple[int, int, int]:
    return case.geometry.value_dim, case.geometry.value_heads, case.geometry.heads


# By kernel: workers take neighbours, and what one compiles it does not compile again. One dtype
# shows that numbers of heads only move addresses.
@pytest.mark.parametrize(
    ("dtypes", "case"),
    [
        pytest.param(dtypes, case, id=f"{case.name}-{dtypes}")
        for dtypes in CUDA_MODES
        for case in sorted(CUDA_CASES, key=geometry_of)
        if dtypes == CUDA_MODES[0] or "ratio" not in case.name
    ],
)
def test_verify(dtypes: Dtypes, case: Case) -> None:
    VerifyCall(case.using(dtypes), "cuda").check("cuda", operand(dtypes))


@pytest.mark.parametrize("dtypes", CUDA_MODES, ids=str)
def test_launches_of_every_size(dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("sizes", (4, 3, 1), (14, 8, 0), (20, 30, 0), geometry=LARGE, dtypes=dtypes)
    choose = launch_cuda.choose_config
    for num_heads in (1, 1025, 8193):
        monkeypatch.setattr(
            launch_cuda, "choose_config", lambda _, *rest, n=num_heads: choose(n, *rest)
        )
        VerifyCall(case, "cuda").check("cuda", operand(dtypes))


@pytest.mark.parametrize("has_output", [False, True])
def test_cursors_by_row(has_output: bool) -> None:
    call = RowCall(4, 32, head_dim=128, dtype=BF16, device="cuda")
    call.compare("cuda", has_output, bound=4e-2, fold_threshold=13)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_parameters_of_sixteen_bits(dtype: torch.dtype) -> None:
    call = RowCall(4, 32, head_dim=128, dtype=BF16, device="cuda")
    call.check_widening("cuda", dtype, dtype)


def test_auto_takes_it() -> None:
    case = Case("auto", (3,), (14,), geometry=LARGE, dtypes=CUDA_MODES[0])
    call = VerifyCall(case, "cuda")
    inputs = call.inputs()
    call.inputs = lambda: inputs
    on_device = {name: getattr(call.tokens, name).cuda() for name in ("A_log", "dt_bias")}
    call.tokens = replace(call.tokens, **on_device)  # nothing is copied while a graph is captured
    pristine = call.pools.copies()
    chosen = call.run("auto").clone()
    for tensor, copy in zip(call.pools.tensors(), pristine, strict=True):
        tensor.copy_(copy)
    assert_same_bits(chosen, call.run("cuda"))


@pytest.mark.usefixtures("large_memory")
def test_a_slot_past_two_to_the_31st_element() -> None:
    case = Case("far", (4,), (14,), (29,), slots=(1,), dtypes=CUDA_MODES[0])
    case = replace(case, geometry=replace(LARGE, heads=16, value_heads=64, num_slots=2))
    source = VerifyCall(case, "cuda")
    num_slots = 2**31 // (64 * 128 * 128) + 3
    far = Pools.create(replace(case.geometry, num_slots=num_slots), case.dtypes, "cuda")
    for near, other in zip(source.pools.tensors(), far.tensors(), strict=True):
        other[num_slots - 1] = near[1]
    expected = source.run("cuda")
    call = VerifyCall(case, "cuda")
    call.pools = far
    call.slot_tensor = torch.tensor([num_slots - 1], dtype=torch.int32, device="cuda")
    assert_same_bits(call.run("cuda"), expected)
    for near, other in zip(source.pools.tensors(), far.tensors(), strict=True):
        assert_same_bits(other[num_slots - 1], near[1])


@pytest.mark.parametrize("dtypes", [CUDA_MODES[0], CUDA_MODES[3]], ids=str)
def test_two_hundred_replays_agree_in_every_bit(dtypes: Dtypes) -> None:
    """All fold, from a graph: a race or a copy that is not waited for would show as other bits."""
    geometry = replace(LARGE, heads=16, value_heads=64, num_slots=17)
    case = Case(
        "race", (4,) * 16, (13, 14, 15, 16) * 4, tuple(range(16, 32)), geometry=geometry,
        dtypes=dtypes,
    )  # fmt: skip
    call = VerifyCall(case, "cuda")
    inputs = call.inputs()
    call.inputs = lambda: inputs
    on_device = {name: getattr(call.tokens, name).cuda() for name in ("A_log", "dt_bias")}
    call.tokens = replace(call.tokens, **on_device)  # nothing is copied while a graph is captured
    pristine = call.pools.copies()

    def restore() -> None:
        for tensor, copy in zip(call.pools.tensors(), pristine, strict=True):
            tensor.copy_(copy)

    first = [call.run("cuda").clone(), *call.pools.copies()]
    restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run("cuda")
    for _ in range(200):
        restore()
        graph.replay()
        for actual, expected in zip([out, *call.pools.tensors()], first, strict=True):
            assert_same_bits(actual, expected)
