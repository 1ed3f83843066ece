"""Compiled kernels on disk, with a compiler that notes what it is asked for."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hybridspec.ops import _kernel_cache, _nvrtc

SOURCE = "gated_delta_rule/verify.cu"
DEFINES = (("ACT", "Bf16"), ("HEADS", 16))


class FakeCompiler:
    """Stands in for NVRTC; what it makes of a source says how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = b"NVRTC 13.0"
        self.files = _nvrtc._files_of(SOURCE)
        self.asked: list[list[str]] = []
        monkeypatch.setattr(_nvrtc, "_compile", self._compile)
        monkeypatch.setattr(_nvrtc, "_compiler_version", lambda: self.version)
        monkeypatch.setattr(_nvrtc, "_files_of", lambda source: self.files)

    def _compile(self, source: str, files: dict[str, bytes], options: list[str]) -> bytes:
        assert source == SOURCE and files is self.files
        self.asked.append(options)
        return b"kernel %d" % len(self.asked)

    def kernel(self, defines: tuple = DEFINES, target: str = "sm_90") -> bytes:
        """Ask for a kernel as a new process would."""
        return _nvrtc._compiled.__wrapped__(SOURCE, defines, target)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(_kernel_cache.FOLDER_VARIABLE, str(tmp_path / "a" / "kernels"))
    return tmp_path / "a" / "kernels"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(monkeypatch)


def test_a_kernel_is_compiled_once(place: Path, compiler: FakeCompiler) -> None:
    assert compiler.kernel() == compiler.kernel() == b"kernel 1"
    assert compiler.asked == [
        ["--gpu-architecture=sm_90", "--std=c++17", "--define-macro=ACT=Bf16",
         "--define-macro=HEADS=16"],
    ]  # fmt: skip
    (entry,) = place.iterdir()
    assert entry.suffix == ".cubin"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_all_that_decides_what_is_compiled_tells_entries_apart(
    place: Path, compiler: FakeCompiler
) -> None:
    compiler.kernel()
    compiler.kernel(target="sm_100")
    compiler.kernel(defines=(("ACT", "Bf16"), ("HEADS", 4)))
    compiler.version = b"NVRTC 13.1"
    compiler.kernel()
    for name in list(compiler.files):
        compiler.files = compiler.files | {name: compiler.files[name] + b"\n"}
        compiler.kernel()
    assert len(compiler.files) >= 3
    assert len(compiler.asked) == len(list(place.iterdir())) == 4 + len(compiler.files)


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_broken_entry_is_compiled_again(
    damage: bytes, place: Path, compiler: FakeCompiler
) -> None:
    compiler.kernel()
    (entry,) = place.iterdir()
    entry.write_bytes(damage)
    assert compiler.kernel() == compiler.kernel() == b"kernel 2"
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + b"3")
    assert compiler.kernel() == b"kernel 3"


def test_a_folder_to_which_others_can_write_is_not_used(
    place: Path, compiler: FakeCompiler
) -> None:
    place.mkdir(parents=True)
    place.chmod(0o770)
    assert [compiler.kernel(), compiler.kernel()] == [b"kernel 1", b"kernel 2"]
    assert not list(place.iterdir())


def test_where_nothing_can_be_kept_kernels_still_come(place: Path, compiler: FakeCompiler) -> None:
    place.parent.write_text("a file, not a folder")
    assert [compiler.kernel(), compiler.kernel()] == [b"kernel 1", b"kernel 2"]


def test_an_entry_that_cannot_be_written_leaves_nothing_behind(
    place: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert compiler.kernel() == b"kernel 1"
    assert not list(place.iterdir())


def test_a_failure_to_compile_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler(monkeypatch)
    good = compiler._compile

    def refuse(*call: object) -> bytes:
        raise RuntimeError("verify.cu does not compile")

    monkeypatch.setattr(_nvrtc, "_compile", refuse)
    with pytest.raises(RuntimeError, match="does not compile"):
        compiler.kernel()
    monkeypatch.setattr(_nvrtc, "_compile", good)
    assert compiler.kernel() == b"kernel 1"


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_kernel_cache.FOLDER_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert _kernel_cache.folder() == Path("/caches/hybridspec/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert _kernel_cache.folder() == Path("/home/someone/.cache/hybridspec/kernels")
    monkeypatch.setenv(_kernel_cache.FOLDER_VARIABLE, "/mine")
    assert _kernel_cache.folder() == Path("/mine")


def test_processes_that_write_at_once_leave_whole_entries(place: Path) -> None:
    program = (
        "from hybridspec.ops import _kernel_cache as cache\n"
        "for i in range(200):\n"
        "    kernel = cache.cached('one', lambda: b'k' * 100_000)\n"
        "    assert kernel == b'k' * 100_000\n"
        "    (cache.folder() / 'one.cubin').unlink(missing_ok=True)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program], env=os.environ) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert [entry.name for entry in place.iterdir()] in ([], ["one.cubin"])
