"""Exact speculative decoding for hybrid language models, in which a rejected draft costs nothing.

`import hybridspec` loads nothing heavy; the names below load what they need when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridspec.config import SamplingParams
    from hybridspec.engine import LLM, RequestOutput, StepOutput
    from hybridspec.errors import CapacityError, CheckpointError, UnsupportedError

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "UnsupportedError",
    "__version__",
]

__version__ = "0.2.0"

_HOMES = {
    "LLM": "hybridspec.engine",
    "CapacityError": "hybridspec.errors",
    "CheckpointError": "hybridspec.errors",
    "RequestOutput": "hybridspec.engine",
    "SamplingParams": "hybridspec.config",
    "StepOutput": "hybridspec.engine",
    "UnsupportedError": "hybridspec.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridspec' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        found = import_module("hybridspec.errors").missing_package(error)
        if found is None:
            raise
        package, extra = found
        text = f"hybridspec.{name} needs {package}: pip install 'hybridspec[{extra}]', in a clone "
        raise ModuleNotFoundError(f"{text}-e '.[{extra}]'", name=package) from None


def __dir__() -> list[str]:
    return sorted(__all__)
