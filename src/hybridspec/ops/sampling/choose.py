"""Choosing each row's token: the one call of a step between logits and acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops._checks import Dims, check_tensor
from hybridspec.ops._library import register_kernel
from hybridspec.ops._triton_support import explain_tensors
from hybridspec.ops.sampling import cpu, launch
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.table import SamplingTable, SamplingUses

__all__ = ["NO_TOKEN", "choose", "explain_choose"]

NO_TOKEN = -1  # where nothing can be chosen

_EVERYTHING = SamplingUses.everything()


def _explain(logits: Tensor, *others: object) -> str | None:
    return explain_tensors([("logits", logits)], (torch.float32,))


def choose(
    logits: Tensor, slots: Tensor, offsets: Tensor, table: SamplingTable, seq_len: Tensor,
    drafts: Tensor, token_pages: Tensor, page_table: Tensor, *,
    mask: Tensor | None = None, uses: SamplingUses | None = None, out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        slots: slot of each row, [N], int32, -1 = padding row; in.
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
        Token ids [N], int64: the lowest of equals. NO_TOKEN for a padding row, for a row that holds
        a NaN or +inf, and where nothing may be chosen.

    Raises:
        ValueError, TypeError: if a shape or dtype is wrong.
        UnsupportedError: if the backend does not support the call.

    Numerics:
        Edits in fp32, one rounding per operation; scores in fp64 with noise rounded to fp32;
        probabilities as in mass.py. A row's token is a function of its logits, its slot's data and
        its offset, the same on every backend; the other rows do not matter.
    """
    if out is None:
        out = torch.empty(slots.shape[0], dtype=torch.int64, device=slots.device)
    rows, text = Rows(slots, offsets, mask), Text(seq_len, drafts, token_pages, page_table)
    _choose(logits, rows, table, text, uses or _EVERYTHING, out, backend=backend)
    return out


def explain_choose(device: torch.device) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a device, or None."""
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    pages, drafts = slots.view(1, 1), slots.view(1, 1).long()
    table, text = SamplingTable.create(1, 1, device=device), Text(slots, drafts, pages, pages)
    rows = Rows(slots, slots, None)
    return _choose.explain(pages.float(), rows, table, text, _EVERYTHING, drafts[0])


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
    ("out", "N", torch.int64),
)


def _check(
    logits: Tensor, rows: Rows, table: SamplingTable, text: Text, uses: SamplingUses, out: Tensor
) -> None:
    dims: Dims = {}
    tensors = (
        logits, rows.slots, rows.offsets, table.temperature, table.allowed_bits, table.counts,
        *text, rows.mask, out,
    )  # fmt: skip
    for (name, spec, dtype), tensor in zip(_ARGUMENTS, tensors, strict=True):
        if tensor is not None:
            check_tensor(name, tensor, spec, dims, dtype)
    if dims["words"] != -(-dims["V"] // 32):
        raise ValueError(
            f"table.allowed_bits: expected [S, {-(-dims['V'] // 32)}] for {dims['V']} tokens, got "
            f"[S, {dims['words']}]"
        )


_choose = register_kernel("sampling.choose", _explain, launch.choose, cpu.choose, _check)
