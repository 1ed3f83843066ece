"""Backend choice, shared by all ops.

A pure function of a backend returns why it does not support a call. An explicit choice works or
raises with that reason; "auto" takes the first backend without one, and logs each choice once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from hybridspec.errors import UnsupportedError

__all__ = ["Supports", "always", "choose_backend"]

Supports = Callable[..., str | None]

_logger = logging.getLogger("hybridspec")


def always(*args: object) -> None:
    """Support every call: the reference runs anywhere."""
    return None


@functools.cache
def _log_once(op: str, name: str) -> None:
    _logger.info("%s: backend %s", op, name)


def choose_backend(
    op: str, requested: str, candidates: Mapping[str, Supports], *args: object
) -> str:
    """Name the backend of a call.

    Args:
        op: operator name for messages.
        requested: "auto" or a key of `candidates`.
        candidates: backends in order of preference; each value is called with `args` and returns
            the reason why the backend does not support them, or None.
        *args: what the decision depends on, usually the call's tensors.

    Returns:
        A key of `candidates`.

    Raises:
        ValueError: if `requested` is unknown.
        UnsupportedError: if the requested backend does not support the call.
    """
    if requested == "auto":
        for name, supports in candidates.items():
            if supports(*args) is None:
                _log_once(op, name)
                return name
        reasons = "; ".join(f"{name}: {supports(*args)}" for name, supports in candidates.items())
        raise UnsupportedError(f"{op}: no backend serves this call ({reasons})")
    chosen = candidates.get(requested)
    if chosen is None:
        names = ", ".join(repr(name) for name in ("auto", *candidates))
        raise ValueError(f"backend: expected one of {names} for {op}, got {requested!r}")
    reason = chosen(*args)
    if reason is not None:
        raise UnsupportedError(f"{op}: backend {requested!r} cannot serve this call: {reason}")
    return requested
