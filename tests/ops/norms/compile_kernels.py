"""Compile the kernel for the capabilities that the arguments name, without a GPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.norms.triton_norms import add_rms_norm_kernel, rms_norm_kernel

TYPES = {
    "x_ptr": "*bf16", "gate_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16",
    "eps": "fp32",
}  # fmt: skip
# (D, heads of a program, warps, constants): a hidden row, heads with and without a gate
VARIANTS = (
    (4096, 1, 8, {"gate_ptr": None}),
    (128, 8, 2, {}),
    (256, 4, 2, {"gate_ptr": None}),
)

if __name__ == "__main__":
    reports = [
        compiled(
            rms_norm_kernel,
            {"D": size, "BLOCK_H": heads, "BLOCK_D": size, **constants},
            TYPES,
            capability,
            {"num_warps": num_warps},
        )
        for size, heads, num_warps, constants in VARIANTS
        for capability in map(int, sys.argv[1:])
    ]
    types = {"parts_ptr": "*fp32", "residual_ptr": "*bf16", "weight_ptr": "*fp32"}
    types |= {"out_ptr": "*bf16", "eps": "fp32"}
    reports += [
        compiled(
            add_rms_norm_kernel,
            {"PARTS": 2, "D": 4096, "BLOCK_D": 4096},
            types,
            capability,
            {"num_warps": 8},
        )
        for capability in map(int, sys.argv[1:])
    ]
    print(json.dumps(reports))
