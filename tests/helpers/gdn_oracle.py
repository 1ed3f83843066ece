"""The gated delta rule as its definition reads: one token after another, in fp64.

Nothing here is shared with the package, so that a common mistake cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tokens", "gates", "prepared", "recurrence", "window_state"]


@dataclass(frozen=True)
class Tokens:
    """Inputs of the rows of one request, and the parameters of the layer.

    q and k are [T, H, K], v [T, HV, V], a and b [T, HV], A_log and dt_bias [HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def rows(self, first: int, last: int) -> Tokens:
        """Return rows first..last-1."""
        parts = (part[first:last] for part in (self.q, self.k, self.v, self.a, self.b))
        return Tokens(*parts, self.A_log, self.dt_bias)

    def packed(self) -> tuple[Tensor, ...]:
        """Return q, k, v, a, b, in the order of the ops' arguments."""
        return self.q, self.k, self.v, self.a, self.b


def gates(tokens: Tokens, beta_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the log-decay and the write strength of every row and value head, fp64 [T, HV]."""
    total = tokens.a.double() + tokens.dt_bias.double()
    softplus = torch.logaddexp(total, torch.zeros_like(total))
    beta = 1.0 / (1.0 + torch.exp(-tokens.b.double()))
    return -torch.exp(tokens.A_log.double()) * softplus, beta_scale * beta


def prepared(x: Tensor, use_qk_l2norm: bool = True) -> Tensor:
    """Return rows in fp64, scaled to length one if asked."""
    x = x.double()
    if use_qk_l2norm:
        x = x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x


def recurrence(
    tokens: Tokens,
    state: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the rows from a state [HV, V, K].

    Returns:
        Outputs [T, HV, V], corrections u [T, HV, V], and the states after each row
        [T + 1, HV, V, K] (the first one is the given state), all fp64.
    """
    ratio = tokens.v.shape[1] // tokens.k.shape[1]
    scale = tokens.k.shape[2] ** -0.5 if scale is None else scale
    log_decay, beta = gates(tokens, beta_scale)
    keys = prepared(tokens.k, use_qk_l2norm).repeat_interleave(ratio, 1)
    queries = prepared(tokens.q, use_qk_l2norm).repeat_interleave(ratio, 1) * scale
    states, outputs, corrections = [state.double()], [], []
    for t in range(tokens.v.shape[0]):
        decayed = log_decay[t].exp()[:, None, None] * states[-1]
        remembered = torch.einsum("hvk,hk->hv", decayed, keys[t])
        u = beta[t][:, None] * (tokens.v[t].double() - remembered)
        states.append(decayed + torch.einsum("hv,hk->hvk", u, keys[t]))
        outputs.append(torch.einsum("hvk,hk->hv", states[-1], queries[t]))
        corrections.append(u)
    empty = tokens.v.double()[:0]
    return (
        torch.stack(outputs) if outputs else empty,
        torch.stack(corrections) if corrections else empty,
        torch.stack(states),
    )


def window_state(state: Tensor, k: Tensor, u: Tensor, cum_log_decay: Tensor) -> Tensor:
    """Return the state after live rows k [P, H, K], u [P, HV, V], cum_log_decay [P, HV]."""
    state, ratio = state.double(), u.shape[1] // k.shape[1]
    before = torch.zeros(u.shape[1], dtype=torch.float64, device=u.device)
    for row, correction, cum in zip(k.double(), u.double(), cum_log_decay.double(), strict=True):
        key = row.repeat_interleave(ratio, 0)
        state = torch.exp(cum - before)[:, None, None] * state
        state = state + torch.einsum("hv,hk->hvk", correction, key)
        before = cum
    return state
