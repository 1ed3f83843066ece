"""Drafts from earlier occurrences of a request's newest tokens."""

from __future__ import annotations

from hybridspec.ops.lookup.look_up import look_up

__all__ = ["look_up"]
