"""Public functions of the causal convolution: checks, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._checks import FLOATS, Dims, check, check_dtype, check_option, check_tensor
from hybridspec.ops._library import register_kernel
from hybridspec.ops._requests import Batch, check_batch
from hybridspec.ops.causal_conv1d import cpu, launch
from hybridspec.ops.causal_conv1d.call import Log, Rows, Taps

__all__ = ["explain_verify", "prefill", "verify"]


def verify(
    x: Tensor, weight: Tensor, conv_ring: Tensor, seq_len: Tensor, cu_seqlens: Tensor,
    slots: Tensor, *,
    max_verify_tokens: int, bias: Tensor | None = None, activation: str | None = "silu",
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, ring capacity, activation or backend, or (reference)
            more rows in a request than `max_verify_tokens`.

    Numerics:
        fp32 (fp64 if `x` is). Inputs are rounded to the dtype of the ring, the result once to the
        dtype of `out`.

    Source:
        The convolution of Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464, section 3.4).
    """
    out = _output(x) if out is None else out
    batch = Batch(cu_seqlens, slots, max_verify_tokens)
    log = Log(conv_ring, seq_len)
    _verify(Rows(x, out), Taps(weight, bias, activation), log, batch, backend=backend)
    return out


def prefill(
    x: Tensor, weight: Tensor, conv_ring: Tensor, seq_len: Tensor, cu_seqlens: Tensor,
    slots: Tensor, *,
    max_seqlen: int, bias: Tensor | None = None, activation: str | None = "silu",
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Convolve prompt rows and store the last width - 1 inputs of each request; cursors stay.

    The same equation as `verify`, for any number of rows: a chunk of a prompt continues from the
    rows that the chunk before it stored.

    Arguments, result, errors, numerics and source as in `verify`, but for two:

    Args:
        conv_ring: stored inputs, [S, R, D], R a power of two >= width - 1; last stride 1; in-out.
        max_seqlen: most rows of one request, in place of `max_verify_tokens`.
    """
    out = _output(x) if out is None else out
    batch = Batch(cu_seqlens, slots, max_seqlen)
    log = Log(conv_ring, seq_len)
    _prefill(Rows(x, out), Taps(weight, bias, activation), log, batch, backend=backend)
    return out


def explain_verify(rows: Rows, taps: Taps, log: Log, batch: Batch) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a verify call, or None."""
    return _verify.explain(rows, taps, log, batch)


def _output(x: Tensor) -> Tensor:
    return x.new_empty(x.shape) if isinstance(x, Tensor) else x


def _check(rows: Rows, taps: Taps, log: Log, batch: Batch, num_appended: int) -> None:
    dims: Dims = {}
    check_tensor("x", rows.x, "N D", dims, *FLOATS)
    check("weight", taps.weight, "D width", dims)
    check_dtype("weight", taps.weight, *FLOATS)
    check_tensor("conv_ring", log.conv_ring, "S R D", dims, *FLOATS)
    check_batch(batch, log.seq_len, dims)
    if taps.bias is not None:
        check_tensor("bias", taps.bias, "D", dims, *FLOATS)
    if taps.activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {taps.activation!r}")
    check_tensor("out", rows.out, "N D", dims, rows.x.dtype)
    capacity, needed = dims["R"], dims["width"] - 1 + num_appended
    if capacity & (capacity - 1) or capacity < needed:
        raise ValueError(
            f"conv_ring: expected R a power of two of at least {needed} rows (width - 1 + rows of "
            f"a step), got {capacity}"
        )


def _check_verify(rows: Rows, taps: Taps, log: Log, batch: Batch) -> None:
    check_option("max_verify_tokens", batch.max_rows, int, low=0)
    _check(rows, taps, log, batch, batch.max_rows)


def _check_prefill(rows: Rows, taps: Taps, log: Log, batch: Batch) -> None:
    check_option("max_seqlen", batch.max_rows, int, low=0)
    _check(rows, taps, log, batch, 0)


_verify = register_kernel(
    "causal_conv1d.verify", launch.explain_verify, launch.verify, cpu.verify, _check_verify
)
_prefill = register_kernel(
    "causal_conv1d.prefill", launch.explain_prefill, launch.prefill, cpu.prefill, _check_prefill
)
