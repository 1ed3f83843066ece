"""Public functions of paged attention: checks, output allocation, operator call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._backends import Supports, always, choose_backend
from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride, check_option
from hybridspec.ops._library import register
from hybridspec.ops.paged_attention import fa3, launch, launch_prefill, reference

__all__ = ["prefill", "prefill_backends", "verify", "verify_backends"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_PREFILL_BACKENDS: dict[str, Supports] = {
    "fa3": fa3.explain,
    "triton": launch_prefill.explain,
    "reference": always,
}
_PREFILL_BACKENDS_ON_CPU: dict[str, Supports] = {"reference": always, **_PREFILL_BACKENDS}
_PREFILL: dict[str, Callable[..., None]] = {
    "fa3": fa3.verify,
    "triton": launch_prefill.prefill,
    "reference": reference.prefill,
}
# In order of preference; measured in benchmarks/attention_verify.py.
_VERIFY_BACKENDS: dict[str, Supports] = {
    "triton": launch.explain_verify,
    "fa3": fa3.explain,
    "reference": always,
}
_VERIFY_BACKENDS_ON_CPU: dict[str, Supports] = {"reference": always, **_VERIFY_BACKENDS}
_VERIFY = {"triton": launch.verify, "fa3": fa3.verify, "reference": reference.verify}
_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, "
    "Tensor seq_len, Tensor cu_seqlens, Tensor slots, int max_rows, float scale, Tensor(c!) out, "
    "str backend)"
)


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_verify_tokens: int,
    scale: float | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Append the keys and values of a decode step to the pages, then attend; the cursor stays.

    With p = seq_len[slot] + t the position of row t, position j in row j mod page_size of page
    page_table[slot, j // page_size], and query head h reading key head h // (Hq / Hkv):

        K_p, V_p <- k_t, v_t
        y_t = sum_(j <= p) softmax_(j <= p)(scale * q_t . K_j) V_j

    Rows that are not committed afterwards are overwritten by the next append. Only pages that hold
    a position <= the last appended one are looked at: the entries behind them may be anything. A
    request with slot -1 or without rows touches no page.

    Args:
        q: queries, packed by request, [N, Hq, D], D a multiple of 16 up to 256; last stride 1; in.
        k: keys of the same rows, [N, Hkv, D]; last stride 1; in.
        v: values of the same rows, [N, Hkv, D]; last stride 1; in.
        k_pages: stored keys, [P, page_size, Hkv, D]; last stride 1; in-out.
        v_pages: stored values, [P, page_size, Hkv, D]; last stride 1; in-out.
        page_table: page numbers of each slot, [S, max_pages], int32 or int64; in.
        seq_len: positions stored so far, [S], int32 or int64; contiguous; any cursor; in.
        cu_seqlens: row bounds of the requests, [B+1], int32 or int64; contiguous; in.
        slots: slot of each request, -1 = padding, [B], int32 or int64; contiguous; in.
        max_verify_tokens: most rows of one request.
        scale: factor of the scores; None is D ** -0.5.
        out: where to write, [N, Hq, D], dtype of q; out.
        backend: "auto", "triton", "fa3" or "reference". "fa3" multiplies stored values behind a
            request's last position with zero, so they have to be finite.

    Returns:
        [N, Hq, D] in the dtype of `q`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: for a head size that is not supported, or if the backend asked for cannot
            serve the call; the message says why.
        ValueError: for a wrong shape, stride or backend, or (reference) more rows in a request
            than `max_verify_tokens`, more positions than the page table holds, or a live entry of
            the page table that is no page.

    Numerics:
        fp32 (fp64 if `q` is). Keys and values are rounded to the dtype of the pages, fresh ones
        too; the result is rounded once to the dtype of `out`.

    Source:
        Attention (Vaswani et al. 2017), grouped heads (Ainslie et al. 2023, arXiv:2305.13245),
        pages (Kwon et al. 2023, arXiv:2309.06180).
    """
    out = _prepare(q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, out)
    check_option("max_verify_tokens", max_verify_tokens, int, low=0)
    if scale is None:
        scale = q.shape[2] ** -0.5
    check_option("scale", scale, float)
    _verify_op(
        q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, max_verify_tokens,
        scale, out, backend,
    )  # fmt: skip
    return out


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_seqlen: int,
    scale: float | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Append the keys and values of prompt rows to the pages, then attend; the cursor stays.

    The same equation as `verify`, for any number of rows: a chunk of a prompt attends over the
    chunks before it. Memory beyond the live keys and values is bounded.

    Args:
        q: queries, packed by request, [N, Hq, D], D a multiple of 16 up to 256; last stride 1; in.
        k: keys of the same rows, [N, Hkv, D]; last stride 1; in.
        v: values of the same rows, [N, Hkv, D]; last stride 1; in.
        k_pages: stored keys, [P, page_size, Hkv, D]; last stride 1; in-out.
        v_pages: stored values, [P, page_size, Hkv, D]; last stride 1; in-out.
        page_table: page numbers of each slot, [S, max_pages], int32 or int64; in.
        seq_len: positions stored so far, [S], int32 or int64; contiguous; any cursor; in.
        cu_seqlens: row bounds of the requests, [B+1], int32 or int64; contiguous; in.
        slots: slot of each request, -1 = padding, [B], int32 or int64; contiguous; in.
        max_seqlen: most rows of one request.
        scale: factor of the scores; None is D ** -0.5.
        out: where to write, [N, Hq, D], dtype of q; out.
        backend: "auto", "fa3", "triton" or "reference". "fa3" multiplies stored values behind a
            request's last position with zero, so they have to be finite.

    Returns:
        [N, Hq, D] in the dtype of `q`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: for a head size that is not supported, or if the backend asked for cannot
            serve the call; the message says why.
        ValueError: for a wrong shape, stride or backend, or (reference) more rows in a request
            than `max_seqlen`, more positions than the page table holds, or a live entry of the
            page table that is no page.

    Numerics:
        As `verify`.

    Source:
        As `verify`.
    """
    out = _prepare(q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, out)
    check_option("max_seqlen", max_seqlen, int, low=0)
    if scale is None:
        scale = q.shape[2] ** -0.5
    check_option("scale", scale, float)
    _prefill_op(
        q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, max_seqlen,
        scale, out, backend,
    )  # fmt: skip
    return out


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Check the call and return the output tensor; the explanation is looked for on failure."""
    try:
        is_right = (
            q.ndim == k.ndim == 3
            and k.shape == v.shape
            and k_pages.shape == v_pages.shape
            and k.shape[1:] == k_pages.shape[2:]
            and q.shape[::2] == k.shape[::2]
            and q.shape[1] % k.shape[1] == 0
            and 16 <= q.shape[2] <= 256
            and q.shape[2] % 16 == 0
            and page_table.ndim == 2
            and seq_len.shape == page_table.shape[:1]
            and slots.ndim == 1
            and cu_seqlens.shape == (slots.shape[0] + 1,)
            and q.stride(2)
            == k.stride(2)
            == v.stride(2)
            == k_pages.stride(3)
            == v_pages.stride(3)
            == 1
            and q.dtype in _FLOATS
            and k.dtype in _FLOATS
            and v.dtype in _FLOATS
            and k_pages.dtype in _FLOATS
            and v_pages.dtype in _FLOATS
            and page_table.dtype in _INTEGERS
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
        _explain(q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots)
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    check("out", out, "N Hq D", {"N": q.shape[0], "Hq": q.shape[1], "D": q.shape[2]})
    check_dtype("out", out, q.dtype)
    return out


def _explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
) -> None:
    """Raise the error that names the first wrong argument."""
    dims: Dims = {}
    check("q", q, "N Hq D", dims)
    check("k", k, "N Hkv D", dims)
    check("v", v, "N Hkv D", dims)
    check("k_pages", k_pages, "P page_size Hkv D", dims)
    check("v_pages", v_pages, "P page_size Hkv D", dims)
    check("page_table", page_table, "S max_pages", dims)
    check("seq_len", seq_len, "S", dims)
    check("slots", slots, "B", dims)
    check("cu_seqlens", cu_seqlens, str(dims["B"] + 1), dims)
    if dims["Hkv"] == 0 or dims["Hq"] % dims["Hkv"]:
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {dims['Hkv']} heads of k, "
            f"got {dims['Hq']}"
        )
    if dims["D"] % 16 or not 16 <= dims["D"] <= 256:
        raise UnsupportedError(
            f"q: expected a head size that is a multiple of 16 up to 256, got {dims['D']}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("k_pages", k_pages), ("v_pages", v_pages)):
        check_last_stride(name, tensor)
        check_dtype(name, tensor, *_FLOATS)
    for name, tensor in (
        ("page_table", page_table),
        ("seq_len", seq_len),
        ("cu_seqlens", cu_seqlens),
        ("slots", slots),
    ):
        check_dtype(name, tensor, *_INTEGERS)
        if tensor is not page_table:
            check_last_stride(name, tensor)


def verify_backends(q: Tensor) -> dict[str, Supports]:
    """What may serve a verify call on the device of `q`, in order of preference."""
    return _VERIFY_BACKENDS if q.is_cuda else _VERIFY_BACKENDS_ON_CPU


def prefill_backends(q: Tensor) -> dict[str, Supports]:
    """What may serve a prefill call on the device of `q`, in order of preference."""
    return _PREFILL_BACKENDS if q.is_cuda else _PREFILL_BACKENDS_ON_CPU


def _verify(q: Tensor, *args) -> None:
    *tensors, max_verify_tokens, scale, out, backend = args
    name = choose_backend(
        "paged_attention.verify", backend, verify_backends(q), q, *tensors, out, max_verify_tokens
    )
    _VERIFY[name](q, *tensors, max_verify_tokens, scale, out)


def _prefill(q: Tensor, *args) -> None:
    *tensors, max_seqlen, scale, out, backend = args
    name = choose_backend(
        "paged_attention.prefill", backend, prefill_backends(q), q, *tensors, out, max_seqlen
    )
    _PREFILL[name](q, *tensors, max_seqlen, scale, out)


_verify_op = register(f"paged_attention_verify{_ARGUMENTS}", _verify)
_prefill_op = register(f"paged_attention_prefill{_ARGUMENTS}", _prefill)
