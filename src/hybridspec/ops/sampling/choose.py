"""Which token stands at each row: the one call of a step between logits and acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from .._backends import choose_backend
from .._checks import Dims, check, check_dtype, check_last_stride
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
    dims: Dims = {}
    check("logits", logits, "N V", dims)
    check_dtype("logits", logits, torch.float32)
    check("slots", slots, "N", dims)
    check("offsets", offsets, "N", dims)
    check("temperature", table.temperature, "S", dims)
    check("counts", table.counts, "C V", dims)
    check("seq_len", seq_len, "S", dims)
    check("drafts", drafts, "S k", dims)
    check("token_pages", token_pages, "P page_size", dims)
    check("page_table", page_table, "S pages", dims)
    check_dtype("drafts", drafts, torch.int64)
    integers = {"slots": slots, "offsets": offsets, "seq_len": seq_len}
    for name, tensor in {**integers, "token_pages": token_pages, "page_table": page_table}.items():
        check_dtype(name, tensor, torch.int32)
        check_last_stride(name, tensor)
    check_last_stride("logits", logits)
    check_last_stride("drafts", drafts)
    if mask is not None:
        check("mask", mask, f"N {-(-dims['V'] // 32)}", dims)
        check_dtype("mask", mask, torch.int32)
        check_last_stride("mask", mask)
    if out is None:
        out = torch.empty(dims["N"], dtype=torch.int64, device=logits.device)
    check("out", out, "N", dims)
    check_dtype("out", out, torch.int64)
    check_last_stride("out", out)
    flags = (uses or _EVERYTHING).flags()
    _choose(
        logits, slots, offsets, table.tensors(), seq_len, drafts, token_pages, page_table, mask,
        flags, out, backend,
    )  # fmt: skip
    return out


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
