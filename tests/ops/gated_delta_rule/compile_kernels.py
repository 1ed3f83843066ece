"""Compile every kernel for the capability that is named, without a GPU; `--few`: few variants.

Prints registers, spills and shared memory as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
import triton
import triton.language as tl

from helpers.triton_resources import compiled
from hybridspec.ops._triton_support import compiler_version
from hybridspec.ops.causal_conv1d import triton_prefill as conv_prefill
from hybridspec.ops.causal_conv1d import triton_verify as conv
from hybridspec.ops.gated_delta_rule import (
    launch,
    launch_ordered,
    prefix,
    triton_fold,
    triton_one_token,
    triton_ordered,
    triton_verify,
)
from hybridspec.ops.ring import triton_block_cursors, triton_copies, triton_cursors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "fp16", F32: "fp32"}
TRITON = {BF16: tl.bfloat16, F16: tl.float16, F32: tl.float32}
MODES = [
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (BF16, F16, F16),
    (BF16, F32, BF16),
    (BF16, F32, F32),
    (F32, F32, F32),
]
# K, V, rows of a request
SHAPES = [(128, 128, 8), (128, 128, 16), (256, 256, 8), (96, 192, 8), (64, 64, 8)]

ROWS = ("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr")
PARAMETERS = ("A_log_ptr", "dt_bias_ptr")
STRIDED = {"q": 2, "k": 2, "v": 2, "gate": 2, "state": 3, "ring_k": 3, "ring_u": 3}
STRIDED |= {"ring_decay": 2, "out": 2}
STRIDES = {f"{name}_strides": ("i32",) * count for name, count in STRIDED.items()}


def verify_variants(capability: int, is_few: bool):
    """Yield constants, pointers and options of the verify kernel as `launch` would pick them."""
    shapes = [(mode, SHAPES[0]) for mode in MODES] + [(MODES[0], shape) for shape in SHAPES[1:]]
    for (act, state, ring), (key_dim, value_dim, tokens) in shapes[:1] if is_few else shapes:
        operands = launch.EXACT
        if act != F32:
            operands = launch.Operands(act=act, state=state, ring=ring, precision="tf32")
        config = launch.choose_verify_launch(
            divmod(capability, 10), compiler_version(), 10**4, key_dim, value_dim, tokens, operands
        )
        constants = {
            "H": 2,
            "HV": 6,
            "K": key_dim,
            "V": value_dim,
            "RING": 32,
            "WINDOW": 16,
            "TOKENS": tokens,
            "BLOCK_K": config.block_k,
            "BLOCK_V": config.block_v,
            "BLOCK_OUT": triton.next_power_of_2(value_dim),
            "SPLITS": config.splits,
            "STAGES": config.num_stages,
            "ACT_OPERAND": TRITON[operands.act],
            "STATE_OPERAND": TRITON[operands.state],
            "RING_OPERAND": TRITON[operands.ring],
            "PRECISION": operands.precision,
            "PREFETCH": config.prefetch_lines,
            "USE_L2NORM": True,
            "BY_ROW": False,
            "ZERO_PADDING": True,
            "FOLD_BY_SLOT": False,
            "TOKEN_DECAY": False,
            "slot_stride": 1,
            "fold_threshold": None,
            "rows_per_request": None,
            "rand_seed_ptr": None,
        }
        pointers = dict.fromkeys(ROWS, act)
        pointers |= {"state_ptr": state, "ring_k_ptr": ring, "ring_u_ptr": ring}
        pointers |= dict.fromkeys((*PARAMETERS, "ring_decay_ptr"), F32)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.max_registers:
            options["maxnreg"] = config.max_registers
        yield constants, pointers, options
        if (key_dim, value_dim, tokens) == SHAPES[0]:  # as for blocks of another engine
            del constants["slot_stride"]
            yield constants | {"FOLD_BY_SLOT": True, "TOKEN_DECAY": True}, pointers, options
            if state in (BF16, F16):  # folds rounded by chance
                del constants["rand_seed_ptr"]
                warps = max(2, config.num_warps)
                yield constants, pointers, {"num_warps": warps, "num_stages": config.num_stages}


def small_variants(is_few: bool):
    """Yield the other kernels with their constants, pointers and warps."""
    heads = {"H": 2, "HV": 6, "K": 128, "V": 128}
    geometry = heads | {"RING": 32, "WINDOW": 16}
    for state, ring in ((F32, BF16), (BF16, BF16), (F32, F32))[: 1 if is_few else 3]:
        constants = geometry | {
            "BLOCK_K": 64,
            "BLOCK_V": 16,
            "OPERAND": TRITON[ring],
            "PRECISION": "ieee" if ring == F32 else "tf32",
            "IS_FLAG": False,
            "TOKEN_DECAY": False,
        }
        pointers = {"state_ptr": state, "ring_k_ptr": ring, "ring_u_ptr": ring}
        yield (
            triton_fold.advance_kernel,
            constants,
            pointers | {"ring_decay_ptr": F32},
            4 if ring == F32 else 1,
        )
        del constants["IS_FLAG"]
        yield (
            triton_fold.advance_rows_kernel,
            constants
            | {"MOST_ROWS": 16, "BLOCK_V": prefix.block_rows(128, ring), "TOKEN_DECAY": True},
            pointers | {"ring_decay_ptr": F32},
            4,
        )
        yield (
            triton_one_token.decode_kernel,
            heads | {"COLUMNS": 128, "BLOCK_V": 16, "USE_L2NORM": True},
            dict.fromkeys(ROWS, ring) | {"state_ptr": state} | dict.fromkeys(PARAMETERS, F32),
            1,
        )
    yield triton_block_cursors.commit_blocks_kernel, {"RING": 32, "BLOCK": 128}, {}, 4
    yield triton_block_cursors.reset_blocks_kernel, {"BLOCK": 128}, {}, 4
    yield triton_cursors.commit_kernel, {"RING": 32, "BLOCK": 128}, {}, 4
    yield triton_cursors.decide_folds_kernel, {"BLOCK": 128}, {}, 4
    pools = {"pool_ptr": BF16, "values_ptr": BF16}
    yield triton_copies.write_slots_kernel, {"BLOCK": 1024}, pools, 4
    yield triton_copies.reset_slots_kernel, {"BLOCK": 1024}, pools, 4
    constants = {"D": 12288, "RING": 16, "WIDTH": 4, "BLOCK_D": 256, "IS_SILU": True}
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "conv_ring_ptr", "out_ptr"), BF16)
    yield conv.verify_kernel, constants | {"TOKENS": 8, "bias_ptr": None}, pointers, 2
    yield conv_prefill.prefill_kernel, constants | {"ROWS": 16, "bias_ptr": None}, pointers, 4


def ordered_variants(is_few: bool):
    """Yield the verify kernel with sums in one order, as `launch_ordered` calls it."""
    for state in (F32,) if is_few else (F32, BF16):
        yield (
            triton_ordered.ordered_verify_kernel,
            {"H": 2, "HV": 6, "K": 128, "V": 128, "RING": 32}
            | {
                "WINDOW": 32,
                "TOKENS": 16,
                "BLOCK_K": 64,
                "BLOCK_V": 32,
                "STAGES": launch_ordered.STAGES,
                "LINES": 32 * 128 * state.itemsize // 128,
                "STATE_OPERAND": TRITON[state],
                "RING_OPERAND": TRITON[BF16],
                "PRECISION": "tf32",
                "USE_L2NORM": True,
            },
            dict.fromkeys((*ROWS, "ring_k_ptr", "ring_u_ptr"), BF16)
            | {"state_ptr": state}
            | dict.fromkeys((*PARAMETERS, "ring_decay_ptr"), F32),
            launch_ordered.WARPS,
        )


def reports(capability: int, is_few: bool):
    """Compile all variants of every kernel, or a few."""
    named = {
        "is_fold_ptr": "*i8",
        "rand_seed_ptr": "*i64",
        "scale": "fp32",
        "beta_scale": "fp32",
        **STRIDES,
    }
    for constants, pointers, options in verify_variants(capability, is_few):
        types = {name: f"*{NAMES[dtype]}" for name, dtype in pointers.items()}
        yield compiled(triton_verify.verify_kernel, constants, named | types, capability, options)
    for kernel, constants, pointers, num_warps in itertools.chain(
        small_variants(is_few), ordered_variants(is_few)
    ):
        types = {name: f"*{NAMES[dtype]}" for name, dtype in pointers.items()}
        yield compiled(kernel, constants, named | types, capability, {"num_warps": num_warps})


if __name__ == "__main__":
    capability, *few = sys.argv[1:]
    print(json.dumps(list(reports(int(capability), is_few=bool(few)))))
