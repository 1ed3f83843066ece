"""Compile the kernels that choose tokens for the capability that is named, without a GPU.

`--few` leaves variants out. Prints registers and stack bytes as JSON.
"""

from __future__ import annotations

import json
import sys

from helpers.triton_resources import compiled
from hybridspec.ops.sampling import triton_choose, triton_edit, triton_weigh
from hybridspec.ops.sampling.mass import TILE

# Types of pointers that are not int32, by name; scalars are int32.
TYPES = {
    "logits_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "seed_ptr": "*i64",
    "peaks_ptr": "*fp32",
    "ratios_ptr": "*fp32",
    "chunks_ptr": "*fp32",
    "facts_ptr": "*fp64",
    "masses_ptr": "*fp32",
    "sums_ptr": "*i64",
    "out_ptr": "*i64",
    "drafts_ptr": "*i64",
    "repetition_ptr": "*fp32",
    "frequency_ptr": "*fp32",
    "presence_ptr": "*fp32",
    "counts_ptr": "*i16",
    "bias_values_ptr": "*fp32",
}
SIZES = {"TILES": 128, "SHARE": 8, "GROUP": 2, "LENGTH": 1024, "BLOCK": TILE}
EDITS = ("HAS_COUNTS", "HAS_BIAS", "HAS_WORDS", "HAS_MASKS", "HAS_MASK")


# Of a vocabulary of one tile: Triton compiles integers that are 1 in.
ONE_TILE = {
    **dict.fromkeys(("num_tiles", "tiles_per_program", "TILES", "SHARE", "GROUP"), 1),
    "BLOCK": 512,
}


def variants(is_few: bool):
    """Yield each kernel with the constants of its launches, the heaviest last."""
    switches = ("HAS_NOISE", "HAS_FILTERS")
    for flags in ((True, True), (True, False), (False, False))[: 1 if is_few else 3]:
        for kernel in (triton_choose.scan_kernel, triton_choose.pick_kernel):
            yield kernel, {**dict(zip(switches, flags, strict=True)), **SIZES}
    everything = dict.fromkeys((*switches, *EDITS), True)
    last = (triton_weigh.weigh_kernel, triton_weigh.settle_kernel)
    for kernel in (triton_choose.scan_kernel, triton_choose.pick_kernel, *last):
        yield kernel, {**everything, **SIZES, **ONE_TILE}
    for kernel in last:
        yield kernel, SIZES
    edits = {**dict.fromkeys(EDITS, False), "BLOCK": TILE, "GROUP": 64}
    for name in () if is_few else EDITS:
        yield triton_edit.edit_kernel, {**edits, name: True}
    yield triton_edit.edit_kernel, {**edits, **everything}


if __name__ == "__main__":
    capability, *few = sys.argv[1:]
    options = {"num_warps": 8, "enable_fp_fusion": False}
    overlapped = {"IS_OVERLAPPED": int(capability) >= 90}
    reports = [
        compiled(
            kernel,
            {
                name: value
                for name, value in (constants | overlapped).items()
                if name in kernel.arg_names
            },
            TYPES,
            int(capability),
            options,
        )
        for kernel, constants in variants(is_few=bool(few))
    ]
    print(json.dumps(reports))
