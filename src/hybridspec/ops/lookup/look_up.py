"""Looking up: the drafter that needs no weights, on the log of tokens that lies beside the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import choose_backend
from .._checks import Dims, check, check_dtype, check_last_stride, check_option
from .._library import register
from .._triton_support import explain_tensors, triton_or_reference
from . import cpu

__all__ = ["look_up"]


def _explain(token_pages: Tensor) -> str | None:
    return explain_tensors([("token_pages", token_pages)], (torch.int32,))


_candidates = triton_or_reference(_explain)


def look_up(
    token_pages: Tensor,
    page_table: Tensor,
    seq_len: Tensor,
    slots: Tensor,
    *,
    count: int,
    num_tokens: int = 2,
    max_places: int = 16,
    max_agreement: int = 16,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue each request's tokens as they went on before; nothing is modified.

    Of the `max_places` latest places at which its last `num_tokens` tokens stand, the one with the
    most agreeing tokens in front of it counts, and the latest of equals. What follows there is
    repeated if it is too short.

    Args:
        token_pages: the log of tokens, [P, page_size], int32; in.
        page_table: [S, pages], int32; in.
        seq_len: position of each slot's newest token, which is in the log, [S], int32; in.
        slots: [B], int32, -1 = nobody; in.
        count: k, drafts to return for each request.
        num_tokens: how many tokens must agree for a place to count.
        max_places: places to compare.
        max_agreement: how many tokens are compared at a place, at least `num_tokens`.
        backend: "auto", "triton" or "reference"; the last one looks at values.

    Returns:
        Drafts [B, k] int64, -1 where there are none; how many there are, 0 or k, [B] int32; how
        many tokens agree, [B] int32.

    Raises:
        ValueError, TypeError: if a shape, dtype or option is wrong.
        UnsupportedError: if the backend cannot serve the call.
    """
    dims: Dims = {}
    check("token_pages", token_pages, "P page_size", dims)
    check("page_table", page_table, "S pages", dims)
    check("seq_len", seq_len, "S", dims)
    check("slots", slots, "B", dims)
    given = {"token_pages": token_pages, "page_table": page_table, "seq_len": seq_len}
    for name, tensor in {**given, "slots": slots}.items():
        check_dtype(name, tensor, torch.int32)
        check_last_stride(name, tensor)
    check_option("count", count, int, low=0)
    check_option("num_tokens", num_tokens, int, low=1)
    check_option("max_places", max_places, int, low=1)
    check_option("max_agreement", max_agreement, int, low=num_tokens)
    size, device = slots.shape[0], slots.device
    drafts = torch.empty((size, count), dtype=torch.int64, device=device)
    num = torch.empty(size, dtype=torch.int32, device=device)
    agreement = torch.empty_like(num)
    _look_up(
        token_pages, page_table, seq_len, slots, num_tokens, max_places, max_agreement, drafts, num,
        agreement, backend,
    )  # fmt: skip
    return drafts, num, agreement


def _dispatch(token_pages, *rest) -> None:
    *others, backend = rest
    chosen = choose_backend("lookup.look_up", backend, _candidates(token_pages), token_pages)
    run = cpu.look_up
    if chosen == "triton":
        from . import launch

        run = launch.look_up
    run(token_pages, *others)


_look_up = register(
    "lookup_look_up(Tensor token_pages, Tensor page_table, Tensor seq_len, Tensor slots, "
    "int num_tokens, int max_places, int max_agreement, Tensor(a!) drafts, Tensor(b!) num, "
    "Tensor(c!) agreement, str backend)",
    _dispatch,
)
