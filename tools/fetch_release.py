"""Download another project's wheel without what it depends on, and unpack its Python files.

For the jobs that compare plug-ins with released modules (`make test-vllm`, `make test-sglang`);
nothing of it is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

KEPT = (".py", "/METADATA")


def fetch(requirement: str, folder: Path, pip_options: Sequence[str] = ()) -> list[str]:
    """Unpack the Python files of the wheel that pip finds for a requirement.

    Args:
        requirement: as pip takes it, for example "vllm==0.33.*".
        folder: where the files go.
        pip_options: further options of `pip download`.

    Returns:
        The names of the unpacked files.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place]
        command += ["--only-binary", ":all:", *pip_options, requirement]
        subprocess.run(command, check=True)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(KEPT)]
            archive.extractall(folder, names)
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirement", help='what to download, for example "vllm==0.33.*"')
    parser.add_argument("folder", type=Path, help="where its files go")
    options, pip_options = parser.parse_known_args(arguments)
    names = fetch(options.requirement, options.folder, pip_options)
    print(f"{options.requirement}: {len(names)} files in {options.folder}")


if __name__ == "__main__":
    main()
