"""Launch every kernel on small batches on a CUDA device, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/ops/gated_delta_rule/sanitize.py
compute-sanitizer --tool racecheck python tests/ops/gated_delta_rule/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helpers.conv_kernel_cases import check_kernel
from helpers.gdn_cases import Case, Dtypes, Geometry, VerifyCall
from helpers.gdn_kernel_cases import CUDA_MODES, LARGE, ORDERED_MODES
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.gated_delta_rule import launch_cuda

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def make_case(dtypes: Dtypes, geometry: Geometry) -> Case:
    """Ragged rows, padding, a tail, folds and wrapped windows."""
    return Case(
        "all", (4, 0, 1, 8, 2), (14, 3, 16, 9, 0), (30, 0, 7, 25, 1), (6, 5, 4, 0, -1), tail=2,
        is_strided=True, is_aligned=True, geometry=geometry, dtypes=dtypes,
    )  # fmt: skip


def launch_cuda_kernel() -> None:
    """Every dtype of states, with the launches of few requests and of many."""
    choose = launch_cuda.choose_config
    for num_heads in (64, 16384):
        launch_cuda.choose_config = lambda _, *rest, n=num_heads: choose(n, *rest)
        for dtypes in CUDA_MODES:
            operand = F16 if dtypes.rows == F16 else BF16
            VerifyCall(make_case(dtypes, LARGE), "cuda").check("cuda", operand)


def main() -> None:
    """Launch the verify kernels; then cursors and slots."""
    launch_cuda_kernel()
    for dtypes, geometry in (
        (Dtypes(BF16, BF16, BF16), Geometry(2, 6, 128, 128)),
        (Dtypes(BF16, F32, BF16), Geometry(1, 2, 64, 32)),
    ):
        call = VerifyCall(make_case(dtypes, geometry), "cuda")
        call.check("triton", BF16)
        pools, slots = call.pools, call.slot_tensor
        ring = pools.ring
        rows = torch.tensor(call.case.lengths, dtype=torch.int32, device="cuda")
        gated_delta_rule.fold(pools.state, ring, slots, is_fold=call.is_fold)
        gated_delta_rule.materialize(pools.state, ring, slots, slots, rows)
        ring_ops.decide_folds(ring.history_len, slots, rows, call.is_fold, max_window=16)
        ring_ops.commit(
            pools.seq_len, ring.ring_start, ring.history_len, slots, call.is_fold, rows,
            rows.clone(), ring_capacity=32,
        )  # fmt: skip
        ring_ops.copy_slots(pools.tensors(), slots, slots.flip(0).contiguous())
        ring_ops.reset_slots(pools.tensors(), slots)
    check_kernel("ragged", (BF16, BF16), "silu", "cuda", 2e-2)
    for dtypes in ORDERED_MODES:
        operand = F16 if dtypes.rows == F16 else BF16
        VerifyCall(make_case(dtypes, LARGE), "cuda").check("ordered_cuda", operand)
    torch.cuda.synchronize()
    print("all kernels launched")


if __name__ == "__main__":
    main()
