"""Options of the server, independent of what runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hybridspec.serve.fields import Limits

__all__ = ["ServeOptions", "read_keys"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the server behaves.

    Attributes:
        model_name: what clients call the model.
        api_keys: one of these is asked for; none: everybody is let in.
        max_requests: most continuations that run or wait; more are turned away with 429.
        limits: what one request may ask for.
        drain_s: seconds that running requests have to finish when the server ends.
        cors_origins: web pages that browsers let in, besides the server's own.
        chat_template: used in place of the checkpoint's.
        trusts_templates: whether requests may bring templates of their own.
        labels: of every metric, besides the model's name.
    """

    model_name: str
    api_keys: Sequence[str] = ()
    max_requests: int = 256
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    cors_origins: Sequence[str] = ()
    chat_template: str | None = None
    trusts_templates: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: {"engine": "0"})

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Return options from fields that may name an `api_key_file` in place of the keys."""
        given = {**fields, **more}
        if (file := given.pop("api_key_file", None)) is not None:
            given["api_keys"] = read_keys(file)
        return cls(**given)


def read_keys(file: str) -> list[str]:
    """Return the keys of a file, a line each.

    Raises:
        ValueError: if it holds none; an empty file must not open the door.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"api_key_file: {file} is not UTF-8 text") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ValueError(f"api_key_file: {file} holds no key")
    return keys
