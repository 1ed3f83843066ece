"""Whether Triton supports a device: hardware and installed compiler are two questions.

Imports neither Triton nor touches a GPU by itself: the device is asked only for a tensor that
already lives on one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

import torch

__all__ = [
    "CPU_CAPABILITY",
    "FLOATS",
    "INTEGERS",
    "LOWEST_CAPABILITY",
    "capability",
    "compiler_version",
    "explain_target",
    "explain_tensors",
    "round_up_to_power_of_two",
]

LOWEST_CAPABILITY = (8, 0)
CPU_CAPABILITY = (0, 0)  # of Triton's interpreter

# First Triton release that was seen to emit code for a capability (compiled ahead of time; an older
# compiler may abort the process instead of raising, so it is never asked).
_FIRST_COMPILER = {
    (3, 6): ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (12, 0), (12, 1)),
    (3, 9): ((10, 7), (11, 0)),
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int8, torch.int32, torch.int64)


@functools.cache
def compiler_version() -> str | None:
    """Version of the installed Triton, or None; reads package metadata only."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def explain_target(capability: tuple[int, int], version: str | None) -> str | None:
    """Return why a device of this compute capability is not supported, or None.

    Args:
        capability: compute capability of the device.
        version: installed Triton, or None.
    """
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < LOWEST_CAPABILITY:
        lowest = "sm_{}{}".format(*LOWEST_CAPABILITY)
        return (
            f"hardware {name} lacks the matrix and copy instructions used; needs {lowest} or later"
        )
    if version is None:
        return f"no compiler: Triton is not installed (device is {name})"
    first = next((v for v, served in _FIRST_COMPILER.items() if capability in served), None)
    installed = tuple(int(part) for part in version.split(".")[:2])
    if first is None:
        return f"compiler: no Triton release is known to emit {name} (installed: {version})"
    if installed < first:
        needed = ".".join(map(str, first))
        return f"compiler: Triton {version} does not emit {name}; needs {needed} or later"
    return None


@functools.cache
def _explain_device(index: int) -> str | None:
    if torch.version.hip is not None:
        return "hardware: only NVIDIA devices are supported"
    return explain_target(_device_capability(index), compiler_version())


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the device of a tensor."""
    if not tensor.is_cuda:
        return CPU_CAPABILITY
    return _device_capability(tensor.device.index)


@functools.cache
def _device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _explain_cpu() -> str | None:
    if compiler_version() is None:
        return "Triton is not installed"
    import triton

    return None if triton.knobs.runtime.interpret else "the tensors are not on a CUDA device"


def explain_tensors(
    named: list[tuple[str, torch.Tensor]], dtypes: tuple[torch.dtype, ...] = FLOATS
) -> str | None:
    """Return why the tensors of a call are not supported, or None.

    On a CPU only Triton's interpreter can, which is a choice for tests.

    Args:
        named: names and tensors; the first decides the device.
        dtypes: dtypes that the kernel takes.
    """
    device = named[0][1].device
    reason = _explain_device(device.index) if device.type == "cuda" else _explain_cpu()
    if reason is not None:
        return reason
    for name, tensor in named:
        if tensor.device != device:
            return f"{name} is on {tensor.device}, {named[0][0]} is on {device}"
        if tensor.dtype not in dtypes:
            return f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}"
    return None


def round_up_to_power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
