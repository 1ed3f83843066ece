"""How much memory of the host this process may still take.

A container's limit does not show in the machine's figures: a process that exceeds it is killed,
whatever the machine has free. It is looked up in the control groups that the process is in, of
version 2 (`memory.max`) and of version 1 (`memory.limit_in_bytes`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_host_bytes"]

_ROOT = Path("/")
_FILES = (  # of versions 2 and 1: limit, usage, and what of it is given up on demand
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int:
    """Return what is free on the machine and within the limits of the process's control groups."""
    return max(min([_machine_bytes(_ROOT), *_group_bytes(_ROOT)]), 0)


def _machine_bytes(root: Path) -> int:
    """Return what the kernel could hand out without swapping, caches that it gives up included."""
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_bytes(root: Path) -> Iterator[int]:
    """Return what each control group around the process leaves it."""
    for group in _groups(root):
        for limit_file, usage_file, inactive in _FILES:
            limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
            if limit.isdecimal() and usage.isdecimal():  # "max" is none
                stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
                yield int(limit) - int(usage) + int(stat.get(inactive, "0"))


def _groups(root: Path) -> Iterator[Path]:
    """Return the folders of the process's memory groups and of all above them.

    Inside a container the path is often that of the host, of which the container sees the end only,
    as its root.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = mounted / controllers
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:count])


def _text(file: Path) -> str:
    """Return what a file holds, nothing where it cannot be read."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
