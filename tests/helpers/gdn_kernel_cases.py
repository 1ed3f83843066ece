"""Verify calls that kernels must get right: small enough for interpreters on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers.gdn_cases import Case, Dtypes, Geometry
from hybridspec.ops.gated_delta_rule.launch_cuda import CudaConfig

__all__ = [
    "CUDA_CASES",
    "CUDA_CONFIGS",
    "CUDA_MODES",
    "KERNEL_CASES",
    "LARGE",
    "NARROW",
    "ORDERED_CASES",
    "ORDERED_MODES",
    "SMALL",
]

SMALL = Geometry(heads=1, value_heads=2, key_dim=16, value_dim=16)

KERNEL_CASES = [
    *(Case(f"T{n}", (n,), (5,), geometry=SMALL) for n in (1, 2, 3, 4, 8)),
    Case("T16", (16,), (3,), (27,), geometry=SMALL),
    Case("ragged", (1, 5, 0, 8, 3), (2, 0, 4, 8, 13), (0, 31, 5, 17, 30), geometry=SMALL),
    Case("ends-empty", (0, 6, 7, 0), (4, 11, 3, 9), (1, 28, 0, 5), geometry=SMALL),
    Case("padding-tail", (2, 3, 1), (4, 0, 6), slots=(5, -1, 2), tail=5, geometry=SMALL),
    Case("only-padding", (2, 2), (0, 0), slots=(-1, -1), geometry=SMALL),
    Case("all-fold", (4, 4, 4), (13, 16, 14), (1, 30, 20), geometry=SMALL),
    Case("some-fold-permuted", (8, 1, 8), (9, 9, 8), (25, 25, 25), (4, 0, 6), geometry=SMALL),
    Case("fold-nothing", (2,), (0,), folds=(True,), geometry=SMALL),
    Case("options", (3,), (4,), use_qk_l2norm=False, scale=0.1, beta_scale=2.0, geometry=SMALL),
    Case("equal-keys", (8,), (0,), decay="none", equal_keys=True, geometry=SMALL),
    Case("strong-decay", (5, 4), (7, 14), decay="-200", history_gap=60.0, geometry=SMALL),
    Case("slow-decay", (4,), (0,), decay="slow", geometry=SMALL),
    Case("zeros", (3,), (4,), magnitude=0.0, geometry=SMALL),
    Case("tiny", (3,), (4,), magnitude=1e-4, geometry=SMALL),
    Case("no-requests", (), (), tail=3, geometry=SMALL),
    Case("strided", (2, 4), (5, 14), (30, 1), is_strided=True),
    Case("strided-padding", (2, 3, 1), (4, 0, 16), (1, 0, 9), (3, -1, 2), tail=2, is_strided=True),
    *(
        Case(f"ratio-{r}", (3, 2), (4, 15), geometry=Geometry(heads=h, value_heads=r * h))
        for r, h in ((1, 3), (3, 1), (4, 1))
    ),
    *(
        Case(f"K{k}-V{v}", (4,), (13,), geometry=Geometry(1, 1, k, v))
        for k, v in ((16, 48), (48, 16), (96, 192), (256, 32))
    ),
    Case(
        "small-ring",
        (2,),
        (2,),
        (3,),
        geometry=Geometry(1, 1, 16, 16, capacity=4, max_window=2),
    ),
]

# What the CUDA C++ kernel takes.
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LARGE = Geometry(heads=2, value_heads=4, key_dim=128, value_dim=128)
NARROW = Geometry(heads=1, value_heads=1, key_dim=128, value_dim=64)
CUDA_MODES = [Dtypes(BF16, BF16, BF16), Dtypes(F16, F16, F16), Dtypes(BF16, F32, BF16)]
CUDA_MODES += [Dtypes(BF16, torch.int8, BF16)]
CUDA_CASES = [
    *(Case(f"T{n}", (n,), (8,), (27,), geometry=NARROW) for n in range(1, 9)),
    Case("ragged", (4, 0, 1, 8, 3), (12, 3, 16, 9, 0), (30, 0, 7, 25, 1), geometry=LARGE),
    Case("ends-empty", (0, 6, 7, 0), (4, 11, 3, 9), (1, 28, 0, 5), geometry=NARROW),
    Case("padding-tail", (2, 3, 1), (4, 0, 6), slots=(5, -1, 2), tail=5, geometry=LARGE),
    Case("room-left", (3, 1, 0, 0), (14, 2, 0, 0), slots=(2, 0, -1, -1), tail=4, geometry=NARROW),
    Case("all-fold", (4, 4), (13, 16), (1, 30), geometry=LARGE),
    Case("fold-nothing", (2,), (0,), folds=(True,), geometry=NARROW),
    Case("options", (3,), (4,), use_qk_l2norm=False, scale=0.1, beta_scale=2.0, geometry=NARROW),
    Case("equal-keys", (8,), (0,), decay="none", equal_keys=True, geometry=NARROW),
    Case("strong-decay", (5, 4), (7, 14), decay="-200", history_gap=60.0, geometry=NARROW),
    Case("slow-decay", (4,), (0,), decay="slow", geometry=NARROW),
    Case("zeros", (3,), (4,), magnitude=0.0, geometry=NARROW),
    Case("tiny", (3,), (4,), magnitude=1e-4, geometry=NARROW),
    Case("no-requests", (), (), tail=3, geometry=NARROW),
    Case("ratio-3", (4, 2), (14, 5), geometry=replace(LARGE, heads=1, value_heads=3)),
    Case("V192", (4,), (13,), geometry=replace(NARROW, value_dim=192)),
    Case(
        "strided",
        (2, 3, 4),
        (4, 0, 14),
        (30, 0, 9),
        slots=(3, -1, 2),
        tail=2,
        is_strided=True,
        is_aligned=True,
        geometry=replace(NARROW, heads=2, value_heads=4),
    ),
]

# Splits of a head's value rows between warps that differ in kind.
CUDA_CONFIGS = {
    "a-warp-a-head": CudaConfig(splits=1, warps=2, blocks=1, evict_first=False),
    "four-warps-a-head": CudaConfig(splits=4, warps=4, blocks=1, evict_first=True),
    "spare-warps": CudaConfig(splits=2, warps=5, blocks=1, evict_first=True),
}

# Of the kernel with sums in one order: windows of 24, and of 16.
ORDERED_MODES = CUDA_MODES[:3]
ORDERED_CASES = [
    *(replace(case, geometry=replace(case.geometry, max_window=24)) for case in CUDA_CASES),
    Case("window", (4, 3, 2), (20, 24, 17), (30, 9, 0), geometry=replace(LARGE, max_window=24)),
    Case("full", (3, 2), (24, 23), (30, 9), geometry=replace(NARROW, max_window=24)),
    Case("a-short-window", (4, 3, 2), (12, 16, 9), (30, 9, 0), geometry=LARGE),
]
