"""Compile the kernels for the capability that is named, without a GPU; `--few`: for one shape.

Prints registers, stack and shared memory as JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from helpers.triton_resources import compiled
from hybridspec.ops._triton_support import round_up_to_power_of_two
from hybridspec.ops.paged_attention import (
    launch,
    launch_prefill,
    triton_pieces,
    triton_prefill,
    triton_verify,
)

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# query heads, key heads, D, rows of a request, page size, dtype; requests: 8, and many
SHAPES = [
    (16, 2, 256, 4, 16, torch.bfloat16),
    (16, 2, 256, 8, 128, torch.bfloat16),
    (32, 8, 128, 4, 16, torch.bfloat16),
    (8, 8, 96, 8, 1, torch.float16),
    (16, 1, 192, 8, 64, torch.bfloat16),
    (64, 8, 64, 4, 16, torch.bfloat16),
    (16, 2, 256, 4, 16, torch.float32),
]


def variants(capability: int, shapes: list[tuple]):
    """Yield kernels with constants, pointers and options as `launch` would pick them."""
    cases = [(*shape, 8) for shape in shapes] + [(*shape, 256) for shape in shapes[:1]]
    for query_heads, heads, head_dim, rows, page_size, dtype, requests in cases:
        group = query_heads // heads
        config = launch.choose_launch(
            divmod(capability, 10), 132, requests, rows * group, head_dim, dtype.itemsize
        )
        sizes = launch.kernel_sizes(config, requests, rows, heads, group, head_dim, page_size)
        floats = ("q_ptr", "k_ptr", "v_ptr", "k_pages_ptr", "v_pages_ptr", "out_ptr")
        types = dict.fromkeys(floats, f"*{NAMES[dtype]}")
        types |= {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "scale_log2": "fp32"}
        types |= dict.fromkeys(("q_strides", "k_strides", "v_strides", "out_strides"), ("i32",) * 2)
        types |= {"pages_strides": ("i32",) * 3}
        for kernel, constants, num_warps in (
            (triton_verify.split_kernel, sizes.split | {"ALIGNMENT": 16}, config.num_warps),
            (triton_verify.finish_kernel, sizes.finish, launch.FINISH_WARPS),
        ):
            yield kernel, constants, types, {"num_warps": num_warps}
        constants = {
            "HEADS": heads, "GROUP": group, "D": head_dim, "PAGE_SIZE": page_size,
            "ALIGNMENT": 16, "BLOCK_M": 16, "BLOCK_N": config.block_n, "COLUMNS": 32 if
            head_dim % 64 else 64, "STAGES": config.num_stages, "PIECE": 512,
        }  # fmt: skip
        options = {"num_warps": config.num_warps}
        yield triton_pieces.piece_kernel, constants, types, options
        constants = {"QUERY_HEADS": query_heads, "D": head_dim, "PIECE": 512}
        constants |= {"BLOCK_D": round_up_to_power_of_two(head_dim)}
        yield triton_pieces.join_kernel, constants, types, {"num_warps": 1}
        prompts = launch_prefill.choose_launch(divmod(capability, 10), head_dim, dtype.itemsize)
        constants = launch_prefill.kernel_sizes(prompts, heads, group, head_dim, page_size)
        options = {"num_warps": prompts.num_warps}
        yield triton_prefill.prefill_kernel, constants | {"ALIGNMENT": 16}, types, options


if __name__ == "__main__":
    capability, few = int(sys.argv[1]), sys.argv[2:]
    reports = [
        compiled(kernel, constants, types, capability, options)
        for kernel, constants, types, options in variants(
            capability, SHAPES[2:3] if few else SHAPES
        )
    ]
    print(json.dumps(reports))
