"""The multi-token-prediction head that drafts: one attention layer over (token, hidden) pairs.

Row i pairs the target's hidden state of position i with the token at position i + 1 and predicts
the token at i + 2. Its rows keep the position of the hidden state. Drafting on feeds the head's own
output back as the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.layers import DecoderLayer, RmsNorm, RotaryTable
from hybridspec.runtime.pools import KvPool
from hybridspec.runtime.step import Step

__all__ = ["MtpHead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpHead:
    """The draft head; embedding and LM head are the target's.

    Attributes:
        embedding: the target's token embedding, [vocab, D].
        embedding_norm, hidden_norm: norms of both inputs.
        in_weight: projection of [embedding | hidden], [D, 2 D].
        layer: the attention layer.
        norm: the norm behind it.
        rotary: the target's rotary table.
    """

    embedding: Tensor
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    in_weight: Tensor
    layer: DecoderLayer
    norm: RmsNorm
    rotary: RotaryTable

    def forward(
        self, token_ids: Tensor, hidden: Tensor, step: Step, kv_pool: KvPool, page_table: Tensor
    ) -> Tensor:
        """Run the head over rows and append their keys and values to its own pages.

        out = norm(layer(W [norm_e(embed(token)) | norm_h(hidden)]))

        Args:
            token_ids: the token after each row's position, [N] int64; in.
            hidden: the target's hidden states after its final norm, or this head's own output for
                a row that drafts on, [N, D]; in.
            step: row layout; `step.seq_len` is the head's own cursor.
            kv_pool: pages of the head's layer; in-out.
            page_table: [S, max_pages] int32; in.

        Returns:
            Hidden states after the head's norm, [N, D]: input of the LM head and of the next draft.
        """
        self.rotary.reserve(page_table.shape[1] * kv_pool.k_pages.shape[1])
        embedded = self.embedding_norm.forward(F.embedding(token_ids, self.embedding))
        x = torch.cat((embedded, self.hidden_norm.forward(hidden)), dim=-1)
        x = F.linear(x, self.in_weight)
        rotary = self.rotary.rows(step.positions)
        x = self.layer.forward(x, rotary, step, kv_pool, page_table)
        return self.norm.forward(x)
