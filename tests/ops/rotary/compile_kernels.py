"""Compile the kernels for the capabilities that the arguments name, without a GPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.paged_attention.triton_append import append_kernel
from hybridspec.ops.rotary.triton_rotary import norm_and_rotate_kernel

BF16, FP32 = "*bf16", "*fp32"
ROTARY = {"x_ptr": BF16, "weight_ptr": FP32, "cos_ptr": FP32, "sin_ptr": FP32, "out_ptr": BF16}
APPEND = dict.fromkeys(("k_ptr", "v_ptr", "k_pages_ptr", "v_pages_ptr"), BF16)
VARIANTS = (
    (
        norm_and_rotate_kernel,
        {"D": 256, "ROTARY": 64, "BLOCK_H": 4, "BLOCK_D": 256},
        {**ROTARY, "eps": "fp32"},
        {"num_warps": 4},
    ),
    (
        append_kernel,
        {"D": 256, "BLOCK_D": 256, "REQUESTS": 256},
        {**APPEND, "is_dead_ptr": "*i1"},
        {"num_warps": 1},
    ),
)

if __name__ == "__main__":
    reports = [
        compiled(kernel, constants, types, capability, options)
        for kernel, constants, types, options in VARIANTS
        for capability in map(int, sys.argv[1:])
    ]
    print(json.dumps(reports))
