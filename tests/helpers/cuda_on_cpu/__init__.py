"""CUDA C++ kernels of the package, compiled with g++ and run lane by lane on the CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

from hybridspec.ops._nvrtc import SOURCES

__all__ = ["CpuKernel", "load_kernel"]

HERE = Path(__file__).parent
# Without the last one the loader would unite variables of the same name across libraries, and their
# sizes differ from kernel to kernel.
FLAGS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique"]


class CpuKernel:
    """Stands in for `hybridspec.ops._nvrtc.Kernel`."""

    def __init__(self, library: Path, threads: int, shared_bytes: int) -> None:
        functions = ctypes.CDLL(str(library))
        assert functions.threads() == threads
        self._run, self._shared_bytes = functions.run, shared_bytes

    def launch(self, num_blocks: int, params: ctypes.Structure) -> None:
        self._run(ctypes.byref(params), num_blocks, self._shared_bytes)

    launch_together = launch


@functools.cache
def load_kernel(
    source: str,
    name: str,
    defines: tuple[tuple[str, object], ...],
    threads: int,
    shared_bytes: int,
    device: int | None,
    fuses: bool = True,
) -> CpuKernel:
    """Stand in for the function of this name in `hybridspec.ops._nvrtc`."""
    macros = [f"-D{key}={value}" for key, value in defines]
    macros += [] if fuses else ["-ffp-contract=off"]
    headers = sorted((SOURCES / source).parent.glob("*.cuh"))
    files = [HERE / "primitives.cuh", HERE / f"run_{name}.cpp", SOURCES / source, *headers]
    key = hashlib.sha256("".join([*FLAGS, *macros, *(file.read_text() for file in files)]).encode())
    library = Path(tempfile.gettempdir()) / f"hybridspec-{name}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{id(macros)}.so")
        folders = [f"-I{HERE}", f"-I{(SOURCES / source).parent}"]
        command = ["g++", *FLAGS, *folders, *macros, str(HERE / f"run_{name}.cpp")]
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.replace(library)
    return CpuKernel(library, threads, shared_bytes)
