"""CUDA C++ kernels of the package, compiled for the device when they are first needed.

Needs the packages cuda-bindings and nvidia-cuda-nvrtc, which CUDA builds of torch bring; no
compiler has to be installed. Nothing is imported before a kernel is asked for. What was compiled is
kept on disk (`_kernel_cache`).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from hybridspec.ops import _kernel_cache

__all__ = ["SOURCES", "Kernel", "explain_compiler", "load_kernel"]

SOURCES = Path(__file__).parent


@functools.cache
def explain_compiler() -> str | None:
    """Return why kernels cannot be compiled here, or None."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401

        nvrtc.nvrtcVersion()
    except ModuleNotFoundError as error:
        if error.name in ("cuda", "cuda.bindings"):
            return "no compiler: the package cuda-bindings is not installed"
        return f"no compiler: the package cuda-bindings is broken ({error})"
    except RuntimeError as error:  # the library itself
        return f"no compiler: NVRTC cannot be loaded ({error})"
    except Exception as error:  # a broken or partial install may fail in any way
        return f"no compiler: the package cuda-bindings is broken ({error})"
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
            driver.cuLaunchKernel(*self._place(num_blocks), ctypes.addressof(arguments), 0)
        )  # fmt: skip

    def launch_together(self, num_blocks: int, params: ctypes.Structure) -> None:
        """Enqueue blocks that may wait for each other: all of them run at once, or none does."""
        from cuda.bindings import driver

        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _checked(
            driver.cuLaunchCooperativeKernel(
                *self._place(num_blocks), ctypes.addressof(arguments)
            )
        )  # fmt: skip

    def _place(self, num_blocks: int) -> tuple[Any, ...]:
        """The kernel, its grid, its blocks, their shared memory, and the stream."""
        return (
            self._function, num_blocks, 1, 1, self._threads, 1, 1, self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip


@functools.cache
def load_kernel(
    source: str, name: str, defines: tuple[tuple[str, object], ...], threads: int,
    shared_bytes: int, device: int, fuses: bool = True,
) -> Kernel:  # fmt: skip
    """Compile a kernel for a device and load it there.

    Args:
        source: path of the file, relative to `SOURCES`.
        name: kernel in it.
        defines: names and values of its macros.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        device: index of the device; must be the current one.
        fuses: whether the compiler may round a product and a sum once.

    Raises:
        RuntimeError: with the compiler's messages, if it refuses the source.
    """
    from cuda.bindings import driver

    torch.cuda.set_device(device)  # makes torch's context that of this thread
    major, minor = torch.cuda.get_device_capability(device)
    cubin = _compiled(source, defines, f"sm_{major}{minor}", fuses)
    module = _checked(driver.cuModuleLoadData(cubin))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return Kernel(function, threads, shared_bytes)


@functools.cache
def _compiled(
    source: str, defines: tuple[tuple[str, object], ...], target: str, fuses: bool = True
) -> bytes:
    options = [f"--gpu-architecture={target}", "--std=c++17"]
    options += [] if fuses else ["--fmad=false"]
    options += [f"--define-macro={name}={value}" for name, value in defines]
    files = _files_of(source)
    named = [part for name, text in files.items() for part in (name.encode(), text)]
    key = _kernel_cache.digest_of(_compiler_version(), " ".join(options).encode(), *named)
    return _kernel_cache.cached(key, lambda: _compile(source, files, options))


def _compiler_version() -> bytes:
    from cuda.bindings import nvrtc

    major, minor = _checked(nvrtc.nvrtcVersion())
    return f"NVRTC {major}.{minor}".encode()


def _files_of(source: str) -> dict[str, bytes]:
    """Read a kernel and every header that it can include, by the names it includes them by."""
    headers = [*(SOURCES / "cuda").glob("*.cuh"), *(SOURCES / source).parent.glob("*.cuh")]
    files = {source: (SOURCES / source).read_bytes()}
    return files | {header.name: header.read_bytes() for header in sorted(headers)}


def _compile(source: str, files: dict[str, bytes], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    headers = {name.encode(): text for name, text in files.items() if name != source}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            files[source], source.encode(), len(headers), list(headers.values()), list(headers)
        )
    )
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status.value:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source} does not compile with {' '.join(options)}:\n{log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or the compiler returned besides its status."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else values
