"""`hybridspec doctor` says what is there, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridspec.cli import doctor
from hybridspec.ops import _kernel_cache


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Kernels are kept in a folder of the test."""
    monkeypatch.setenv(_kernel_cache.FOLDER_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let modules seem not to be installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in names else find(name, *rest),
    )


def by_name(cli: Callable, status: int = 0) -> dict[str, dict[str, str]]:
    outcome = cli("doctor", "--json")
    assert (outcome.status, outcome.err) == (status, "")
    return {one["name"]: one for one in json.loads(outcome.out)}


def test_a_line_for_each_thing(cli: Callable, kernels: Path) -> None:
    outcome = cli("doctor")
    assert outcome.status == 0
    lines = [line for line in outcome.out.splitlines() if "get it:" not in line]
    assert len(lines) == len(doctor.findings())
    found = by_name(cli)
    assert torch.__version__ in found["torch"]["found"]
    assert found["kernel cache"]["found"] == str(kernels)
    assert {one["state"] for one in found.values()} <= {"ok", "missing", "unused"}
    # What is missing says how to get it; what is there does not.
    assert all(one["how"] for one in found.values() if one["state"] == "missing")
    assert not any(one["how"] for one in found.values() if one["state"] == "ok")


def test_without_a_device_nothing_of_it_is_missing(
    cli: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = by_name(cli)
    for name in ("CUDA device", "Triton", "NVRTC", "fla-core", "FlashAttention-3"):
        assert found[name]["state"] == "unused", name


def test_what_a_hopper_lacks(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "fla", "fa3_fwd_interface", "flash_attn_interface")
    for cached in (doctor_library(), doctor_builds()):
        cached.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    class About:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 141 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: About)
    try:
        found = by_name(cli)
    finally:
        for cached in (doctor_library(), doctor_builds()):
            cached.cache_clear()
    assert found["CUDA device"]["found"] == "NVIDIA H200, sm_90, 141 GiB, the first of 2"
    for name in ("fla-core", "FlashAttention-3"):
        assert found[name]["state"] == "missing"
        assert "not installed" in found[name]["found"]
        assert "hybridspec[gpu]" in found[name]["how"]


def doctor_library() -> Callable:
    from hybridspec.ops.gated_delta_rule import fla

    return fla.library


def doctor_builds() -> Callable:
    from hybridspec.ops.paged_attention import fa3

    return fa3.installed_build


@pytest.mark.parametrize("hidden", [("torch",), ("tokenizers",)])
def test_what_is_needed_is_missing(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, hidden: tuple[str]
) -> None:
    hide(monkeypatch, *hidden)
    found = by_name(cli, status=1)
    missing = [one for one in found.values() if one["state"] == "missing"]
    assert missing and "hybridspec[engine]" in missing[0]["how"]


def test_a_cache_that_others_can_write(cli: Callable, kernels: Path) -> None:
    kernels.mkdir()
    kernels.chmod(0o777)
    found = by_name(cli)["kernel cache"]
    assert found["state"] == "missing"
    assert str(kernels) in found["found"]
    assert _kernel_cache.FOLDER_VARIABLE in found["how"]


def test_long_lines_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not fit goes on below the text, not below the name."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    doctor._print_line("ok  Triton  ", "not installed; for every kernel")
    lines = ["ok  Triton  not installed; for", " " * 12 + "every kernel"]
    assert capsys.readouterr().out.splitlines() == lines
