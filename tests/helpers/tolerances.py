"""How far results of the ops may be from an fp64 oracle that is given the same inputs.

An error is measured against the largest magnitude of the oracle's tensor, because the terms of a
sum, not the sum, set its rounding. A call's tolerance is that of its coarsest dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "KERNEL_FACTOR",
    "TOLERANCES",
    "assert_close",
    "assert_rounded",
    "assert_same",
    "error",
    "tolerance",
]

TOLERANCES = {
    # unit roundoff 1.1e-16; thousands of roundings, amplified by the solve of 16 equal keys
    torch.float64: 1e-12,
    # unit roundoff 6.0e-8; a hundred roundings (worst seen on the reference: 7.1e-7)
    torch.float32: 5e-6,
    # unit roundoff 4.9e-4, once on the result (worst seen: 4.3e-4)
    torch.float16: 1e-3,
    # unit roundoff 3.9e-3, once on the result (worst seen: 3.4e-3)
    torch.bfloat16: 8e-3,
}

# Of an 8-bit state, on top of the error before it is rounded: half a quantum, and the rounding of
# the product with the inverse, up to 127 quanta long, in fp32.
HALF_QUANTUM = 0.5001

# Kernels round coefficients of products to 16 bits as well as the result. Measured on the verify
# cases: up to 1.0e-2 in bf16, where token-by-token PyTorch in bf16 makes up to 1.0e-2 too.
KERNEL_FACTOR = 2.0

# magnitudes below this are not compared relatively: fp32 has no more digits there
SMALLEST = 1e-30


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the tolerance of a call with these dtypes."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude expected."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / max(expected.abs().max().item(), SMALLEST)


def assert_close(
    actual: Tensor, expected: Tensor, *dtypes: torch.dtype, factor: float = 1.0
) -> None:
    """Raise AssertionError unless a result is as near to the oracle as its dtypes allow.

    Args:
        actual: result of an op.
        expected: the oracle's tensor, fp64.
        dtypes: all dtypes that the call involved.
        factor: multiple of the dtypes' tolerance that is allowed.
    """
    bound = factor * tolerance(*dtypes)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    scale = max(scale, SMALLEST)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0.0, atol=bound * scale, equal_nan=False
    )


def assert_rounded(
    actual: Tensor,
    expected: Tensor,
    quantum: Tensor | None,
    *dtypes: torch.dtype,
    factor: float = 1.0,
) -> None:
    """Compare as `assert_close`; a state of integers may be half a quantum further away.

    Args:
        actual: result of an op.
        expected: the oracle's tensor, fp64.
        quantum: distance of neighbouring values of the result; None: it is not made of integers.
        dtypes: all dtypes that the call involved; an int8 among them adds nothing.
        factor: multiple of the dtypes' tolerance that is allowed.
    """
    dtypes = tuple(dtype for dtype in dtypes if dtype != torch.int8)
    if quantum is None:
        assert_close(actual, expected, *dtypes, factor=factor)
        return
    difference = actual.double() - expected.double()
    beyond = (difference.abs() - HALF_QUANTUM * quantum.double()).clamp_min(0.0)
    assert_close(expected.double() + beyond, expected, *dtypes, factor=factor)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless two tensors are the same computation's.

    Products of a CPU library may add in another order where rows lie at other addresses or beside
    other rows, and do on some processors, so floating-point numbers are compared up to rounding,
    8-bit states up to one unit, and all else exactly. What no arithmetic touches is compared with
    `assert_same_bits`.
    """
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.int8:
        torch.testing.assert_close(actual.short(), expected.short(), rtol=0, atol=1)
    elif actual.is_floating_point():
        bound = tolerance(actual.dtype)
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, equal_nan=True)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
