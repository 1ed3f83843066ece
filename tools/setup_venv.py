"""Make the virtual environment that the make targets run in; standard library only.

A torch that the calling Python already has is used from where it lies. Everything else is
installed from the pinned lists in requirements/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)


def say(text: str) -> None:
    """Print one progress line on standard error."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> SystemExit:
    """Return an exit with a message that says what to do."""
    return SystemExit(f"setup: error: {text}")


def installed_torch() -> tuple[str, Path] | None:
    """Return version and folder of the calling Python's torch if it is new enough."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        say(f"torch {version} is too old ({'.'.join(map(str, OLDEST_TORCH))} or newer is needed)")
        return None
    return version, Path(spec.submodule_search_locations[0]).resolve().parent


def bin_folder(folder: Path) -> Path:
    """Return the folder of a virtual environment that holds its commands."""
    return folder / ("Scripts" if os.name == "nt" else "bin")


def create(folder: Path) -> None:
    """Create the environment, with a view of the calling Python's torch if there is one."""
    found = installed_torch()
    is_base_python = sys.prefix == sys.base_prefix
    say(f"creating {folder.name} with Python {sys.version.split()[0]}")
    try:
        venv.create(
            folder,
            with_pip=True,
            symlinks=os.name != "nt",
            system_site_packages=found is not None and is_base_python,
        )
    except subprocess.CalledProcessError:
        raise fail(
            "this Python cannot make virtual environments; install its venv package "
            f"(Debian, Ubuntu: apt install python3.{sys.version_info.minor}-venv)"
        ) from None
    if found is None:
        return
    say(f"using torch {found[0]} from {found[1]}")
    if not is_base_python:  # an environment sees its base's packages, not another environment's
        paths = {"base": str(folder), "platbase": str(folder)}
        site_packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
        (site_packages / "calling_python.pth").write_text(f"{found[1]}\n", encoding="utf-8")


def pip_install(python: Path, *arguments: str, quiet: bool = True) -> None:
    """Run the environment's pip."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["-qq"] if quiet else []
    if subprocess.run([*command, *arguments], cwd=ROOT, stdout=sys.stderr).returncode:
        raise fail(f"pip install {' '.join(arguments)} failed; its message is above")


def has_module(python: Path, name: str) -> bool:
    """Return whether a module imports in the environment."""
    return not subprocess.run([str(python), "-c", f"import {name}"], capture_output=True).returncode


def install(folder: Path, lists: list[Path], *, with_triton: bool) -> None:
    """Install pinned lists, torch and Triton where they are missing, and this package in place."""
    python = bin_folder(folder) / ("python.exe" if os.name == "nt" else "python")
    for file in lists:
        say(f"installing {file.relative_to(ROOT)} (torch not included)")
        pip_install(python, "--no-deps", "-r", str(file))
    if not has_module(python, "torch"):
        say(
            "this Python has no usable torch: downloading torch 2.13.0. The CPU build is 0.2 GB; "
            "where the package index serves the CUDA build (PyPI on Linux) it is about 3 GB. "
            "Install the torch of your choice for this Python first to avoid that."
        )
        pins = str(ROOT / "requirements" / "engine.txt")
        pip_install(python, "-r", "requirements/torch.txt", "-c", pins, quiet=False)
    if with_triton and sys.platform == "linux" and not has_module(python, "triton"):
        say("this torch has no Triton: downloading it for the tests of the kernels, 0.3 GB")
        pip_install(python, "--no-deps", "-r", "requirements/triton.txt")
    pip_install(python, "--no-deps", "--no-build-isolation", "-e", ".")


def main() -> None:
    """Create the environment if it is missing, then install into it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="virtual environment to make or bring up to date")
    parser.add_argument("lists", type=Path, nargs="+", help="pinned requirement lists to install")
    parser.add_argument("--with-triton", action="store_true", help="Triton too, if missing")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        raise fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    folder = arguments.folder.resolve()
    if not (folder / "pyvenv.cfg").is_file():
        create(folder)
    lists = [file.resolve() for file in arguments.lists]
    install(folder, lists, with_triton=arguments.with_triton)


if __name__ == "__main__":
    main()
