"""The small trained model that comes with the package, and texts it has never seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROMPT_KINDS", "HeldOutPrompt", "bundled_model_path", "held_out_prompts"]

PROMPT_KINDS = ("code", "docs")

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPrompt:
    """The beginning of a text that was kept out of the training data.

    Attributes:
        source: file of the standard library or its documentation, and the offset in it.
        text: the prompt.
    """

    source: str
    text: str


def bundled_model_path() -> Path:
    """Return the folder of the bundled model, in Hugging Face layout.

    Raises:
        FileNotFoundError: if this installation comes without it.
    """
    found = sorted(_FOLDER.glob("*/config.json"))
    if not found:
        raise FileNotFoundError(f"{_FOLDER}: this installation comes without the bundled model")
    return found[0].parent


def held_out_prompts(kind: str = "code") -> list[HeldOutPrompt]:
    """Return the committed prompts of one kind, always in the same order.

    Args:
        kind: "code" or "docs".

    Raises:
        ValueError: if there is no such kind.
    """
    if kind not in PROMPT_KINDS:
        raise ValueError(f"kind: expected one of {', '.join(PROMPT_KINDS)}, got {kind!r}")
    lines = (_FOLDER / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [HeldOutPrompt(**json.loads(line)) for line in lines]
