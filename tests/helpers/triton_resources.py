"""Compile a kernel without a GPU and read what its machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["compiled"]

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(
    kernel,
    constants: dict,
    types: dict,
    capability: int,
    options: dict,
    aligned: tuple[str, ...] = (),
) -> dict:
    """Compile one kernel and read its resource usage.

    Args:
        kernel: a jitted function.
        constants: values of its constexpr parameters.
        types: types of parameters that are not int32 (or pointers to int32); a tuple of types
            for a tuple.
        capability: such as 90.
        options: such as num_warps.
        aligned: integers that 16 divides, besides strides.
    """
    signature, divisible = {}, {}
    for i, name in enumerate(kernel.arg_names):
        default = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
        if isinstance(signature[name], tuple):
            divisible |= {(i, j): [["tt.divisibility", 16]] for j in range(len(signature[name]))}
        elif signature[name].startswith("*") or "stride" in name or name in aligned:
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True, **options},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return {
        "kernel": f"{kernel.__module__}.{kernel.__name__}",
        "capability": capability,
        "types": [value for value in signature.values() if value[0].startswith("*")],
        "constants": {name: str(value) for name, value in constants.items()},
        "options": options,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": binary.metadata.shared,
    }
