"""Compile the kernels around the library for the capabilities that the arguments name."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.gated_delta_rule import triton_prefill as kernels

BF16, FP32 = "*bf16", "*fp32"
ROWS = dict.fromkeys(
    ("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "q_out_ptr", "k_out_ptr", "v_out_ptr"), BF16
)
GATES = dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "log_decay_ptr", "beta_ptr"), FP32)
STATES = {"HV": 32, "V": 128, "K": 128, "BLOCK": 1024}
# kernel, constants, types, warps
VARIANTS = (
    (kernels.list_chunks_kernel, {"CHUNK": 64, "REQUESTS": 256, "BLOCK": 16}, {}, 4),
    (
        kernels.prepare_kernel,
        {
            "H": 16, "HV": 32, "K": 128, "V": 128, "BLOCK_H": 16, "BLOCK_HV": 32, "BLOCK_K": 128,
            "BLOCK_V": 128, "NORM": True,
        },
        {**ROWS, **GATES, "beta_scale": "fp32"},
        4,
    ),
    (
        kernels.move_states_kernel,
        STATES | {"IS_STORE": False},
        {"pool_ptr": FP32, "batch_ptr": FP32},
        4,
    ),
    (
        kernels.move_states_kernel,
        STATES | {"IS_STORE": True},
        {"pool_ptr": BF16, "batch_ptr": FP32},
        4,
    ),
    (
        kernels.finish_kernel,
        {"HV": 32, "V": 128, "REQUESTS": 256, "BLOCK": 4096},
        {"y_ptr": BF16, "out_ptr": BF16},
        4,
    ),
)  # fmt: skip

if __name__ == "__main__":
    reports = [
        compiled(kernel, constants, types, capability, {"num_warps": num_warps})
        for kernel, constants, types, num_warps in VARIANTS
        for capability in map(int, sys.argv[1:])
    ]
    print(json.dumps(reports))
