"""The JSON files of a model folder, with messages that name the file and the field."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hybridspec.errors import CheckpointError
from hybridspec.values import shown

__all__ = ["Fields", "check_plain", "is_there", "read_json", "read_text"]

_MAX_SIZE = 1 << 24  # of anything: no model has more, and tables of this many rows can be made
_MAX_BYTES = 1 << 28  # of a file of text; the largest tokenizers take a tenth of that


def is_there(file: Path) -> bool:
    """Return whether a folder has an entry of this name, a file that can be read or not.

    A link that leads nowhere, as a cache that lost files has them, is no absent file: what it
    should hold would be left out without a word.
    """
    return os.path.lexists(file)


def check_plain(file: Path) -> None:
    """Raise OSError for what could be read without end, or too large to be what it should be.

    A folder is left to whoever reads it.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError("a pipe or a device, which is not read")
    if found.st_size > _MAX_BYTES:
        raise OSError(f"{found.st_size} bytes, of which at most {_MAX_BYTES} are read")


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """Read a file of text.

    Raises:
        OSError: if it cannot be read, or `check_plain` refuses it.
        ValueError: if it is not in that encoding.
    """
    check_plain(file)
    return file.read_text(encoding=encoding)


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: if it cannot be read or holds something else.
    """
    try:
        raw = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return raw


class Fields:
    """The fields of one file, those of `text_config` before the top level's.

    Args:
        raw: the parsed file.
        source: name of the file for messages.
    """

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        text = raw.get("text_config", {})
        if not isinstance(text, dict):
            raise CheckpointError(f"{source}: text_config: expected an object, found {shown(text)}")
        self.source = source
        self.model_type: Any = raw.get("model_type")
        self._levels = (raw, text)
        self._merged = {**raw, **{k: v for k, v in text.items() if v is not None}}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field; null is as good as absent."""
        value = self._merged.get(name)
        return default if value is None else value

    def fail(self, name: str, expected: str) -> CheckpointError:
        """Return the error that says what was expected of a field."""
        found = shown(self._merged[name]) if name in self._merged else "nothing"
        return CheckpointError(f"{self.source}: {name}: expected {expected}, found {found}")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field that holds a size."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise self.fail(name, "a positive whole number")
        if value > _MAX_SIZE:
            raise self.fail(name, f"at most {_MAX_SIZE}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a field that holds a positive number."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self.fail(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def any_flag(self, name: str) -> bool:
        """Return whether a field is true at any level."""
        values = [level[name] for level in self._levels if level.get(name) is not None]
        if not all(isinstance(value, bool) for value in values):
            raise self.fail(name, "true or false")
        return any(values)
