"""Causal attention as its definition reads: one row and one head after another, in fp64."""

from __future__ import annotations

import torch

from hybridspec.ops._requests import Batch
from hybridspec.ops.paged_attention.call import Pages, Rows


def verify(rows: Rows, pages: Pages, batch: Batch) -> None:
    """Store every row in its page, then attend to all positions up to its own."""
    page_size, group = pages.k.shape[1], rows.q.shape[1] // rows.k.shape[1]
    rows.out.zero_()
    for b, slot in enumerate(batch.slots.tolist()):
        if slot < 0:
            continue
        position, table = int(pages.seq_len[slot]), pages.table[slot].tolist()
        for t in range(*batch.cu_seqlens[b : b + 2].tolist()):
            places = [(table[p // page_size], p % page_size) for p in range(position + 1)]
            pages.k[places[-1]] = rows.k[t].to(pages.k.dtype)
            pages.v[places[-1]] = rows.v[t].to(pages.v.dtype)
            keys = torch.stack([pages.k[place] for place in places]).double()
            values = torch.stack([pages.v[place] for place in places]).double()
            for h in range(rows.q.shape[1]):
                scores = rows.score_scale() * keys[:, h // group] @ rows.q[t, h].double()
                rows.out[t, h] = scores.softmax(0) @ values[:, h // group]
            position += 1
