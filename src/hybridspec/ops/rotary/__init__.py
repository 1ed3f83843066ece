"""Norm and rotary embedding of query and key heads, in one pass."""

from __future__ import annotations

from hybridspec.ops.rotary.api import backends, norm_and_rotate
from hybridspec.ops.rotary.reference import rotate_

__all__ = ["backends", "norm_and_rotate", "rotate_"]
