"""Limits of containers count as much as what the machine has free."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridspec.runtime import host_memory

MIB = 1 << 20
NO_LIMIT = str((1 << 63) - 4096)  # how version 1 says that there is none

# Where the process is, files below the root of the file system, and what is available in MiB.
CASES: dict[str, tuple[str, dict[str, int | str], int]] = {
    "no groups": ("", {}, 1000),
    "version 2": (
        "0::/a/b",
        {"a/b/memory.max": 300 * MIB, "a/b/memory.current": 100 * MIB},
        200,
    ),
    "version 2, without limit": ("0::/a", {"a/memory.max": "max", "a/memory.current": MIB}, 1000),
    "version 2, limit of a group above": (
        "0::/a/b",
        {
            "a/memory.max": 64 * MIB,
            "a/memory.current": 60 * MIB,
            "a/b/memory.max": 300 * MIB,
            "a/b/memory.current": 50 * MIB,
        },
        4,
    ),
    "version 2, seen from inside": (
        "0::/docker/0123/../..",
        {"memory.max": 200 * MIB, "memory.current": 50 * MIB},
        150,
    ),
    "version 2, caches of files": (
        "0::/",
        {
            "memory.max": 200 * MIB,
            "memory.current": 190 * MIB,
            "memory.stat": f"anon {100 * MIB}\nfile {90 * MIB}\ninactive_file {80 * MIB}",
        },
        90,
    ),
    "version 1": (
        "5:devices:/x\n4:memory:/x\n0::/",
        {
            "memory/x/memory.limit_in_bytes": 500 * MIB,
            "memory/x/memory.usage_in_bytes": 100 * MIB,
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.usage_in_bytes": 700 * MIB,
        },
        400,
    ),
    "version 1, seen from inside": (
        "4:memory:/docker/0123",
        {"memory/memory.limit_in_bytes": 70 * MIB, "memory/memory.usage_in_bytes": 60 * MIB},
        10,
    ),
    "over the limit": ("0::/", {"memory.max": MIB, "memory.current": 3 * MIB}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    groups, files, expected = CASES[name]
    written = {"proc/meminfo": "MemFree: 1 kB\nMemAvailable: 1024000 kB\n"}
    written |= {"proc/self/cgroup": f"{groups}\n"} if groups else {}
    written |= {f"sys/fs/cgroup/{file}": f"{value}\n" for file, value in files.items()}
    for file, text in written.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    assert host_memory.available_host_bytes() == expected * MIB


def test_here() -> None:
    assert 1 << 20 < host_memory.available_host_bytes() < 1 << 50
