"""One token per request, without a ring: what plain decoding does with a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridspec.ops._library import Written, register_kernel
from hybridspec.ops._requests import check_distinct, check_slots
from hybridspec.ops._triton_support import explain_tensors, round_up_to_power_of_two
from hybridspec.ops.gated_delta_rule.call import Gates, Rows
from hybridspec.ops.gated_delta_rule.contracts import check_decode
from hybridspec.ops.gated_delta_rule.cpu import compute_dtype, normalise_
from hybridspec.ops.norms.reference import gdn_gates, widened

__all__ = ["decode"]

_BLOCK_V = 16


def decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    state: Tensor, slots: Tensor, *,
    padding: int = -1, scale: float | None = None, use_qk_l2norm: bool = True,
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Advance the states of some slots by one token each, in place.

        S <- e^g S;  u = beta (v - S k);  S <- S + u k^T;  y = scale S q
        g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)

    Args:
        q: queries, [B, H, K]; last stride 1; in.
        k: keys, [B, H, K], dtype of `v`; last stride 1; in.
        v: values, [B, HV, V], HV a multiple of H, bf16, fp16, fp32 or fp64; last stride 1; in.
        a: decay inputs, [B, HV], any of these dtypes; last stride 1; in.
        b: write strength inputs, [B, HV], any of these dtypes; last stride 1; in.
        A_log: [HV], any of these dtypes; contiguous; in.
        dt_bias: [HV], any of these dtypes; contiguous; in.
        state: states, [S, HV, V, K], any of these dtypes; last stride 1; in-out.
        slots: slot of each request, padding if at most `padding`, no slot twice, [B], int32; any
            stride; in.
        padding: largest number that is no slot, at least -1.
        scale: factor of the outputs; None is K^-0.5.
        use_qk_l2norm: whether q and k are first scaled to length one per head.
        out: where to write, [B, HV, V], any of these dtypes; last stride 1; out.
        backend: "auto", "triton" or "reference".

    Returns:
        `out`, or [B, HV, V] in the dtype of `v`; zeros in rows of padding.

    Raises:
        TypeError: for a dtype or an option of a kind that is not supported.
        UnsupportedError: if the requested backend does not support the call; the message says why.
        ValueError: for a wrong shape, stride, device, option or backend, or (reference) a slot that
            occurs twice.

    Numerics:
        fp32 (fp64 if q, a or state is); the state is rounded once, outputs once.

    Source:
        Gated Delta Networks (Yang et al. 2025, arXiv:2412.06464), equation 10.
    """
    if out is None and isinstance(v, Tensor):
        out = v.new_empty(v.shape)
    _decode(
        Rows(q, k, v, a, b, out),
        Gates(A_log, dt_bias, scale, use_qk_l2norm, 1.0),
        state,
        slots,
        padding,
        backend=backend,
    )
    return out


def _reference(
    rows: Written[Rows], gates: Gates, state: Written[Tensor], slots: Tensor, padding: int
) -> None:
    """Gather the states, advance all at once, and put them back."""
    check_slots("slots", slots.tolist(), state.shape[0])
    live = (slots > padding).nonzero().flatten()
    rows.out.zero_()
    if not live.numel():
        return
    numbers = slots[live].long()
    check_distinct(numbers.tolist())
    dtype = compute_dtype(rows.q, rows.a, state)
    q, k, v, a, b = (part[live] for part in rows[:5])
    q, k = widened(q, dtype).clone(), widened(k, dtype).clone()
    if gates.use_qk_l2norm:
        q, k = normalise_(q), normalise_(k)
    ratio = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(ratio, 1).unsqueeze(-1) for x in (q, k))
    log_decay, beta = gdn_gates(widened(a, dtype), b, gates.A_log, gates.dt_bias, gates.beta_scale)
    found = state[numbers].to(dtype) * log_decay.exp()[..., None, None]
    u = beta.unsqueeze(-1) * (widened(v, dtype) - (found @ k).squeeze(-1))
    found += u.unsqueeze(-1) * k.mT
    state[numbers] = found.to(state.dtype)
    y = (found @ q).squeeze(-1) * gates.output_scale(rows.k.shape[2])
    rows.out[live] = y.to(rows.out.dtype)


def _explain(rows: Rows, gates: Gates, state: Tensor, *others: Any) -> str | None:
    """Return why the kernel does not support a call, or None."""
    named = [("q", rows.q), ("a", rows.a), ("b", rows.b), ("state", state), ("out", rows.out)]
    reason = explain_tensors(named)
    if reason is None and state.shape[2] % _BLOCK_V:
        reason = f"V is {state.shape[2]}, the kernel takes multiples of {_BLOCK_V}"
    return reason


def _launch(rows: Rows, gates: Gates, state: Tensor, slots: Tensor, padding: int) -> None:
    from hybridspec.ops.gated_delta_rule.triton_one_token import decode_kernel

    q, k, v, a, b, out = rows
    _, value_heads, value_dim, key_dim = state.shape
    num_programs = q.shape[0] * value_heads * (value_dim // _BLOCK_V)
    if num_programs == 0:
        return
    with torch.cuda.device_of(state):
        decode_kernel[(num_programs,)](
            q, k, v, a, b, gates.A_log, gates.dt_bias, state, out, slots, padding,
            slots.stride(0), gates.output_scale(key_dim),
            q.stride()[:2], k.stride()[:2], v.stride()[:2], (a.stride(0), b.stride(0)),
            state.stride()[:3], out.stride()[:2],
            H=k.shape[1],
            HV=value_heads,
            K=key_dim,
            V=value_dim,
            COLUMNS=round_up_to_power_of_two(key_dim),
            BLOCK_V=_BLOCK_V,
            USE_L2NORM=gates.use_qk_l2norm,
            num_warps=1,
        )  # fmt: skip


_decode = register_kernel("gated_delta_rule.decode", _explain, _launch, _reference, check_decode)
