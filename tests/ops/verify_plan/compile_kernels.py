"""Compile every kernel for the capability that is named, without a GPU; `--few`: each once.

Prints registers and spills as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hybridspec.ops.verify_plan import (
    launch,
    triton_build,
    triton_compact,
    triton_select,
    triton_select_large,
)

# Pointers that are not int32, by name; scalars are int32.
POINTERS = {
    "confidences_ptr": "*fp32",
    "table_ptr": "*fp32",
    "tokens_ptr": "*i64",
    "out_tokens_ptr": "*i64",
    "positions_ptr": "*i64",
    "is_fold_ptr": "*i8",
    "hidden_ptr": "*bf16",
    "out_ptr": "*bf16",
    "temperature_ptr": "*fp32",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "seeds_ptr": "*i64",
    "out_temperature_ptr": "*fp32",
    "out_top_p_ptr": "*fp32",
    "out_min_p_ptr": "*fp32",
    "out_seeds_ptr": "*i64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(kernel, constants: dict, capability: int, num_warps: int) -> dict:
    """Compile one kernel and read its resource usage."""
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        usage, code = (
            subprocess.run(
                [CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    assert "EXIT" in code
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "num_warps": num_warps,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        # Stores to and loads from local memory: that is where registers spill to.
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
    }


def variants(is_few: bool):
    """Yield each kernel with the constants and warps of its heaviest launches."""
    switches = {"TABLE_BINS": 16, "HAS_NUM_DRAFTS": True}
    for requests, drafts in ((256, 3), (256, 7), (2048, 0))[: 1 if is_few else 3]:
        yield (
            triton_build.plan_kernel,
            {
                "NUM_DRAFTS": drafts,
                **switches,
                "BLOCK_TOKENS": triton.next_power_of_2(drafts + 1),
                "BLOCK": requests,
                "BLOCK_ROWS": 1024,
            },
            launch.launch_config(requests, drafts).select_warps,
        )
    for requests in (2048,) if is_few else (2048, 4096):
        yield (
            triton_select.select_kernel,
            {"NUM_DRAFTS": 7, **switches, "BLOCK": requests},
            launch.launch_config(requests, 7).select_warps,
        )
    sizes = {"TOKENS": 8, "BLOCK_TOKENS": 8, "BLOCK": 32, "BLOCK_ROWS": 256}
    yield triton_build.build_kernel, sizes, 2
    large = {"NUM_DRAFTS": 7, "BLOCK": 256}
    scores = {"NUM_DRAFTS": 7, "TABLE_BINS": 16, "HAS_NUM_DRAFTS": True, "BLOCK": 1024}
    yield triton_select_large.score_kernel, scores, 4
    yield triton_select_large.refine_kernel, {"PASS": 2, "BLOCK": 1024}, 4
    yield triton_select_large.count_kernel, large, 4
    yield triton_select_large.offsets_kernel, {**large, "MOST_BLOCKS": 64}, 4
    yield triton_compact.gather_rows_kernel, {"BLOCK": 1024}, 4
    yield triton_compact.gather_sampling_kernel, {"BLOCK": 256}, 4
    yield triton_compact.count_groups_kernel, {"BLOCK": 1024}, 4
    groups = {"IS_ONE_BLOCK": False, "BLOCK": 1024, "MOST_BLOCKS": 32}
    yield triton_compact.compact_groups_kernel, groups, 4
    yield triton_compact.copy_page_table_kernel, {"BLOCK": 1024}, 4


if __name__ == "__main__":
    capability, *few = sys.argv[1:]
    reports = [
        compiled(kernel, constants, int(capability), num_warps)
        for kernel, constants, num_warps in variants(is_few=bool(few))
    ]
    print(json.dumps(reports))
