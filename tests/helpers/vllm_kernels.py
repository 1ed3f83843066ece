"""What four kernels of vLLM's GDN layer do, in plain torch, for prompts and for its convolution.

Signatures and meaning as in the released vllm 0.33; the arithmetic is that of the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from helpers.gdn_oracle import Tokens, prepared, recurrence

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "convolve",
    "fused_post_conv_prep",
]


def convolve(before: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return silu of a causal convolution of x [T, C] behind rows `before` [width-1, C]."""
    rows, width = torch.cat((before, x)).double(), weight.shape[1]
    taps = weight.double().T
    out = [(rows[t : t + width] * taps).sum(0) for t in range(x.shape[0])]
    return silu(torch.stack(out)) if out else x.double()


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, query_start_loc: Tensor | None = None,
    max_query_len: int = -1, null_block_id: int = 0, validate_data: bool = False,
) -> Tensor:  # fmt: skip
    """Convolve rows of requests; the window of a state [C, columns] begins at accepted - 1."""
    assert bias is None and activation == "silu"
    out, kept = torch.zeros_like(x), weight.shape[1] - 1
    for i, block in enumerate(conv_state_indices.tolist()):
        first, last = query_start_loc[i : i + 2].tolist()
        assert last - first <= max_query_len
        if block == null_block_id:
            continue
        offset = int(num_accepted_tokens[i]) - 1
        before = conv_state[block][:, offset : offset + kept].T.clone()
        out[first:last] = convolve(before, x[first:last], weight).to(x.dtype)
        rows = torch.cat((before, x[first:last]))[1:]
        conv_state[block].fill_(torch.nan)
        conv_state[block][:, : rows.shape[0]] = rows.T
    return out


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor,
    query_start_loc: Tensor, cache_indices: Tensor, has_initial_state: Tensor,
    activation: str = "silu", metadata: Any = None,
) -> Tensor:  # fmt: skip
    """Convolve prompt rows [C, N]; the last inputs go into the first columns of the state."""
    assert bias is None and activation == "silu"
    out, kept = torch.zeros_like(x), weight.shape[1] - 1
    for i, block in enumerate(cache_indices.tolist()):
        first, last = query_start_loc[i : i + 2].tolist()
        if first == last:
            continue
        before = torch.where(has_initial_state[i], conv_states[block][:, :kept].T, 0.0)
        rows = x[:, first:last].T
        out[:, first:last] = convolve(before, rows, weight).to(x.dtype).T
        conv_states[block].fill_(torch.nan)
        conv_states[block][:, :kept] = torch.cat((before, rows))[-kept:].T
    return out


def fused_post_conv_prep(
    conv_output: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_k_heads: int,
    head_k_dim: int, head_v_dim: int, apply_l2norm: bool = True, output_g_exp: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return q and k of length one [N, H, K], v, and the gate logits a and b as they come.

    The pair of this function and `chunk_gated_delta_rule` is used; between them vLLM has gates.
    """
    assert apply_l2norm and not output_g_exp
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output.split((keys, keys, conv_output.shape[1] - 2 * keys), 1)
    q, k = (prepared(part.unflatten(1, (num_k_heads, head_k_dim))) for part in (q, k))
    v = v.unflatten(1, (-1, head_v_dim))
    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    return q.to(v.dtype), k.to(v.dtype), v, g, b.double().sigmoid()


def chunk_gated_delta_rule(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run prompt rows [1, N, ...] from states [B, HV, V, K]; return outputs and last states."""
    assert output_final_state and not use_qk_l2norm_in_kernel
    out, states = torch.zeros_like(v), initial_state.clone()
    for i, state in enumerate(initial_state):
        first, last = cu_seqlens[i : i + 2].tolist()
        rows = (part[0, first:last].double() for part in (q, k, v))
        # The oracle computes gates itself, so it gets logits that give these.
        decay, strength = g[0, first:last].double(), beta[0, first:last].double()
        zero = torch.zeros(v.shape[2], dtype=torch.float64)
        tokens = Tokens(*rows, torch.log(torch.expm1(-decay)), torch.logit(strength), zero, zero)
        y, _, after = recurrence(tokens, state, use_qk_l2norm=False)
        out[0, first:last], states[i] = y.to(out.dtype), after[-1]
    return out, states
