"""tools/fetch_release.py: the Python files of a wheel, and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import fetch_release


def test_it_unpacks_python_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "released/__init__.py": "x = 1\n",
        "released/kernels.so": "\0",
        "released-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: released\nVersion: 1.2\n",
        "released-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        "released-1.2.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "released-1.2-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    folder = tmp_path / "out"
    offline = ["--no-index", "--find-links", str(tmp_path)]
    fetch_release.main(["released==1.*", str(folder), *offline])
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert found == {"released/__init__.py", "released-1.2.dist-info/METADATA"}
    assert f"released==1.*: {len(found)} files" in capsys.readouterr().out
