"""Norm and rotary embedding of query and key heads, in one pass."""

from __future__ import annotations

from hybridspec.ops.rotary.api import norm_and_rotate
from hybridspec.ops.rotary.reference import rotate_

__all__ = ["norm_and_rotate", "rotate_"]
