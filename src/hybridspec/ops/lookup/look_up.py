"""Prompt lookup: the drafter that needs no weights, on the log of tokens beside the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check_option, check_tensor
from hybridspec.ops._library import register_kernel
from hybridspec.ops._triton_support import explain_tensors
from hybridspec.ops.lookup import cpu, launch
from hybridspec.ops.lookup.call import Found, Log, Search

__all__ = ["look_up"]


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
        slots: [B], int32, -1 = padding; in.
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
        UnsupportedError: if the backend does not support the call.
    """
    check_option("count", count, int, low=0)
    size, device = slots.shape[0], slots.device
    drafts = torch.empty((size, count), dtype=torch.int64, device=device)
    num = torch.empty(size, dtype=torch.int32, device=device)
    found = Found(drafts, num, torch.empty_like(num))
    log, search = (
        Log(token_pages, page_table, seq_len),
        Search(num_tokens, max_places, max_agreement),
    )
    _look_up(log, slots, search, found, backend=backend)
    return found


def _check(log: Log, slots: Tensor, search: Search, found: Found) -> None:
    dims: Dims = {}
    specs = (("token_pages", "P page_size"), ("page_table", "S pages"), ("seq_len", "S"))
    for (name, spec), tensor in zip((*specs, ("slots", "B")), (*log, slots), strict=True):
        check_tensor(name, tensor, spec, dims, torch.int32)
    check_option("num_tokens", search.num_tokens, int, low=1)
    check_option("max_places", search.max_places, int, low=1)
    check_option("max_agreement", search.max_agreement, int, low=search.num_tokens)


def _explain(log: Log, *others: object) -> str | None:
    return explain_tensors([("token_pages", log.token_pages)], (torch.int32,))


_look_up = register_kernel("lookup.look_up", _explain, launch.look_up, cpu.look_up, _check)
