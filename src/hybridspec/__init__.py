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


_EXTRA_MODULES = {"huggingface_hub", "jinja2", "safetensors", "tokenizers"}  # of "engine"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridspec' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_MODULES:
            raise
        text = (
            f"hybridspec.{name} needs {error.name}: pip install 'hybridspec[engine]', in a clone "
        )
        raise ModuleNotFoundError(f"{text}-e '.[engine]'", name=error.name) from None


def __dir__() -> list[str]:
    return sorted(__all__)
