"""Where CUDA C++ cannot be compiled, a reason says so, and other kernels serve."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from hybridspec.ops import _nvrtc
from hybridspec.ops._backends import always, choose_backend

# What the files of an installed package hold; None: it cannot be found.
ABSENT = {"cuda": None}
NO_BINDINGS = {"cuda": ""}
NO_NVRTC = {"cuda": "", "cuda.bindings": "", "cuda.bindings.driver": ""}
NO_DRIVER = {"cuda": "", "cuda.bindings": "", "cuda.bindings.nvrtc": ""}
WORKS = {**NO_NVRTC, "cuda.bindings.nvrtc": "def nvrtcVersion():\n    return 0, 13, 0\n"}
KINDS = {
    "absent": (ABSENT, "no compiler: the package cuda-bindings is not installed"),
    "another package": (NO_BINDINGS, "no compiler: the package cuda-bindings is not installed"),
    "no nvrtc": (NO_NVRTC, "the package cuda-bindings is broken (cannot import name 'nvrtc'"),
    "no driver": (NO_DRIVER, "the package cuda-bindings is broken (cannot import name 'driver'"),
    "no library": (
        {**NO_NVRTC, "cuda.bindings": "raise ImportError('libcuda.so.1: cannot open')"},
        "no compiler: the package cuda-bindings is broken (libcuda.so.1: cannot open)",
    ),
    "part of another": (
        {**WORKS, "cuda.bindings.driver": "import no_such_part"},
        "is broken (No module named 'no_such_part')",
    ),
    "not even Python": ({**WORKS, "cuda.bindings.nvrtc": "def"}, "is broken (invalid syntax"),
    "no such symbol": (
        {**WORKS, "cuda.bindings.nvrtc": "raise OSError('undefined symbol: nvrtcVersion')"},
        "is broken (undefined symbol: nvrtcVersion)",
    ),
    "no NVRTC": (
        {**WORKS, "cuda.bindings.nvrtc": "def nvrtcVersion():\n    raise RuntimeError('no dll')\n"},
        "no compiler: NVRTC cannot be loaded (no dll)",
    ),
    "works": (WORKS, None),
}


@pytest.fixture
def no_cuda() -> Iterator[None]:
    """Take out what is imported of the package, and put it back."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
            del sys.modules[name]
        yield


def install(files: dict[str, str | None], folder: Path) -> None:
    for name, text in files.items():
        path = folder.joinpath(*name.split("."))
        path = path / "__init__" if name in ("cuda", "cuda.bindings") else path
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            sys.modules[name] = None  # type: ignore[assignment]
        else:
            path.with_suffix(".py").write_text(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reason_for_each_kind(
    kind: str, no_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, reason = KINDS[kind]
    install(files, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    explain = _nvrtc.explain_compiler.__wrapped__
    chosen = choose_backend("op", "auto", {"cuda": explain, "triton": always})
    assert chosen == ("cuda" if reason is None else "triton")
    found = explain()
    assert found is None if reason is None else reason in found
