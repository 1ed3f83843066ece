"""Compile the kernel for the capabilities that the arguments name, without a GPU."""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.activations.triton_gate import gate_kernel

TYPES = dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16")

if __name__ == "__main__":
    reports = [
        compiled(
            gate_kernel, {"BLOCK": 1024, "IS_SILU": is_silu}, TYPES, capability, {"num_warps": 4}
        )
        for is_silu in (False, True)
        for capability in map(int, sys.argv[1:])
    ]
    print(json.dumps(reports))
