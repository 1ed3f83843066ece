"""Compile the kernel of the raw ring for the capability that is named; `--few`: some variants."""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from helpers.triton_resources import compiled
from hybridspec.ops.gated_delta_rule import raw_launch, triton_raw

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "fp16", F32: "fp32"}
TRITON = {BF16: tl.bfloat16, F16: tl.float16, F32: tl.float32}
# dtypes of activations, state, ring and operands, K, V
VARIANTS = [
    (BF16, BF16, BF16, BF16, 128, 128),
    (F16, F16, F16, F16, 128, 128),
    (BF16, F32, BF16, BF16, 128, 128),
    (BF16, F16, BF16, BF16, 128, 128),
    (BF16, BF16, F32, F32, 128, 128),
    (F32, F32, F32, F32, 128, 128),
    (BF16, BF16, BF16, BF16, 256, 256),
    (BF16, F32, BF16, BF16, 256, 256),
    (BF16, BF16, BF16, BF16, 96, 192),
    (BF16, BF16, BF16, BF16, 64, 64),
]
FEW = [VARIANTS[0], VARIANTS[2], VARIANTS[5]]
STRIDED = {"q": 2, "k": 2, "v": 2, "gate": 2, "state": 3, "ring_k": 3, "ring_v": 3}
STRIDED |= {"ring_a": 2, "ring_b": 2, "out": 2}
STRIDES = {f"{name}_strides": ("i32",) * count for name, count in STRIDED.items()}


def reports(capability: int, variants: list[tuple]):
    """Compile some variants."""
    for act, state, ring, operand, key_dim, value_dim in variants:
        block_k, num_warps, num_stages = raw_launch.choose_tiles(operand, state, key_dim)
        constants = {
            "H": 2,
            "HV": 6,
            "K": key_dim,
            "V": value_dim,
            "RING": 32,
            "BLOCK_K": block_k,
            "BLOCK_V": 16,
            "BLOCK_OUT": triton.next_power_of_2(value_dim),
            "SPLITS": 1,
            "STAGES": num_stages,
            "PREFETCH": 64,
            "ZERO_PADDING": True,
            "OPERAND": TRITON[operand],
            "USE_L2NORM": True,
            "BY_ROW": False,
            "fold_threshold": None,
            "rows_per_request": None,
        }
        pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr"), act)
        pointers |= dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "ring_a_ptr", "ring_b_ptr"), F32)
        pointers |= {"state_ptr": state, "ring_k_ptr": ring, "ring_v_ptr": ring}
        types = {name: f"*{NAMES[dtype]}" for name, dtype in pointers.items()}
        types |= {"is_fold_ptr": "*i8", "scale": "fp32", "beta_scale": "fp32", **STRIDES}
        options = {"num_warps": num_warps, "num_stages": num_stages}
        yield compiled(triton_raw.verify_raw_kernel, constants, types, capability, options)


if __name__ == "__main__":
    capability, *few = sys.argv[1:]
    print(json.dumps(list(reports(int(capability), FEW if few else VARIANTS))))
