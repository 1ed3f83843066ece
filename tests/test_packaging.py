"""The wheel holds the code, the bundled model and both licences, and nothing else."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/hybridspec"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from a copy, since setuptools would leave files behind here."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", "out", "."], cwd=folder, check=True, capture_output=True)
    [file] = (folder / "out").glob("*.whl")
    return zipfile.ZipFile(file)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    """Parse the wheel's METADATA."""
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_it_holds_every_module_and_the_bundled_files(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.startswith("hybridspec/")}
    here = {
        f"hybridspec/{file.relative_to(SOURCE).as_posix()}"
        for file in SOURCE.rglob("*")
        if file.is_file() and (file.suffix in (".py", ".typed", ".html") or "bundled" in file.parts)
        if "__pycache__" not in file.parts
    }
    assert here <= inside
    assert any(name.endswith("/model.safetensors") for name in inside)
    assert any(name.endswith("/tokenizer.json") for name in inside)
    assert {"hybridspec/bundled/prompts/code.jsonl", "hybridspec/py.typed"} <= inside


def test_it_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"hybridspec", f"hybridspec-{metadata(wheel)['Version']}.dist-info"}
    assert sum(entry.compress_size for entry in wheel.infolist()) < 10e6


def test_licences(wheel: zipfile.ZipFile) -> None:
    fields = metadata(wheel)
    assert fields["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    files = fields.get_all("License-File")
    assert len(files) == 2
    texts = {
        entry.filename: wheel.read(entry).decode("utf-8")
        for entry in wheel.infolist()
        if "/licenses/" in entry.filename
    }
    assert len(texts) == 2
    joined = "\n".join(texts.values())
    assert "Apache License" in joined
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in joined


def test_the_base_needs_torch_only(wheel: zipfile.ZipFile) -> None:
    needs = metadata(wheel).get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.11"]
    assert metadata(wheel)["Requires-Python"] == ">=3.11"


def test_it_brings_the_command_and_the_plug_in(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    found = wheel.read(name).decode("utf-8")
    assert "hybridspec = hybridspec.cli:main" in found
    assert "[vllm.general_plugins]\nhybridspec = hybridspec.compat.vllm_plugin:register" in found
