"""Compile the kernel that looks up, for the capabilities that the arguments name, on a CPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.lookup.triton_look_up import look_up_kernel

CONSTANTS = {
    "NUM_TOKENS": 2,
    "MAX_PLACES": 16,
    "MAX_AGREEMENT": 16,
    "BLOCK": 1024,
    "BLOCK_DRAFTS": 8,
}

if __name__ == "__main__":
    types = {"drafts_ptr": "*i64"}
    print(
        json.dumps(
            [
                compiled(
                    look_up_kernel, {**CONSTANTS, **extra}, types, capability, {"num_warps": 8}
                )
                for capability in map(int, sys.argv[1:])
                for extra in ({}, {"count": 1, "BLOCK_DRAFTS": 1, "page_size": 1})
            ]
        )
    )
