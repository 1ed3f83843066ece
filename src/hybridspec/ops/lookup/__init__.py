"""Drafts from what a request's own tokens went on with before."""

from __future__ import annotations

from hybridspec.ops.lookup.look_up import look_up

__all__ = ["look_up"]
