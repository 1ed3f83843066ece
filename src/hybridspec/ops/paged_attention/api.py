"""Public functions of paged attention: checks, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import LIBRARY
from hybridspec.ops.paged_attention import reference

__all__ = ["prefill", "verify"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


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
    """Append the keys and values of a decode step to the pages and attend over the context."""
    out = _prepare(q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, out)
    torch.ops.hybridspec.paged_attention_verify(
        q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, max_verify_tokens,
        q.shape[2] ** -0.5 if scale is None else scale, out, _choose(backend),
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
    """The same as `verify` for long rows."""
    out = _prepare(q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, out)
    torch.ops.hybridspec.paged_attention_prefill(
        q, k, v, k_pages, v_pages, page_table, seq_len, cu_seqlens, slots, max_seqlen,
        q.shape[2] ** -0.5 if scale is None else scale, out, _choose(backend),
    )  # fmt: skip
    return out


def _choose(backend: str) -> str:
    if backend not in ("auto", "reference"):
        raise UnsupportedError(f"backend: expected 'auto' or 'reference', got {backend!r}")
    return "reference"


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
    """Check shapes and dtypes, and return the output tensor."""
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
    if dims["Hq"] % dims["Hkv"]:
        raise ValueError(f"q: expected a multiple of {dims['Hkv']} heads, got {dims['Hq']}")
    if dims["D"] % 16 or not 16 <= dims["D"] <= 256:
        raise UnsupportedError(
            f"q: expected a head size that is a multiple of 16 up to 256, got {dims['D']}"
        )
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check("out", out, "N Hq D", dims)
    check_dtype("out", out, q.dtype)
    return out


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, "
    "Tensor seq_len, Tensor cu_seqlens, Tensor slots, int max_rows, float scale, Tensor(c!) out, "
    "str backend"
)


def _verify(*args) -> None:
    reference.verify(*args[:-1])


def _prefill(*args) -> None:
    reference.prefill(*args[:-1])


for _name, _implementation in (("verify", _verify), ("prefill", _prefill)):
    LIBRARY.define(f"paged_attention_{_name}({_ARGUMENTS}) -> ()")
    LIBRARY.impl(f"paged_attention_{_name}", _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"hybridspec::paged_attention_{_name}", lambda *args: None, lib=LIBRARY
    )
