"""`hybridspec doctor`: which parts of this machine are used, and how to get the rest.

Needs nothing but Python, since it reports what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence

__all__ = ["Finding", "findings", "run"]

# What the extras import, by the names under which it is installed.
_ENGINE = {
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "rich": "rich",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
}
_SERVE = {
    "prometheus-client": "prometheus_client",
    "pydantic": "pydantic",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
_MARKS = {"ok": "ok", "missing": "MISSING", "unused": "-"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: what.
        state: "ok", "missing" (this machine would use it), or "unused" (it would not).
        found: version or size, or why it cannot be used.
        enables: what it is for.
        how: how to get it; empty where nothing is missing.
    """

    name: str
    state: str
    found: str
    enables: str
    how: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; status 1 if `LLM` cannot run here."""
    found = findings()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(one) for one in found]))
    else:
        width = max(len(one.name) for one in found)
        for one in found:
            head = f"{_MARKS[one.state]:<8}{one.name:<{width}}  "
            _print_line(head, f"{one.found}; for {one.enables}")
            if one.how:
                _print_line(" " * len(head), f"get it: {one.how}")
    needed = {"Python", "torch", "engine packages"}
    return int(any(one.name in needed and one.state == "missing" for one in found))


def _print_line(head: str, text: str) -> None:
    """Print one line; in a terminal, what does not fit goes on below the text."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if columns <= 2 * len(head):
        print(head + text)
        return
    margin = " " * len(head)
    lines = textwrap.wrap(text, columns - len(head), break_on_hyphens=False)
    print("\n".join((head if i == 0 else margin) + line for i, line in enumerate(lines)))


def findings() -> list[Finding]:
    """Look for everything, in the order in which it depends on each other."""
    python = Finding(
        name="Python", state="ok", found=platform.python_version(), enables="everything"
    )
    extras = [
        _packages("engine packages", _ENGINE, "LLM and the command line", "engine"),
        _packages("server packages", _SERVE, "hybridspec serve", "serve"),
    ]
    if importlib.util.find_spec("torch") is None:
        torch = Finding(
            name="torch",
            state="missing",
            found="not installed",
            enables="every operator",
            how="pip install 'hybridspec[engine]'",
        )
        return [python, torch, *extras]
    return [python, _torch(), *extras, _device(), *_accelerators(), _kernel_cache()]


def _packages(name: str, modules: dict[str, str], enables: str, extra: str) -> Finding:
    missing = [
        package for package, module in modules.items() if importlib.util.find_spec(module) is None
    ]
    return Finding(
        name=name,
        state="missing" if missing else "ok",
        found=f"not installed: {', '.join(missing)}" if missing else "all installed",
        enables=enables,
        how=f"pip install 'hybridspec[{extra}]'" if missing else "",
    )


def _torch() -> Finding:
    import torch

    cuda = torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "CPU build"
    return Finding(
        name="torch", state="ok", found=f"{torch.__version__}, {build}", enables="every operator"
    )


def _device() -> Finding:
    import torch

    name = "CUDA device"
    enables = "captured steps and kernels; without one everything runs on the CPU"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            found, how = (
                "none that this torch could use",
                "a CUDA build of torch, on such a machine",
            )
        else:
            found, how = "torch sees none", "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Finding(name=name, state="unused", found=found, enables=enables, how=how)
    about = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    found = (
        f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory >> 30} GiB"
        f"{f', the first of {count}' if count > 1 else ''}"
    )
    return Finding(name=name, state="ok", found=found, enables=enables)


def _accelerators() -> list[Finding]:
    """Look for what compiles or brings kernels; without a device none of it is used."""
    import torch

    from hybridspec.ops._nvrtc import explain_compiler
    from hybridspec.ops._triton_support import compiler_version, explain_target
    from hybridspec.ops.gated_delta_rule.fla import library
    from hybridspec.ops.paged_attention.fa3 import Build, installed_build

    device = torch.cuda.get_device_capability() if torch.cuda.is_available() else None

    def triton() -> str | None:
        if device is not None:
            return explain_target(device, compiler_version())
        return None if compiler_version() else "not installed"

    def prompts() -> str | None:
        found = library()
        return found if isinstance(found, str) else None

    def attention() -> str | None:
        found = installed_build()
        return None if isinstance(found, Build) else found

    rows: Sequence[tuple[str, Callable[[], str | None], str, str, str, bool]] = (
        ("Triton", triton, "triton", "every kernel", "pip install 'hybridspec[triton]'", True),
        (
            "NVRTC", explain_compiler, "cuda-bindings", "the verify kernel in CUDA C++ (sm_90)",
            "pip install cuda-bindings nvidia-cuda-nvrtc", device == (9, 0),
        ),
        (
            "fla-core", prompts, "fla-core", "prompts through chunked kernels",
            "pip install 'hybridspec[gpu]'", True,
        ),
        (
            "FlashAttention-3", attention, "fa3-fwd",
            "--kv-layout contiguous --attention-backend fa3 (sm_90)",
            "pip install 'hybridspec[gpu]'", device == (9, 0),
        ),
    )  # fmt: skip
    return [
        _accelerator(name, explain(), package, enables, how, device is not None and is_for_it)
        for name, explain, package, enables, how, is_for_it in rows
    ]


def _accelerator(
    name: str, reason: str | None, package: str, enables: str, how: str, would_use: bool
) -> Finding:
    if reason is None:
        state = "ok" if would_use else "unused"
        return Finding(name=name, state=state, found=_version(package), enables=enables)
    state = "missing" if would_use else "unused"
    return Finding(
        name=name, state=state, found=reason, enables=enables, how=how if would_use else ""
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _kernel_cache() -> Finding:
    from hybridspec.ops import _kernel_cache

    enables = "compiled kernels, kept between processes"
    try:
        place = _kernel_cache.usable_folder()
    except (OSError, RuntimeError) as error:
        return Finding(
            name="kernel cache",
            state="missing",
            found=str(error),
            enables=enables,
            how=f"name a folder of your own in {_kernel_cache.FOLDER_VARIABLE}",
        )
    return Finding(name="kernel cache", state="ok", found=str(place), enables=enables)
