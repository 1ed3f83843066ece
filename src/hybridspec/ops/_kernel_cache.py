"""Compiled kernels kept on disk between processes.

An entry is a file named by the digest of everything that decides what is in it; it begins with the
digest of the rest. Its files are run, so a folder in which others can write is not used. Whatever
cannot be kept or read is compiled again: the cache never makes a call fail.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["FOLDER_VARIABLE", "cached", "digest_of", "folder", "usable_folder"]

FOLDER_VARIABLE = "HYBRIDSPEC_KERNEL_CACHE"
_DIGEST_BYTES = hashlib.sha256().digest_size


def folder() -> Path:
    """Return where kernels are kept: the folder of the variable, or in the user's cache folder."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybridspec" / "kernels"


def digest_of(*parts: bytes) -> str:
    """Name an entry by parts whose lengths and order count."""
    key = hashlib.sha256()
    for part in parts:
        key.update(len(part).to_bytes(8, "little") + part)
    return key.hexdigest()


def cached(name: str, compile_kernel: Callable[[], bytes]) -> bytes:
    """Return an entry, or compile it and keep it.

    Args:
        name: from `digest_of`.
        compile_kernel: called where there is no entry, or one that is broken.
    """
    try:
        place = usable_folder() / f"{name}.cubin"
    except (OSError, RuntimeError):  # the latter: a user without a home
        return compile_kernel()
    with suppress(OSError):
        entry = place.read_bytes()
        digest, kernel = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if hashlib.sha256(kernel).digest() == digest:
            return kernel
    kernel = compile_kernel()
    with suppress(OSError):
        _write(place, hashlib.sha256(kernel).digest() + kernel)
    return kernel


def usable_folder() -> Path:
    """Make the folder, for its user alone.

    Raises:
        OSError: if it cannot be made or others can write to it.
        RuntimeError: if the user has no home.
    """
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}")
    return path


def _write(place: Path, entry: bytes) -> None:
    """Put a whole file in place, whoever else writes it at the same time."""
    with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".partial", delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(entry)
            file.close()
            partial.replace(place)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
