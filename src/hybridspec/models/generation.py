"""How a checkpoint wants its tokens sampled: the fields of `generation_config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridspec.config import SamplingParams
from hybridspec.errors import CheckpointError

__all__ = ["sampling_defaults"]

# Parameters that the file calls by the same name, and the one that it does not.
_FIELDS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(path: str | Path) -> SamplingParams:
    """Read the sampling parameters that a model folder recommends.

    A field that is missing or null leaves the parameter as SamplingParams has it. With
    `do_sample` false the temperature is 0; where it is missing, the other fields count.

    Raises:
        CheckpointError: if the file is broken or a value is none that SamplingParams takes.
    """
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(fields).__name__}")
    values: dict[str, Any] = {
        parameter: fields[name]
        for name, parameter in _FIELDS.items()
        if fields.get(name) is not None
    }
    if fields.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
