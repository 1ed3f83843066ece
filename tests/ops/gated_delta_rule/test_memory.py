"""What a step allocates, and that a step without folds leaves the state pool alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall, assert_same_bits
from hybridspec.ops.gated_delta_rule import FoldingBatch, Gates, Rows, State, cpu

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
I8 = torch.int8
LARGE = Geometry(key_dim=64, value_dim=64)
STATE_SIZE = LARGE.value_heads * LARGE.key_dim * LARGE.value_dim


class Allocations(TorchDispatchMode):
    """Collects the size of every tensor that an operator returns without sharing memory."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                pointer = tensor.untyped_storage().data_ptr()
                if pointer not in self.known:
                    self.sizes.append(tensor.numel())
        return result


def allocations(call: VerifyCall) -> list[int]:
    """Run the reference below the operator, where a dispatch mode sees each step of it."""
    case, pools = call.case, call.pools
    inputs = call.inputs()
    out = torch.empty_like(inputs[2])
    with Allocations(pools.state, *inputs) as mode:
        cpu.verify(
            Rows(*inputs, out),
            Gates(
                call.tokens.A_log, call.tokens.dt_bias, 0.125, case.use_qk_l2norm, case.beta_scale
            ),
            State(pools.state, pools.state_scale),
            pools.ring,
            FoldingBatch(call.cu_seqlens, call.slot_tensor, call.is_fold, pools.ring.max_window),
        )
    return mode.sizes


@pytest.mark.parametrize("dtypes", [Dtypes(F32, s, F32) for s in (F32, BF16, F16, I8)], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (4,), (4, 4, 4), (1, 8, 3)], ids=str)
@pytest.mark.parametrize("is_strided", [False, True], ids=["pools", "strided"])
def test_a_step_without_folds_allocates_no_state(
    dtypes: Dtypes, lengths: tuple[int, ...], is_strided: bool
) -> None:
    """A copy of one slot's state, in whatever form, would be STATE_SIZE elements."""
    history, starts = (6,) * len(lengths), (29,) * len(lengths)
    case = Case(
        "memory", lengths, history, starts, geometry=LARGE, dtypes=dtypes, is_strided=is_strided
    )
    call = VerifyCall(case)
    before = call.pools.state.clone()
    sizes = allocations(call)
    assert max(sizes) < STATE_SIZE
    assert_same_bits(call.pools.state, before)


def test_a_fold_in_the_compute_dtype_is_in_place() -> None:
    case = Case("fold", (4, 4), (14, 15), geometry=LARGE, dtypes=Dtypes(F32, F32, F32))
    assert max(allocations(VerifyCall(case))) < STATE_SIZE


@pytest.mark.parametrize(
    "dtypes", [Dtypes(F32, BF16, F32), Dtypes(F32, I8, F32), Dtypes(F64, F32, F32)], ids=str
)
def test_a_fold_in_another_dtype_widens_the_state_in_parts(dtypes: Dtypes) -> None:
    case = Case("fold", (4, 4), (14, 15), geometry=LARGE, dtypes=dtypes)
    assert max(allocations(VerifyCall(case))) < STATE_SIZE


def test_the_watch_has_teeth() -> None:
    state = torch.zeros(3, 4, 64, 64)
    with Allocations(state) as mode:
        assert state[1].mT.shape[0] == 4
        assert mode.sizes == []
        state[1].to(torch.bfloat16)
    assert mode.sizes == [STATE_SIZE]
