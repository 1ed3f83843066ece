"""Which token stands at each row: the one call of a step between logits and acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import choose_backend
from .._checks import Dims, check, check_dtype
from .._library import register
from .._triton_support import explain_tensors, triton_or_reference
from . import cpu
from .table import SamplingTable, SamplingUses

__all__ = ["NO_TOKEN", "choose"]

NO_TOKEN = -1  # where nothing can be chosen

_EVERYTHING = SamplingUses.everything()


def _explain(logits: Tensor) -> str | None:
    return explain_tensors([("logits", logits)], (torch.float32,))


_candidates = triton_or_reference(_explain)


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
    """Choose one token per row; nothing but `out` is modified, and by kernels the logits.

    Row (slot, j) chooses at position seq_len[slot] + 1 + j and has seen drafts[slot, :j], pending.

        x = logit + bias
        x = x / repetition if x > 0 else x * repetition    for tokens of prompt, output, pending
        x = x - frequency * count - presence * [count > 0]      count: in output and pending
        x = -inf    for a token that is not allowed, ends before ends_from, or completes a bad word
        score = x / temperature + noise(seed, position, token)     (temperature 0: score = x)
        top_k: drop tokens than which k others are more likely
        top_p: drop those where the probability of the more likely ones, of all that top_k keeps,
               reaches top_p
        min_p: drop those less likely than min_p times the likeliest
        token = the one of the best score

    Args:
        logits: raw scores, [N, V], fp32; in, scratch.
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
        backend: "auto", "triton" or "reference"; the last one looks at values, so it waits for
            a device and cannot be captured in a graph.

    Returns:
        Token ids [N], int64: the lowest of equals. NO_TOKEN for a hold row, for a row that holds a
        NaN or +inf, and where nothing may be chosen.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend cannot serve the call.

    Numerics:
        Edits in fp32, one rounding per operation; scores in fp64 with noise rounded to fp32;
        probabilities as in mass.py. A row's token is a function of its logits, its slot's data and
        its offset, the same on every backend; the other rows do not matter.
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
    chosen = choose_backend("sampling.choose", backend, _candidates(logits), logits)
    if not logits.shape[0]:
        return
    run = cpu.choose
    if chosen == "triton":
        from . import launch

        run = launch.choose
    run(logits, slots, offsets, SamplingTable.of(table), *others, mask, SamplingUses.of(flags), out)


_choose = register(
    "sampling_choose(Tensor(a!) logits, Tensor slots, Tensor offsets, Tensor[] table, "
    "Tensor seq_len, Tensor drafts, Tensor token_pages, Tensor page_table, Tensor? mask, "
    "bool[] uses, Tensor(b!) out, str backend)",
    _dispatch,
)
