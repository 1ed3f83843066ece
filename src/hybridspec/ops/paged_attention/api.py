"""Public functions of paged attention: checks, output allocation, operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._backends import always
from hybridspec.ops._checks import (
    FLOATS,
    INTEGERS,
    Dims,
    check,
    check_dtype,
    check_option,
    check_tensor,
)
from hybridspec.ops._library import Backend, register
from hybridspec.ops._requests import Batch, check_batch
from hybridspec.ops.paged_attention import cpu, fa3, launch, launch_pieces, launch_prefill
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["explain_prefill", "explain_verify", "prefill", "verify"]


def verify(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    seq_len: Tensor, cu_seqlens: Tensor, slots: Tensor, *,
    max_verify_tokens: int, scale: float | None = None, out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        backend: "auto", "triton", "fa3", "reference" or "pieces". "fa3" multiplies stored values
            behind a request's last position with zero, so they have to be finite. With "pieces" the
            bits of a row do not depend on the step and the batch that it comes in.

    Returns:
        [N, Hq, D] in the dtype of `q`; zeros in rows that belong to no slot.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: for a head size that is not supported, or if the requested
            backend does not support the call; the message says why.
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
    if out is None and isinstance(q, Tensor):
        out = q.new_empty(q.shape)
    pages = Pages(k_pages, v_pages, page_table, seq_len)
    batch = Batch(cu_seqlens, slots, max_verify_tokens)
    _verify(Rows(q, k, v, out, scale), pages, batch, backend=backend)
    return out


def prefill(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor,
    seq_len: Tensor, cu_seqlens: Tensor, slots: Tensor, *,
    max_seqlen: int, scale: float | None = None, out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Append the keys and values of prompt rows to the pages, then attend; the cursor stays.

    The same equation as `verify`, for any number of rows: a chunk of a prompt attends over the
    chunks before it. Memory beyond the live keys and values is bounded.

    Arguments, result, errors, numerics and source as in `verify`, but for two:

    Args:
        max_seqlen: most rows of one request, in place of `max_verify_tokens`.
        backend: as in `verify`; "auto" prefers "fa3".
    """
    if out is None and isinstance(q, Tensor):
        out = q.new_empty(q.shape)
    pages = Pages(k_pages, v_pages, page_table, seq_len)
    batch = Batch(cu_seqlens, slots, max_seqlen)
    _prefill(Rows(q, k, v, out, scale), pages, batch, backend=backend)
    return out


def explain_verify(rows: Rows, pages: Pages, batch: Batch) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a verify call, or None."""
    return _verify.explain(rows, pages, batch)


def explain_prefill(rows: Rows, pages: Pages, batch: Batch) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a prefill call, or None."""
    return _prefill.explain(rows, pages, batch)


def _check(rows: Rows, pages: Pages, batch: Batch) -> None:
    dims: Dims = {}
    floats = {"q": rows.q, "k": rows.k, "v": rows.v, "k_pages": pages.k, "v_pages": pages.v}
    specs = ("N Hq D", "N Hkv D", "N Hkv D", "P page_size Hkv D", "P page_size Hkv D")
    for (name, tensor), spec in zip(floats.items(), specs, strict=True):
        check_tensor(name, tensor, spec, dims, *FLOATS)
    check("page_table", pages.table, "S max_pages", dims)
    check_batch(batch, pages.seq_len, dims)
    if dims["Hkv"] == 0 or dims["Hq"] % dims["Hkv"]:
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {dims['Hkv']} heads of k, "
            f"got {dims['Hq']}"
        )
    if dims["D"] % 16 or not 16 <= dims["D"] <= 256:
        raise UnsupportedError(
            f"q: expected a head size that is a multiple of 16 up to 256, got {dims['D']}"
        )
    check_dtype("page_table", pages.table, *INTEGERS)
    check("out", rows.out, "N Hq D", dims)
    check_dtype("out", rows.out, rows.q.dtype)
    if rows.scale is not None:
        check_option("scale", rows.scale, float)


def _check_verify(rows: Rows, pages: Pages, batch: Batch) -> None:
    _check(rows, pages, batch)
    check_option("max_verify_tokens", batch.max_rows, int, low=0)


def _check_prefill(rows: Rows, pages: Pages, batch: Batch) -> None:
    _check(rows, pages, batch)
    check_option("max_seqlen", batch.max_rows, int, low=0)


# In order of preference; measured in benchmarks/attention_verify.py.
_verify = register(
    "paged_attention.verify",
    {
        "triton": Backend(launch.explain_verify, launch.verify),
        "fa3": Backend(fa3.explain, fa3.verify),
        "reference": Backend(always, cpu.verify),
        # Never chosen by "auto", which has found one before.
        "pieces": Backend(launch_pieces.explain_verify, launch_pieces.verify),
    },
    _check_verify,
)
_prefill = register(
    "paged_attention.prefill",
    {
        "fa3": Backend(fa3.explain, fa3.verify),
        "triton": Backend(launch.explain_call, launch_prefill.prefill),
        "reference": Backend(always, cpu.prefill),
    },
    _check_prefill,
)
