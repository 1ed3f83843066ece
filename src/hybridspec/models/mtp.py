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

from hybridspec.models.layers import DecoderLayer, Rotary, Rows
from hybridspec.ops.norms import RmsNorm
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import KvMemory

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
        rotary: the target's rotary embedding.
    """

    embedding: Tensor
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    in_weight: Tensor
    layer: DecoderLayer
    norm: RmsNorm
    rotary: Rotary

    def forward(self, token_ids: Tensor, hidden: Tensor, step: Step, memory: KvMemory) -> Tensor:
        """Run the head over rows and append their keys and values to its own pages.

        out = norm(layer(W [norm_e(embed(token)) | norm_h(hidden)]))

        Args:
            token_ids: the token after each row's position, [N] int64; in.
            hidden: the target's hidden states after its final norm, or this head's own output for
                a row that drafts on, [N, D]; in.
            step: row layout; its own tokens are not looked at.
            memory: the head's; its pages in-out, its cursor in.

        Returns:
            Hidden states after the head's norm, [N, D]: input of the LM head and of the next draft.
        """
        embedded = self.embedding_norm.forward(F.embedding(token_ids, self.embedding))
        x = torch.cat((embedded, self.hidden_norm.forward(hidden)), dim=-1)
        x = F.linear(x, self.in_weight)
        y, rows = self.layer.mixer_norm.forward(x), Rows(step, self.rotary.rows(step.positions))
        return self.layer.forward(x, y, rows, memory, self.norm)[1]
