"""Compile the kernels for the capabilities that the arguments name, without a GPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.products.launch import ROW_COUNTS, choose_launch, num_parts
from hybridspec.ops.products.triton_multiply import add_parts_kernel, multiply_kernel

F, D = 4096, 4096

if __name__ == "__main__":
    reports = []
    for capability in map(int, sys.argv[1:]):
        for rows in ROW_COUNTS:
            config = choose_launch(divmod(capability, 10), rows, 2)
            constants = {
                "F": F,
                "D": D,
                "PARTS": num_parts(F, D),
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_K": config.block_k,
                "GROUP": 8,
            }
            types = dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16") | {"out_ptr": "*fp32"}
            constants["residual_ptr"] = None  # added with the parts
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            reports.append(compiled(multiply_kernel, constants, types, capability, options))
        types = {"parts_ptr": "*fp32", "residual_ptr": "*bf16", "out_ptr": "*bf16"}
        constants = {"F": F, "PARTS": 2, "BLOCK": 1024}
        reports.append(compiled(add_parts_kernel, constants, types, capability, {"num_warps": 4}))
    print(json.dumps(reports))
