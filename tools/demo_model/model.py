"""The demo model in training form: the Qwen3.5 text architecture and its MTP head in plain PyTorch.

Parameters carry the names of the checkpoint, so exporting is a cast. The gated delta rule runs in
chunks (`delta_rule.py`), the head is unrolled several steps over a whole window at once
(`chain_attention.py`), and every function between two custom autograd functions is pure, so that
`torch.compile` can fuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.chain_attention import ChainKeys, chain_attention
from demo_model.delta_rule import chunked_delta_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Geometry of the demo model; every fourth layer is full attention, the others are GDN."""

    vocab_size: int = 272
    hidden_size: int = 192
    num_layers: int = 8
    intermediate_size: int = 320
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 10_000.0
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 64
    gdn_value_dim: int = 64
    conv_width: int = 4
    eps: float = 1e-6
    max_positions: int = 4096

    def is_full_attention(self, layer: int) -> bool:
        """Tells whether layer number `layer` is a full-attention layer."""
        return layer % 4 == 3


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x Wᵀ in the compute dtype."""
    return F.linear(x.to(dtype), weight.to(dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32 times (1 + weight)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding on the first dims of `x [B, T, H, D]`; cos, sin `[T, rotary]`."""
    rotary_dim = cos.shape[-1]
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    turned = turned * cos[:, None, :] + swapped * sin[:, None, :]
    return torch.cat((turned, kept), dim=-1)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution and silu in fp32; x `[B, T, C]`, weight `[C, 1, width]`.

    `history [B, width - 1, C]` holds the inputs before the window; without it they are zero.
    """
    x, num_tokens, width = x.float(), x.shape[1], weight.shape[-1]
    x = F.pad(x, (0, 0, width - 1, 0)) if history is None else torch.cat((history, x), dim=1)
    out = sum(x[:, j : j + num_tokens] * weight[:, 0, j] for j in range(width))
    return F.silu(out)


def l2_norm(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """Parameters of one GDN mixer."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        key_dim = config.gdn_key_heads * config.gdn_key_dim
        value_dim = config.gdn_value_heads * config.gdn_value_dim
        conv_dim, hidden = 2 * key_dim + value_dim, config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, config.gdn_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, config.gdn_value_heads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, config.conv_width, groups=conv_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(config.gdn_value_heads).uniform_(1, 16).log())
        # Steps between 1e-3 and 0.1, so that heads start out remembering from ten to thousands of
        # bytes; dt_bias is the inverse softplus of the step.
        step = torch.exp(torch.empty(config.gdn_value_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Weight(torch.ones(config.gdn_value_dim))
        self.out_proj = nn.Linear(value_dim, hidden, bias=False)


class Attention(nn.Module):
    """Parameters of one full-attention mixer with an output gate."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        query_dim = config.num_heads * config.head_dim
        kv_dim, hidden = config.num_kv_heads * config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(hidden, 2 * query_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_dim, bias=False)
        self.o_proj = nn.Linear(query_dim, hidden, bias=False)
        self.q_norm = Weight(torch.zeros(config.head_dim))
        self.k_norm = Weight(torch.zeros(config.head_dim))


class Mlp(nn.Module):
    """Parameters of one gated feed-forward block."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Weight(nn.Module):
    """A module with one parameter `weight`: a norm, or the embedding table."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class DecoderLayer(nn.Module):
    """Parameters of one decoder layer."""

    def __init__(self, config: DemoConfig, *, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = Weight(torch.zeros(config.hidden_size))
        self.post_attention_layernorm = Weight(torch.zeros(config.hidden_size))
        if full_attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = Mlp(config)


class Trunk(nn.Module):
    """Parameters of the target model."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = Weight(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, full_attention=config.is_full_attention(i))
            for i in range(config.num_layers)
        )
        self.norm = Weight(torch.zeros(config.hidden_size))


class Mtp(nn.Module):
    """Parameters of the multi-token-prediction head."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = Weight(torch.zeros(config.hidden_size))
        self.pre_fc_norm_hidden = Weight(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList([DecoderLayer(config, full_attention=True)])
        self.norm = Weight(torch.zeros(config.hidden_size))


# The functions below take modules as arguments and keep no state, so that each is compiled once
# and serves every layer.


def feed_forward(layer: DecoderLayer, x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x + MLP(norm(x)) on the fp32 residual stream."""
    h = rms_norm(x, layer.post_attention_layernorm.weight, eps)
    gate = linear(h, layer.mlp.gate_proj.weight, dtype)
    up = linear(h, layer.mlp.up_proj.weight, dtype)
    return x + linear(F.silu(gate) * up, layer.mlp.down_proj.weight, dtype).float()


def gdn_projections(
    layer: DecoderLayer, x: Tensor, config: DemoConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mixer's inputs: [q|k|v] before the convolution, z, log decay and beta."""
    mixer = layer.linear_attn
    h = rms_norm(x, layer.input_layernorm.weight, config.eps).to(dtype)
    mixed = linear(h, mixer.in_proj_qkv.weight, dtype)
    z = linear(h, mixer.in_proj_z.weight, dtype)
    beta = torch.sigmoid(linear(h, mixer.in_proj_b.weight, dtype).float())
    step = F.softplus(linear(h, mixer.in_proj_a.weight, dtype).float() + mixer.dt_bias)
    return mixed, z, -torch.exp(mixer.A_log) * step, beta


def gdn_heads(
    layer: DecoderLayer, mixed: Tensor, config: DemoConfig, history: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (normalised, q scaled) `[B, T, H, K]` and v `[B, T, HV, V]` in fp32."""
    key_dim = config.gdn_key_heads * config.gdn_key_dim
    heads = causal_conv(mixed, layer.linear_attn.conv1d.weight, history)
    q, k, v = heads.split([key_dim, key_dim, heads.shape[-1] - 2 * key_dim], dim=-1)
    q = l2_norm(q.unflatten(-1, (config.gdn_key_heads, -1))) * config.gdn_key_dim**-0.5
    k = l2_norm(k.unflatten(-1, (config.gdn_key_heads, -1)))
    return q, k, v.unflatten(-1, (config.gdn_value_heads, -1))


def gdn_prepare(
    layer: DecoderLayer, x: Tensor, config: DemoConfig, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Everything before the recurrence: q, k, v, log decay, beta, z."""
    mixed, z, log_decay, beta = gdn_projections(layer, x, config, dtype)
    return *gdn_heads(layer, mixed, config), log_decay, beta, z


def gdn_finish(
    layer: DecoderLayer, x: Tensor, o: Tensor, z: Tensor, config: DemoConfig, dtype: torch.dtype
) -> Tensor:
    """Gated norm, output projection, residual and feed-forward; o `[B, T, HV, V]` fp32."""
    mixer = layer.linear_attn
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + config.eps) * mixer.norm.weight
    o = o * F.silu(z.float()).unflatten(-1, (config.gdn_value_heads, -1))
    x = x + linear(o.flatten(-2), mixer.out_proj.weight, dtype).float()
    return feed_forward(layer, x, config.eps, dtype)


def attention_heads(
    layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, config: DemoConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v `[B, heads, T, D]`, K/V repeated per query head, and the gate `[B, T, heads · D]`."""
    mixer, groups = layer.self_attn, config.num_heads // config.num_kv_heads
    h = rms_norm(x, layer.input_layernorm.weight, config.eps).to(dtype)
    q_gate = linear(h, mixer.q_proj.weight, dtype).unflatten(-1, (config.num_heads, -1))
    q, gate = q_gate.chunk(2, dim=-1)
    k = linear(h, mixer.k_proj.weight, dtype).unflatten(-1, (config.num_kv_heads, -1))
    v = linear(h, mixer.v_proj.weight, dtype).unflatten(-1, (config.num_kv_heads, -1))
    q = rotate(rms_norm(q, mixer.q_norm.weight, config.eps), cos, sin).to(dtype).transpose(1, 2)
    k = rotate(rms_norm(k, mixer.k_norm.weight, config.eps), cos, sin).to(dtype).transpose(1, 2)
    k = k.repeat_interleave(groups, dim=1)
    v = v.transpose(1, 2).repeat_interleave(groups, dim=1)
    return q, k, v, gate.flatten(-2)


def attention_finish(
    layer: DecoderLayer, x: Tensor, o: Tensor, gate: Tensor, config: DemoConfig, dtype: torch.dtype
) -> Tensor:
    """Output gate, projection, residual and feed-forward; o `[B, heads, T, D]`."""
    o = o.transpose(1, 2).flatten(-2) * torch.sigmoid(gate.float())
    x = x + linear(o, layer.self_attn.o_proj.weight, dtype).float()
    return feed_forward(layer, x, config.eps, dtype)


def head_inputs(
    mtp: Mtp, embedded: Tensor, hidden: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """fc(concat[norm_e(embedding), norm_h(hidden)]): the head's residual stream."""
    parts = (
        rms_norm(embedded, mtp.pre_fc_norm_embedding.weight, eps),
        rms_norm(hidden, mtp.pre_fc_norm_hidden.weight, eps),
    )
    return linear(torch.cat(parts, dim=-1), mtp.fc.weight, dtype).float()


def token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy in nats of the tied output layer."""
    logits = linear(hidden, embedding, dtype).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# Functions of tensors and parameters alone, worth fusing: `compile_functions` compiles these.
PURE_FUNCTIONS = (
    gdn_prepare,
    gdn_finish,
    attention_heads,
    attention_finish,
    head_inputs,
    token_loss,
    rms_norm,
)


class DemoModel(nn.Module):
    """Target model and MTP head with their training loss and whole-window forwards."""

    def __init__(self, config: DemoConfig, *, dtype: torch.dtype = torch.float32) -> None:
        """Creates randomly initialised fp32 parameters; matrix products run in `dtype`."""
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model, self.mtp = Trunk(config), Mtp(config)
        self.run = {function.__name__: function for function in PURE_FUNCTIONS}
        positions = torch.arange(config.max_positions + 16, dtype=torch.float32)
        exponents = torch.arange(0, config.rotary_dim, 2) / config.rotary_dim
        angles = positions[:, None] * config.rope_theta**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def compile_functions(self) -> None:
        """Compiles the pure functions; the first forward and backward then take about a minute."""
        self.run = {n: torch.compile(f, dynamic=False) for n, f in self.run.items()}

    def embed(self, tokens: Tensor) -> Tensor:
        """Embedding rows in fp32."""
        return F.embedding(tokens, self.model.embed_tokens.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Tied output layer, fp32 logits."""
        return linear(hidden, self.model.embed_tokens.weight, self.dtype).float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states after the final norm for whole windows that start with empty state.

        Args:
            tokens: token ids, `[B, T]`, int64; T a multiple of the chunk size, 64.

        Returns:
            `[B, T, hidden]`, fp32.
        """
        config, run, num_tokens = self.config, self.run, tokens.shape[1]
        cos, sin = self.cos[:num_tokens], self.sin[:num_tokens]
        x = self.embed(tokens)
        for i, layer in enumerate(self.model.layers):
            if config.is_full_attention(i):
                q, k, v, gate = run["attention_heads"](layer, x, cos, sin, config, self.dtype)
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = run["attention_finish"](layer, x, o, gate, config, self.dtype)
            else:
                *recurrence, z = run["gdn_prepare"](layer, x, config, self.dtype)
                o = chunked_delta_rule(*recurrence)
                x = run["gdn_finish"](layer, x, o, z, config, self.dtype)
        return run["rms_norm"](x, self.model.norm.weight, config.eps)

    def chain_step(
        self, step: int, tokens: Tensor, hidden: Tensor, keys: ChainKeys | None
    ) -> tuple[Tensor, ChainKeys]:
        """One drafting step of the head from every slot of a window at once.

        Slot i starts a chain from the target's hidden state i. Step 0 is causal over the slots;
        step s sits at position i + s and sees the step-0 keys of slots 0..i and the keys of its own
        chain's steps 1..s, which is what a drafter sees that appends to the head's cache.

        Args:
            step: s, from 0.
            tokens: the token each slot reads in this step, `[B, T]`, int64.
            hidden: the target's hidden states (s = 0) or the head's own previous output,
                `[B, T, hidden]`, fp32.
            keys: what the previous step returned; None at step 0.

        Returns:
            The head's output after `mtp.norm`, `[B, T, hidden]`, and the keys for the next step.
        """
        config, run, layer = self.config, self.run, self.mtp.layers[0]
        rows = slice(step, step + tokens.shape[1])
        x = run["head_inputs"](self.mtp, self.embed(tokens), hidden, config.eps, self.dtype)
        q, k, v, gate = run["attention_heads"](
            layer, x, self.cos[rows], self.sin[rows], config, self.dtype
        )
        keys = ChainKeys(k, v, (), ()) if keys is None else keys.extended(k, v)
        o = chain_attention(q, keys)
        x = run["attention_finish"](layer, x, o, gate, config, self.dtype)
        return run["rms_norm"](x, self.mtp.norm.weight, config.eps), keys

    def training_loss(
        self, tokens: Tensor, *, num_draft_steps: int, draft_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the target plus `draft_weight` times the mean over the head's steps.

        Args:
            tokens: windows, `[B, T + 1 + num_draft_steps]`, int64; the target reads the first T.
            num_draft_steps: how often the head is unrolled on its own output; step s reads the true
                token s + 1 places on.
            draft_weight: weight of the head's loss.

        Returns:
            The loss, and the losses in nats `[1 + num_draft_steps]`, detached: target, then steps.
        """
        num_tokens, keys = tokens.shape[1] - 1 - num_draft_steps, None
        embedding = self.model.embed_tokens.weight
        hidden = self(tokens[:, :num_tokens])
        losses = [
            self.run["token_loss"](hidden, embedding, tokens[:, 1 : num_tokens + 1], self.dtype)
        ]
        for step in range(num_draft_steps):
            window = tokens[:, step + 1 : num_tokens + step + 2]
            hidden, keys = self.chain_step(step, window[:, :-1], hidden, keys)
            losses.append(self.run["token_loss"](hidden, embedding, window[:, 1:], self.dtype))
        total = losses[0] + draft_weight * torch.stack(losses[1:]).mean()
        return total, torch.stack(losses).detach()
