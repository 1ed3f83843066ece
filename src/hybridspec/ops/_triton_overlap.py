"""A kernel that is launched while the one before it ends: no time passes between the two.

On Hopper and later such a launch is made ready early and then waits, so that what it reads is
written; the launch before it says when the next one may be made ready. Both happen at the very
beginning of a kernel, the wait first: then everything before the launch that a kernel follows has
ended, and whatever it reads may be written by any of them.
"""

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["begin"]


@triton.jit
def begin(IS_OVERLAPPED: tl.constexpr):
    """Wait for the launch before this one, then let the next one be made ready."""
    if IS_OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
