"""Public functions of the causal convolution: checks, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._backends import choose_backend
from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride, check_option
from hybridspec.ops._library import register
from hybridspec.ops._triton_support import triton_or_reference
from hybridspec.ops.causal_conv1d import launch, reference

__all__ = ["prefill", "verify"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
prefill_backends = triton_or_reference(launch.explain_prefill)
verify_backends = triton_or_reference(launch.explain_verify)
_ARGUMENTS = (
    "(Tensor x, Tensor weight, Tensor(a!) conv_ring, Tensor seq_len, Tensor cu_seqlens, "
    "Tensor slots, int max_rows, Tensor? bias, str? activation, Tensor(b!) out, str backend)"
)


def verify(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_verify_tokens: int,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve the rows of a decode step and append all of them to the rings; cursors stay.

    With p = seq_len[slot] + t the position of row t, and z_p its row as the ring stores it:

        y_t = act(bias + sum_j weight[:, j] * z_(p - width + 1 + j)),   z_p = 0 for p < 0

    Position p lives in row p mod R of the ring. Rows that are not committed afterwards are
    overwritten by the next append. A request with slot -1 or without rows touches no ring.

    Args:
        x: raw inputs, packed by request, [N, D]; last stride 1; in.
        weight: taps, newest last, [D, width], any strides; in.
        conv_ring: stored inputs, [S, R, D], R a power of two >= width - 1 + max_verify_tokens; last
            stride 1; in-out.
        seq_len: positions stored so far, [S], int32 or int64; contiguous; in.
        cu_seqlens: row bounds of the requests, [B+1], int32 or int64; contiguous; in.
        slots: slot of each request, -1 = padding, [B], int32 or int64; contiguous; in.
        max_verify_tokens: most rows of one request.
        bias: added before the activation, [D]; last stride 1; in.
        activation: "silu" or None.
        out: where to write, [N, D], dtype of x; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `x`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, ring capacity, activation or backend, or (reference)
            more rows in a request than `max_verify_tokens`.

    Numerics:
        fp32 (fp64 if `x` is). Inputs are rounded to the dtype of the ring, the result once to the
        dtype of `out`.

    Source:
        The convolution of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464, section 3.4).
    """
    out = _prepare(x, weight, conv_ring, seq_len, cu_seqlens, slots, bias, activation, out)
    check_option("max_verify_tokens", max_verify_tokens, int, low=0)
    _check_capacity(conv_ring, weight, max_verify_tokens)
    _verify_op(
        x, weight, conv_ring, seq_len, cu_seqlens, slots, max_verify_tokens, bias, activation, out,
        backend,
    )  # fmt: skip
    return out


def prefill(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_seqlen: int,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve prompt rows and store the last width - 1 inputs of each request; cursors stay.

    The same equation as `verify`, for any number of rows: a chunk of a prompt continues from the
    rows that the chunk before it stored.

    Args:
        x: raw inputs, packed by request, [N, D]; last stride 1; in.
        weight: taps, newest last, [D, width], any strides; in.
        conv_ring: stored inputs, [S, R, D], R a power of two >= width - 1; last stride 1; in-out.
        seq_len: positions stored so far, [S], int32 or int64; contiguous; in.
        cu_seqlens: row bounds of the requests, [B+1], int32 or int64; contiguous; in.
        slots: slot of each request, -1 = padding, [B], int32 or int64; contiguous; in.
        max_seqlen: most rows of one request.
        bias: added before the activation, [D]; last stride 1; in.
        activation: "silu" or None.
        out: where to write, [N, D], dtype of x; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `x`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the backend asked for cannot serve the call; the message says why.
        ValueError: for a wrong shape, stride, ring capacity, activation or backend, or (reference)
            more rows in a request than `max_seqlen`.

    Numerics:
        As `verify`.

    Source:
        As `verify`.
    """
    out = _prepare(x, weight, conv_ring, seq_len, cu_seqlens, slots, bias, activation, out)
    check_option("max_seqlen", max_seqlen, int, low=0)
    _check_capacity(conv_ring, weight, 0)
    _prefill_op(
        x, weight, conv_ring, seq_len, cu_seqlens, slots, max_seqlen, bias, activation, out,
        backend,
    )  # fmt: skip
    return out


def _prepare(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> Tensor:
    """Check the call and return the output tensor; the explanation is looked for on failure."""
    try:
        is_right = (
            weight.ndim == 2
            and x.shape[1:] == weight.shape[:1] == conv_ring.shape[2:]
            and seq_len.shape == conv_ring.shape[:1]
            and slots.ndim == 1
            and cu_seqlens.shape == (slots.shape[0] + 1,)
            and x.stride(1) == conv_ring.stride(2) == 1
            and x.dtype in _FLOATS
            and weight.dtype in _FLOATS
            and conv_ring.dtype in _FLOATS
            and seq_len.dtype in _INTEGERS
            and cu_seqlens.dtype in _INTEGERS
            and slots.dtype in _INTEGERS
            and seq_len.is_contiguous()
            and cu_seqlens.is_contiguous()
            and slots.is_contiguous()
        )
    except (AttributeError, IndexError, TypeError):  # no tensor, or of too few dimensions
        is_right = False
    if not is_right:
        _explain(x, weight, conv_ring, seq_len, cu_seqlens, slots)
    if bias is not None:
        check("bias", bias, "D", {"D": x.shape[1]})
        check_dtype("bias", bias, *_FLOATS)
        check_last_stride("bias", bias)
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    if out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    check("out", out, "N D", {"N": x.shape[0], "D": x.shape[1]})
    check_dtype("out", out, x.dtype)
    check_last_stride("out", out)
    return out


def _explain(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> None:
    """Raise the error that names the first wrong argument."""
    dims: Dims = {}
    check("x", x, "N D", dims)
    check("weight", weight, "D width", dims)
    check("conv_ring", conv_ring, "S R D", dims)
    check("seq_len", seq_len, "S", dims)
    check("slots", slots, "B", dims)
    check("cu_seqlens", cu_seqlens, str(dims["B"] + 1), dims)
    check_last_stride("x", x)
    check_last_stride("conv_ring", conv_ring)
    for name, tensor in (("x", x), ("weight", weight), ("conv_ring", conv_ring)):
        check_dtype(name, tensor, *_FLOATS)
    for name, tensor in (("seq_len", seq_len), ("cu_seqlens", cu_seqlens), ("slots", slots)):
        check_dtype(name, tensor, *_INTEGERS)
        check_last_stride(name, tensor)


def _check_capacity(conv_ring: Tensor, weight: Tensor, max_rows: int) -> None:
    capacity, needed = conv_ring.shape[1], weight.shape[1] - 1 + max_rows
    if capacity & (capacity - 1) or capacity < needed:
        raise ValueError(
            f"conv_ring: expected R a power of two of at least {needed} rows (width - 1 + rows of "
            f"a step), got {capacity}"
        )


def _verify(x: Tensor, weight: Tensor, conv_ring: Tensor, *args) -> None:
    *rest, backend = args
    name, tensors = "causal_conv1d.verify", (x, weight, conv_ring)
    if choose_backend(name, backend, verify_backends(x), *tensors, rest[-1], rest[3]) == "triton":
        launch.verify(*tensors, *rest)
    else:
        reference.verify(*tensors, *rest)


def _prefill(x: Tensor, weight: Tensor, conv_ring: Tensor, *args) -> None:
    *rest, backend = args
    name, tensors = "causal_conv1d.prefill", (x, weight, conv_ring)
    if choose_backend(name, backend, prefill_backends(x), *tensors, rest[-1], rest[3]) == "triton":
        launch.prefill(*tensors, *rest)
    else:
        reference.prefill(*tensors, *rest)


_verify_op = register(f"causal_conv1d_verify{_ARGUMENTS}", _verify)
_prefill_op = register(f"causal_conv1d_prefill{_ARGUMENTS}", _prefill)
