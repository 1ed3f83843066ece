"""The public functions of the gates: checks, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._checks import FLOATS, Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import register_kernel
from hybridspec.ops.activations import launch, reference

__all__ = ["sigmoid_gate", "swiglu"]


def swiglu(gate_up: Tensor, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Gate one half of each row with the other; nothing is modified.

    y = silu(gate) * up,  [gate | up] = gate_up

    Args:
        gate_up: [N, 2 F], any strides whose last is 1; in.
        out: where to write, [N, F], dtype of `gate_up`; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, F] in the dtype of `gate_up`.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride or backend.

    Numerics:
        fp32 (fp64 if `gate_up` is), rounded once at the end.

    Source:
        SwiGLU (Shazeer 2020, arXiv:2002.05202), equation 6.
    """
    check("gate_up", gate_up, "N 2F", {})
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected an even row size, got {gate_up.shape[1]}")
    size = gate_up.shape[1] // 2
    gate, up = gate_up.split_with_sizes((size, size), 1)
    return _run(up, gate, True, out, backend)


def sigmoid_gate(
    y: Tensor, gate: Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Multiply rows with the sigmoid of their gates; only `out` is modified.

    z = y * sigmoid(gate)

    Args:
        y: [N, D], any strides whose last is 1; in.
        gate: [N, D], any strides whose last is 1; in.
        out: where to write, [N, D], dtype of `y`, which may be `y` itself; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `y`.

    Raises, Numerics:
        As `swiglu`.

    Source:
        The output gate of attention in the Qwen3-Next and Qwen3.5 checkpoints.
    """
    return _run(y, gate, False, out, backend)


def _run(x: Tensor, gate: Tensor, is_silu: bool, out: Tensor | None, backend: str) -> Tensor:
    if out is None:
        out = x.new_empty(x.shape)
    _op(x, gate, out, is_silu, backend=backend)
    return out


def _check(x: Tensor, gate: Tensor, out: Tensor, is_silu: bool) -> None:
    name = "gate_up" if is_silu else "y"
    dims: Dims = {}
    for other, tensor in ((name, x), ("gate", gate), ("out", out)):
        check(other, tensor, "N D", dims)
        check_last_stride(other, tensor)
    check_dtype(name, x, *FLOATS)
    check_dtype("gate", gate, *FLOATS)
    check_dtype("out", out, x.dtype)


_op = register_kernel("activations.gated", launch.explain, launch.gated, reference.gated, _check)
