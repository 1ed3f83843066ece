"""Which token stands at each row: the one call of a step between logits and acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import Supports, always, choose_backend
from .._checks import Dims, check, check_dtype
from .._library import register
from . import cpu
from .table import SamplingTable, SamplingUses

__all__ = ["NO_TOKEN", "choose"]

NO_TOKEN = -1  # where nothing can be chosen

_EVERYTHING = SamplingUses.everything()
_CANDIDATES: dict[str, Supports] = {"reference": always}


def choose(
    logits: Tensor,
    slots: Tensor,
    offsets: Tensor,
    table: SamplingTable,
    seq_len: Tensor,
    drafts: Tensor,
    token_pages: Tensor,
    page_table: Tensor,
    *,
    mask: Tensor | None = None,
    uses: SamplingUses | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Choose one token per row; nothing but `out` is modified.

    Row (slot, j) chooses at position seq_len[slot] + 1 + j and has seen drafts[slot, :j], pending.

        x = logit + bias
        x = x / repetition if x > 0 else x * repetition    for tokens of prompt, output, pending
        x = x - frequency * count - presence * [count > 0]      count: in output and pending
        x = -inf    for a token that is not allowed, ends before ends_from, or completes a bad word
        token = argmax(process_logits(x, temperature, top_k, top_p, min_p) + noise)

    Args:
        logits: raw scores, [N, V], fp32; in.
        slots: slot of each row, [N], int32, -1 = hold row; in.
        offsets: j of each row, [N], int32; in.
        table: sampling data by slot; in.
        seq_len: position of the newest committed token, [S], int32; in.
        drafts: tokens behind it, [S, k], int64, negative = none; in.
        token_pages: the log of committed tokens, [P, page_size], int32; in.
        page_table: [S, pages], int32; in.
        mask: more bits of tokens that may be chosen, by row, [N, ceil(V / 32)], int32; in.
        uses: what some row may need; None is everything.
        out: [N], int64; out.
        backend: "auto" or "reference".

    Returns:
        Token ids [N], int64: the lowest of equals. NO_TOKEN for a hold row, for a row that holds a
        NaN or +inf, and where nothing may be chosen.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend cannot serve the call.

    Numerics:
        fp32, one rounding per operation. A row's token is a function of its logits, its slot's data
        and its offset; the other rows do not matter.
    """
    _check(
        logits, slots, offsets, table.temperature, table.allowed_bits, table.counts, seq_len,
        drafts, token_pages, page_table, mask,
    )  # fmt: skip
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    else:
        check("out", out, "N", {"N": slots.shape[0]})
        check_dtype("out", out, torch.int64)
    flags = (uses or _EVERYTHING).flags()
    _choose(
        logits, slots, offsets, table.tensors(), seq_len, drafts, token_pages, page_table, mask,
        flags, out, backend,
    )  # fmt: skip
    return out


_ARGUMENTS = (
    ("logits", "N V", torch.float32),
    ("slots", "N", torch.int32),
    ("offsets", "N", torch.int32),
    ("table.temperature", "S", torch.float32),
    ("table.allowed_bits", "S words", torch.int32),
    ("table.counts", "C V", torch.int16),
    ("seq_len", "S", torch.int32),
    ("drafts", "S k", torch.int64),
    ("token_pages", "P page_size", torch.int32),
    ("page_table", "S pages", torch.int32),
    ("mask", "N words", torch.int32),
)
_seen: set[tuple[object, ...]] = set()  # shapes and dtypes that were found right
_MOST_SEEN = 4096


def _check(*tensors: Tensor | None) -> None:
    signature = tuple([None if t is None else (t.shape, t.dtype) for t in tensors])
    if signature in _seen:
        return
    dims: Dims = {}
    for (name, spec, dtype), tensor in zip(_ARGUMENTS, tensors, strict=True):
        if tensor is not None:
            check(name, tensor, spec, dims)
            check_dtype(name, tensor, dtype)
    if dims["words"] != -(-dims["V"] // 32):
        raise ValueError(
            f"table.allowed_bits: expected [S, {-(-dims['V'] // 32)}] for {dims['V']} tokens, got "
            f"[S, {dims['words']}]"
        )
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(signature)


def _dispatch(logits, slots, offsets, table, *rest) -> None:
    *others, mask, flags, out, backend = rest
    choose_backend("sampling.choose", backend, _CANDIDATES, logits)
    if logits.shape[0]:
        cpu.choose(
            logits, slots, offsets, SamplingTable.of(table), *others, mask, SamplingUses.of(flags),
            out,
        )  # fmt: skip


_choose = register(
    "sampling_choose(Tensor logits, Tensor slots, Tensor offsets, Tensor[] table, Tensor seq_len, "
    "Tensor drafts, Tensor token_pages, Tensor page_table, Tensor? mask, bool[] uses, "
    "Tensor(a!) out, str backend)",
    _dispatch,
)
