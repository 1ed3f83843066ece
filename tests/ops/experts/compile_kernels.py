"""Compile the kernels for the capabilities that the arguments name, without a GPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.experts.launch import choose_config, chunk_of
from hybridspec.ops.experts.triton_mix import (
    down_kernel,
    gate_up_kernel,
    route_kernel,
    sum_kernel,
)

BF16, FP32 = "*bf16", "*fp32"
SIZES = ("size", "inner", "shared_inner")
MATRICES = dict.fromkeys(("x_ptr", "gate_up_ptr", "down_ptr", "shared_ptr", "hidden_ptr"), BF16)
OTHERS = {"made_ptr": FP32, "weights_ptr": FP32, "out_ptr": BF16, "scores_ptr": BF16}
ROUTE = {"PER_ROW": 8, "IS_NORMALIZED": True, "BLOCK_E": 256, "BLOCK_P": 16}


def products(num_rows: int):
    """The products as `launch.mix` compiles them for sizes of Qwen3.5-35B-A3B."""
    config = choose_config(num_rows, 2)
    shared = {"BLOCK_M": config.rows, "CHUNK": chunk_of(8 * num_rows, config.rows)}
    tile = config.gate_up
    gate_up = {"PER_ROW": 8, "IS_DENSE": num_rows >= 32, "BLOCK_F": tile.columns}
    yield gate_up_kernel, {**shared, **gate_up, "BLOCK_K": tile.inner}, tile.stages
    tile = config.down
    down = {"IS_DENSE": num_rows >= 32, "BLOCK_D": tile.columns, "BLOCK_K": tile.inner}
    yield down_kernel, {**shared, **down}, tile.stages


VARIANTS = (
    *((*one, 4) for rows in (1, 32) for one in products(rows)),
    (route_kernel, ROUTE, 3, 1),
    (sum_kernel, {"PER_ROW": 8, "BLOCK_D": 1024}, 3, 4),
)

if __name__ == "__main__":
    reports = [
        compiled(
            kernel,
            constants,
            MATRICES | OTHERS,
            capability,
            {"num_warps": num_warps, "num_stages": num_stages},
            SIZES,
        )
        for kernel, constants, num_stages, num_warps in VARIANTS
        for capability in map(int, sys.argv[1:])
    ]
    print(json.dumps(reports))
