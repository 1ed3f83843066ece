"""How the Triton kernels are launched; they are imported only then, so this needs no Triton."""

from __future__ import annotations

from torch import Tensor

__all__ = ["explain_verify", "verify"]


def explain_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    out: Tensor,
    max_verify_tokens: int,
) -> str | None:
    """Say why the Triton kernels cannot serve a verify call, or return None."""
    return "there is no kernel yet"


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
    max_verify_tokens: int,
    scale: float,
    out: Tensor,
) -> None:
    """Launch the verify kernels; arguments as `api.verify`."""
    raise NotImplementedError
