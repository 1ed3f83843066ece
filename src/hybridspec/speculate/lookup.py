"""Drafting without a draft head: repeat what followed when the newest tokens stood before.

Costs next to nothing and needs no weights. It helps where a text takes up what it already holds:
code, summaries, answers about a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.ops.lookup import look_up
from hybridspec.ops.verify_plan import Step
from hybridspec.speculate.decoder import Asks, Decoder
from hybridspec.speculate.draft import wanted_drafts

__all__ = ["LookupDrafter"]


class LookupDrafter:
    """Drafts from the request's own tokens, in the log beside its keys."""

    def absorb(self, next_tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Return what came: the tokens are in the log; arguments as in `Drafter`."""
        return hidden

    def propose(
        self, decoder: Decoder, last_hidden: Tensor, slots: Tensor, asks: Asks, num_drafts: int
    ) -> None:
        """Propose what followed each request's newest tokens before, nothing if they are new.

        The confidence of m agreeing tokens is m / (m + 1), for each draft. Arguments as in
        `Drafter`.
        """
        pools, requests = decoder.pools, decoder.requests
        wanted = wanted_drafts(decoder, slots, num_drafts)
        drafts, found, agreement = look_up(
            pools.token_pages,
            pools.page_table,
            pools.seq_len,
            torch.where(wanted > 0, slots, -1),
            count=requests.most_drafts,
        )
        rows = requests.rows_of(slots).long()
        requests.num_drafts.index_copy_(0, rows, torch.minimum(found, wanted))
        requests.next_tokens[:, 1:].index_copy_(0, rows, drafts.clamp_(min=0))
        if asks.has_confidences:
            sure = (agreement / (agreement + 1)).unsqueeze(-1).expand(-1, requests.most_drafts)
            requests.confidences.index_copy_(0, rows, sure.float())
