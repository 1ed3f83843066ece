"""CUDA C++ kernels of the package, compiled for the device when they are first needed.

Needs the packages cuda-bindings and nvidia-cuda-nvrtc, which CUDA builds of torch bring; no
compiler has to be installed. Nothing is imported before a kernel is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

__all__ = ["SOURCES", "Kernel", "explain_compiler", "load_kernel"]

SOURCES = Path(__file__).parent
_HEADER = SOURCES / "cuda" / "primitives.cuh"


@functools.cache
def explain_compiler() -> str | None:
    """Say why kernels cannot be compiled here, or return None."""
    try:
        missing = importlib.util.find_spec("cuda.bindings.nvrtc") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        return "no compiler: the package cuda-bindings is not installed"
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library itself
        return f"no compiler: NVRTC cannot be loaded ({error})"
    return None


class Kernel:
    """A loaded kernel that takes one struct by value."""

    def __init__(self, function: object, threads: int, shared_bytes: int) -> None:
        self._function = function
        self._threads = threads
        self._shared_bytes = shared_bytes

    def launch(self, num_blocks: int, params: ctypes.Structure) -> None:
        """Enqueue on the current stream of the current device."""
        from cuda.bindings import driver

        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _checked(
            driver.cuLaunchKernel(
                self._function, num_blocks, 1, 1, self._threads, 1, 1, self._shared_bytes,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(arguments), 0,
            )
        )  # fmt: skip


@functools.cache
def load_kernel(
    source: str, name: str, defines: tuple[tuple[str, object], ...], threads: int,
    shared_bytes: int, device: int,
) -> Kernel:  # fmt: skip
    """Compile a kernel for a device and load it there.

    Args:
        source: path of the file, relative to `SOURCES`.
        name: kernel in it.
        defines: names and values of its macros.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        device: index of the device; must be the current one.

    Raises:
        RuntimeError: with the compiler's messages, if it refuses the source.
    """
    from cuda.bindings import driver

    torch.cuda.set_device(device)  # makes torch's context that of this thread
    major, minor = torch.cuda.get_device_capability(device)
    module = _checked(driver.cuModuleLoadData(_compiled(source, defines, f"sm_{major}{minor}")))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return Kernel(function, threads, shared_bytes)


@functools.cache
def _compiled(source: str, defines: tuple[tuple[str, object], ...], target: str) -> bytes:
    from cuda.bindings import nvrtc

    program = _checked(
        nvrtc.nvrtcCreateProgram(
            (SOURCES / source).read_bytes(), source.encode(), 1, [_HEADER.read_bytes()],
            [_HEADER.name.encode()],
        )
    )  # fmt: skip
    options = [f"--gpu-architecture={target}", "--std=c++17"]
    options += [f"--define-macro={name}={value}" for name, value in defines]
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status.value:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source} does not compile for {target}:\n{log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or the compiler returned besides its status."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None
