"""Token-by-token decoding of the training-form model, for evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_model.model import (
    DecoderLayer,
    DemoModel,
    attention_finish,
    attention_heads,
    gdn_finish,
    gdn_heads,
    gdn_projections,
    rms_norm,
)


class Decoder:
    """Decodes a batch of equally long sequences; state, convolution history and keys live here."""

    def __init__(self, model: DemoModel, batch: int, capacity: int) -> None:
        """Empty state for `batch` sequences of at most `capacity` tokens."""
        config, device = model.config, model.cos.device
        self.model, self.position = model, 0
        conv_dim = model.model.layers[0].linear_attn.conv1d.weight.shape[0]
        self.memory = []
        for i in range(config.num_layers):
            if config.is_full_attention(i):
                shape = (2, batch, config.num_heads, capacity, config.head_dim)
                self.memory.append(torch.zeros(shape, device=device))
                continue
            shape = (batch, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim)
            history = torch.zeros(batch, config.conv_width - 1, conv_dim, device=device)
            self.memory.append([history, torch.zeros(shape, device=device)])

    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[B, vocab]` after one more token `[B]` of every sequence."""
        model, config = self.model, self.model.config
        x = model.embed(tokens[:, None])
        for i, layer in enumerate(model.model.layers):
            mixer = self._attention if config.is_full_attention(i) else self._delta_rule
            x = mixer(i, layer, x)
        self.position += 1
        return model.logits(rms_norm(x, model.model.norm.weight, config.eps))[:, 0]

    def _attention(self, i: int, layer: DecoderLayer, x: Tensor) -> Tensor:
        model, end = self.model, self.position + 1
        rows = slice(self.position, end)
        q, k, v, gate = attention_heads(
            layer, x, model.cos[rows], model.sin[rows], model.config, model.dtype
        )
        self.memory[i][0][:, :, rows], self.memory[i][1][:, :, rows] = k, v
        keys, values = self.memory[i][:, :, :, :end]
        o = F.scaled_dot_product_attention(q, keys, values)
        return attention_finish(layer, x, o, gate, model.config, model.dtype)

    def _delta_rule(self, i: int, layer: DecoderLayer, x: Tensor) -> Tensor:
        model, (history, state) = self.model, self.memory[i]
        mixed, z, log_decay, beta = gdn_projections(layer, x, model.config, model.dtype)
        q, k, v = gdn_heads(layer, mixed, model.config, history)
        groups = v.shape[2] // k.shape[2]
        q, k = (h[:, 0].repeat_interleave(groups, dim=1)[..., None] for h in (q, k))
        state = state * log_decay[:, 0].exp()[..., None, None]
        correction = beta[:, 0, :, None] * (v[:, 0] - (state * k).sum(-2))
        state = state + k * correction[..., None, :]
        self.memory[i] = [torch.cat((history[:, 1:], mixed.float()), dim=1), state]
        o = (state * q).sum(-2)[:, None]
        return gdn_finish(layer, x, o, z, model.config, model.dtype)


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """argmax(logits), or argmax(logits / temperature + Gumbel noise), which is a sample."""
    return (logits if noise is None else logits / temperature + noise).argmax(-1)


def generate(
    model: DemoModel, prompts: Tensor, count: int, temperature: float, noise: Tensor | None
) -> Tensor:
    """Continues `prompts [B, P]` by `count` tokens; noise `[B, P + count, vocab]` by position."""
    length = prompts.shape[1]
    decoder = Decoder(model, prompts.shape[0], length + count)
    tokens = list(prompts.unbind(1))
    for position in range(length + count - 1):
        logits = decoder.step(tokens[position])
        if position + 1 >= length:
            here = None if noise is None else noise[:, position + 1]
            tokens.append(choose(logits, temperature, here))
    return torch.stack(tokens, dim=1)
