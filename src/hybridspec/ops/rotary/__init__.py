"""Norm and rotary embedding of query and key heads, in one pass."""

from __future__ import annotations

from hybridspec.ops.rotary.api import explain, norm_and_rotate
from hybridspec.ops.rotary.cpu import rotate_

__all__ = ["explain", "norm_and_rotate", "rotate_"]
