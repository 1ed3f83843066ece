"""What `import hybridspec` offers, and that it costs nothing until it is used."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hybridspec

ROOT = Path(__file__).resolve().parent.parent
# Kernels and what launches them are imported by their backend only.
KERNEL_MODULE = re.compile(r".*\.(triton_\w+|cute_\w+|launch)")
# Ray, and what it brings, is not among what the tests install (make test-cluster).
RAY_MODULE = re.compile(r"hybridspec\.serve\.(ray\w*|lease)")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(hybridspec.__path__, "hybridspec.")
    if module.name != "hybridspec.__main__"
    and not KERNEL_MODULE.fullmatch(module.name)
    and not RAY_MODULE.fullmatch(module.name)
)


def python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_lazy() -> None:
    heavy = "('torch', 'triton', 'transformers', 'tokenizers', 'safetensors', 'rich', 'numpy')"
    code = f"import sys, hybridspec; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == "[]\n"


def test_public_names_resolve() -> None:
    assert {"LLM", "SamplingParams", "__version__"} <= set(hybridspec.__all__)
    assert set(hybridspec.__all__) <= set(dir(hybridspec))
    for name in hybridspec.__all__:
        assert getattr(hybridspec, name) is not None
    from hybridspec import LLM, SamplingParams

    assert LLM.__module__.startswith("hybridspec.engine")
    assert SamplingParams.__module__ == "hybridspec.config"


def test_an_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hybridspec.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_exports_exists(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert [entry for entry in exported if not hasattr(module, entry)] == []
    assert len(set(exported)) == len(exported)


def test_modules_import_without_triton() -> None:
    code = (
        "import importlib, sys\n"
        "sys.modules['triton'] = None\n"
        f"[importlib.import_module(name) for name in {MODULES!r}]\n"
        "print('done')"
    )
    assert python(code) == "done\n"


def test_typed_marker_is_there() -> None:
    assert (ROOT / "src/hybridspec/py.typed").is_file()


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert project["version"] == hybridspec.__version__ == newest[1]


def test_pins_lie_within_the_ranges() -> None:
    from packaging.requirements import Requirement

    pins: dict[str, str] = {}
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition(";")[0].strip().partition("==")
                pins[name.lower().replace("_", "-")] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["engine"], *extras["dev"]):
        requirement = Requirement(text)
        if requirement.name != "hybridspec":
            assert requirement.specifier.contains(pins[requirement.name]), text


def test_a_package_that_is_missing_is_told_in_one_line() -> None:
    """As the command line tells it; the name stays for whoever catches the error."""
    code = """
import sys
sys.modules["safetensors"] = None  # as if it were not installed
import hybridspec
try:
    hybridspec.LLM
except ModuleNotFoundError as error:
    print(error.name, error, error.__cause__)
"""
    assert python(code) == (
        "safetensors hybridspec.LLM needs safetensors: pip install 'hybridspec[engine]', in a "
        "clone -e '.[engine]' None\n"
    )
