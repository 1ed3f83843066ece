"""Choosing tokens with PyTorch: the CPU's backend, and the one that runs anywhere.

On a CPU it looks at values, so that work which no row needs is left out. On another device it reads
nothing back and does the work for every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gumbel import gumbel_noise
from .selection import process_logits
from .table import COUNT_MASK, LONGEST_WORD, SamplingTable, SamplingUses

__all__ = ["choose"]


def choose(
    logits: Tensor,
    slots: Tensor,
    offsets: Tensor,
    table: SamplingTable,
    seq_len: Tensor,
    drafts: Tensor,
    token_pages: Tensor,
    page_table: Tensor,
    mask: Tensor | None,
    uses: SamplingUses,
    out: Tensor,
) -> None:
    """Write the token of each row; see choose.py."""
    is_dead = slots < 0
    x = logits
    has_edits = uses.has_edits or mask is not None
    # The common case, greedy and without options, is one argmax: each call here costs as much.
    if uses.has_noise or has_edits:
        slot = slots.clamp(min=0).long()
        position = torch.where(is_dead, 0, seq_len[slot] + 1 + offsets)
    if has_edits:
        x = logits.clone()
        is_dead = is_dead | ~(logits.amax(-1) < torch.inf)  # also where an edit hides it
        if uses.has_bias:
            _add_bias(x, slot, table)
        if uses.has_counts:
            _penalise(x, slot, offsets, table, drafts)
        if uses.has_masks or mask is not None:
            _forbid(x, slot, position, table, mask)
        if uses.has_words:
            _forbid_words(x, slot, position, table, seq_len, drafts, token_pages, page_table)
    torch.argmax(x, -1, out=out)
    # NaN and +inf win an argmax, and -inf does where nothing else is left.
    is_dead = is_dead | ~x.gather(-1, out.unsqueeze(-1)).squeeze(-1).isfinite()
    if uses.has_noise:
        _add_noise(x, slot, position, table, uses.has_filters, out)
    out.masked_fill_(is_dead, -1)


def _rows_with(condition: Tensor) -> Tensor | None:
    """Indices of the rows to work on: on a CPU those that need it, None if there are none."""
    if condition.device.type != "cpu":
        return torch.arange(condition.shape[0], device=condition.device)
    rows = condition.nonzero().squeeze(-1)
    return rows if rows.shape[0] else None


def _most(lengths: Tensor, limit: int) -> int:
    """Room for the longest: on a CPU its length."""
    return int(lengths.max()) if lengths.device.type == "cpu" else limit


def _add_bias(x: Tensor, slot: Tensor, table: SamplingTable) -> None:
    start, length = table.bias_start[slot], table.bias_len[slot]
    rows = _rows_with(length > 0)
    if rows is None:
        return
    place = torch.arange(_most(length, table.bias_tokens.shape[0]), device=x.device)
    is_mine = place < length[rows].unsqueeze(-1)
    index = torch.where(is_mine, start[rows].unsqueeze(-1) + place, 0)
    values = torch.where(is_mine, table.bias_values[index], 0.0)
    tokens = torch.where(is_mine, table.bias_tokens[index], 0).long()
    x[rows] = x[rows].scatter_add_(-1, tokens, values)


def _penalise(
    x: Tensor, slot: Tensor, offsets: Tensor, table: SamplingTable, drafts: Tensor
) -> None:
    rows = _rows_with(table.count_row[slot] >= 0)
    if rows is None:
        return
    mine = slot[rows]
    count_row = table.count_row[mine]
    held = table.counts[count_row.clamp(min=0).long()]
    counts = (held & COUNT_MASK).to(torch.float32)
    pending = drafts[mine]
    place = torch.arange(pending.shape[1], device=x.device)
    is_pending = (place < offsets[rows].unsqueeze(-1)) & (pending >= 0)
    counts.scatter_add_(-1, pending.clamp(min=0), is_pending.to(torch.float32))
    is_said = counts > 0

    def column(values: Tensor) -> Tensor:
        return values[mine].unsqueeze(-1)

    before = x[rows]
    repetition = column(table.repetition)
    repeated = torch.where(before > 0, before / repetition, before * repetition)
    after = torch.where(is_said | (held < 0), repeated, before)
    # Two roundings, and no fused multiply-add whose use could depend on a row's place in the batch.
    after = after - column(table.frequency) * counts
    after = after - column(table.presence) * is_said
    x[rows] = torch.where((count_row >= 0).unsqueeze(-1), after, before)


def _forbid(
    x: Tensor, slot: Tensor, position: Tensor, table: SamplingTable, mask: Tensor | None
) -> None:
    allowed = table.allowed_bits[slot]
    is_early = (position < table.ends_from[slot]).unsqueeze(-1)
    allowed = torch.where(is_early, allowed & ~table.end_bits[slot], allowed)
    if mask is not None:
        allowed &= mask
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=x.device)
    is_allowed = (bits & 1).to(torch.bool).flatten(1)[:, : x.shape[1]]
    x.masked_fill_(~is_allowed, -torch.inf)


def _forbid_words(
    x: Tensor,
    slot: Tensor,
    position: Tensor,
    table: SamplingTable,
    seq_len: Tensor,
    drafts: Tensor,
    token_pages: Tensor,
    page_table: Tensor,
) -> None:
    start, length = table.word_start[slot], table.word_len[slot]
    rows = _rows_with(length > 0)
    if rows is None:
        return
    mine, position = slot[rows], position[rows]
    place = torch.arange(_most(length, table.word_bounds.shape[0] - 1), device=x.device)
    is_begun = place < length[rows].unsqueeze(-1)
    index = torch.where(is_begun, start[rows].unsqueeze(-1) + place, 0)
    first, last = table.word_bounds[index], table.word_bounds[index + 1] - 1
    for back in range(1, _most(torch.where(is_begun, last - first, 0), LONGEST_WORD - 1) + 1):
        token = _token_at(position - back, mine, seq_len, drafts, token_pages, page_table)
        wanted = table.word_tokens[(last - back).clamp(min=0)]
        is_begun = is_begun & ((last - back < first) | (wanted == token.unsqueeze(-1)))
    tokens = torch.where(is_begun, table.word_tokens[last.clamp(min=0)], 0).long()
    lost = torch.zeros_like(tokens, dtype=x.dtype).masked_fill_(is_begun, -torch.inf)
    x[rows] = x[rows].scatter_add_(-1, tokens, lost)


def _token_at(
    position: Tensor,
    slot: Tensor,
    seq_len: Tensor,
    drafts: Tensor,
    token_pages: Tensor,
    page_table: Tensor,
) -> Tensor:
    """Token of each request at a position, -1 in front of the first."""
    page_size = token_pages.shape[1]
    ahead = position - seq_len[slot] - 1
    logged = torch.where(ahead < 0, position, 0).clamp(min=0)
    page = page_table[slot, logged // page_size].clamp(min=0).long()
    token = token_pages[page, logged % page_size].long()
    if drafts.shape[1]:
        pending = drafts[slot, ahead.clamp(min=0, max=drafts.shape[1] - 1).long()]
        token = torch.where(ahead >= 0, pending, token)
    return torch.where(position >= 0, token, -1)


def _add_noise(
    x: Tensor,
    slot: Tensor,
    position: Tensor,
    table: SamplingTable,
    has_filters: bool,
    out: Tensor,
) -> None:
    """Replace the tokens of rows with a temperature."""
    rows = _rows_with(table.temperature[slot] > 0)
    if rows is None:
        return
    mine = slot[rows]
    temperature = table.temperature[mine]
    filters = (table.top_k, table.top_p, table.min_p) if has_filters else ()
    processed = process_logits(x[rows], temperature, *(column[mine] for column in filters))
    processed += gumbel_noise(table.seed[mine], position[rows].long(), x.shape[1])
    out[rows] = torch.where(temperature > 0, processed.argmax(-1), out[rows])
