"""Choosing tokens with PyTorch: the CPU's backend, and the one that runs anywhere.

It reads values, so that work which no row needs is skipped. A step that must not wait for the
device uses the kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridspec.ops._library import Lasting, Written
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.gumbel import gumbel_noise
from hybridspec.ops.sampling.mass import TiledMass
from hybridspec.ops.sampling.table import COUNT_MASK, SamplingTable, SamplingUses

__all__ = ["choose"]


def choose(
    logits: Written[Tensor],
    rows: Rows,
    table: Lasting[SamplingTable],
    text: Text,
    uses: SamplingUses,
    out: Written[Tensor],
) -> None:
    """Write the token of each row; see choose.py."""
    if not logits.shape[0]:
        return
    (slots, offsets, mask), (seq_len, drafts, *_) = rows, text
    has_edits = uses.has_edits or mask is not None
    if not (has_edits or uses.has_noise):
        # The common case: one search, and as few other calls as there can be.
        most = logits.new_empty(logits.shape[0])
        torch.max(logits, -1, out=(most, out))
        if not all(map(math.isfinite, most.tolist())) or min(slots.tolist()) < 0:
            out.masked_fill_(~(most.isfinite() & (slots >= 0)), -1)
        return
    is_live = slots >= 0
    slot = slots.clamp(min=0).long()
    position = torch.where(is_live, seq_len[slot] + 1 + offsets, 0)
    x = logits
    if has_edits:
        x = logits.clone()
        if uses.has_bias:
            _add_bias(x, slot, table)
        if uses.has_counts:
            _penalise(x, slot, offsets, table, drafts)
        is_live = is_live & (x.amax(-1) < torch.inf)  # a NaN counts where its token is forbidden
        if uses.has_masks or mask is not None:
            _forbid(x, slot, position, table, mask)
        if uses.has_words:
            _forbid_words(x, slot, position, table, *text)
    torch.argmax(x, -1, out=out)
    is_live = is_live & _can_be_chosen(x, out)
    if uses.has_noise:
        _add_noise(x, slot, position, table, uses.has_filters, out)
    out.masked_fill_(~is_live, -1)


def _can_be_chosen(x: Tensor, best: Tensor) -> Tensor:
    """Whether the largest logits are numbers.

    NaN and +inf win an argmax, and -inf does where nothing else is left.
    """
    return x.gather(-1, best.unsqueeze(-1)).squeeze(-1).abs() < torch.inf


def _rows_with(condition: Tensor) -> Tensor | None:
    """Indices of the rows to work on, None if there are none."""
    rows = condition.nonzero().squeeze(-1)
    return rows if rows.shape[0] else None


def _add_bias(x: Tensor, slot: Tensor, table: SamplingTable) -> None:
    start, length = table.bias_start[slot], table.bias_len[slot]
    rows = _rows_with(length > 0)
    if rows is None:
        return
    place = torch.arange(int(length.max()), device=x.device)
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
    held = table.counts[table.count_row[mine].long()]
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
    x[rows] = after


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
    place = torch.arange(int(length.max()), device=x.device)
    is_begun = place < length[rows].unsqueeze(-1)
    index = torch.where(is_begun, start[rows].unsqueeze(-1) + place, 0)
    first, last = table.word_bounds[index], table.word_bounds[index + 1] - 1
    for back in range(1, int(torch.where(is_begun, last - first, 0).max()) + 1):
        is_compared = is_begun & (last - back >= first)
        if not is_compared.any():
            break  # a word can be as long as a request's body: most differ from the text at once
        token = _token_at(position - back, mine, seq_len, drafts, token_pages, page_table)
        wanted = table.word_tokens[(last - back).clamp(min=0)]
        is_begun = is_begun & (~is_compared | (wanted == token.unsqueeze(-1)))
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
    mine, x = slot[rows], x[rows]
    temperature = table.temperature[mine]
    scores = x * (1.0 / temperature.double()).unsqueeze(-1)
    scores += gumbel_noise(table.seed[mine], position[rows].long(), x.shape[1])
    tokens = scores.argmax(-1)
    if has_filters:
        top_k, top_p, min_p = table.top_k[mine], table.top_p[mine], table.min_p[mine]
        some = _rows_with((top_k > 0) | (top_p < 1) | (min_p > 0))
        if some is not None:
            filters = top_k[some], top_p[some], min_p[some]
            mass = TiledMass.of(x[some], temperature[some])
            tokens[some] = _filter(x[some], scores[some], tokens[some], mass, *filters)
    out[rows] = tokens


def _filter(
    x: Tensor,
    scores: Tensor,
    tokens: Tensor,
    mass: TiledMass,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Find the best token that the filters keep, from the best of all, [n].

    What a filter keeps is at least as likely as what it drops. So with a token go all that are not
    more likely, and the best of the others comes next: few rounds are needed.
    """
    tokens = tokens.clone()
    least = _kth_largest(x, top_k)
    # Where top_p is 1, a token of no mass stays too.
    limit = (top_p.double() * mass.where(x >= least)).clamp(min=1)
    limit = torch.where(top_p < 1, limit, torch.inf)
    min_p = min_p.clamp(max=1)  # so that the likeliest token is always kept
    rows = torch.arange(x.shape[0], device=x.device)
    while True:
        pivot = x.gather(-1, tokens[rows].unsqueeze(-1))
        is_above = x > pivot
        is_out = (pivot < least).squeeze(-1) | (mass.where(is_above) >= limit)
        is_out |= mass.share(pivot).squeeze(-1) < min_p
        left = _rows_with(is_out)
        if left is None:
            return tokens
        rows, mass, x = rows[left], mass.of_rows(left), x[left]
        least, limit, min_p = least[left], limit[left], min_p[left]
        scores = torch.where(is_above[left], scores[left], -torch.inf)
        tokens[rows] = scores.argmax(-1)


def _kth_largest(x: Tensor, top_k: Tensor) -> Tensor:
    """Least logit that top_k keeps, [n, 1]; -inf where it is off."""
    last = top_k.clamp(max=x.shape[1]).long() - 1
    ordered = x.topk(int(last.max()) + 1).values
    if not ordered.shape[1]:
        return x.new_full((x.shape[0], 1), -torch.inf)
    least = ordered.gather(-1, last.clamp(min=0).unsqueeze(-1))
    return torch.where(top_k.unsqueeze(-1) > 0, least, -torch.inf)
