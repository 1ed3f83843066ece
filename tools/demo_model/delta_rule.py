"""The gated delta rule over whole windows, differentiable and fast enough to train with.

In a chunk of C tokens with G the running sum of the log decay, A[i, j] = βᵢ exp(Gᵢ - Gⱼ) kᵢ·kⱼ for
j < i and T = (I + A)⁻¹, the corrected values are u = T βv - (T β exp(G) k) S for the state S at the
chunk's start. T comes from forward substitution: summing powers of A instead is exact on paper
only, and on repeated keys loses every digit.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
_BLOCK = 16


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Outputs of S ← exp(g) S; S ← S + β k (v - Sᵀk)ᵀ; o = Sᵀq from an empty state.

    Args:
        q: normalised and scaled queries, `[B, T, H, K]`, fp32; T a multiple of 64.
        k: normalised keys, `[B, T, H, K]`, fp32.
        v: values, `[B, T, HV, V]`, fp32; value head j reads key head j // (HV / H).
        log_decay: g, `[B, T, HV]`, fp32, at most 0.
        beta: `[B, T, HV]`, fp32.

    Returns:
        o `[B, T, HV, V]`, fp32.
    """
    system, scores, *rest = FUNCTIONS["chunk_systems"](q, k, v, log_decay, beta)
    q_decayed, k_decayed, k_read, v_read, chunk_decay = rest
    inverse = InvertUnitLower.apply(system)
    states, u = ChunkScan.apply(inverse @ v_read, inverse @ k_read, k_decayed, chunk_decay)
    return FUNCTIONS["chunk_outputs"](q_decayed, scores, states, u)


def chunk_systems(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    """What a chunk needs before its state is known; all `[B, HV, chunks, C, ·]` but the last."""
    groups = v.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    log_decay, beta = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (log_decay, beta))
    cum = log_decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (cum[..., :, None] - cum[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    key_products = (k @ k.mT).repeat_interleave(groups, dim=1)
    scores = (q @ k.mT).repeat_interleave(groups, dim=1) * decay
    system = (key_products * decay * beta[..., None]).tril(-1)
    q, k = q.repeat_interleave(groups, dim=1), k.repeat_interleave(groups, dim=1)
    from_start, to_end = cum.exp()[..., None], (cum[..., -1:] - cum).exp()[..., None]
    k_read, v_read = k * from_start * beta[..., None], v * beta[..., None]
    return system, scores, q * from_start, k * to_end, k_read, v_read, cum[..., -1].exp()


def chunk_outputs(q_decayed: Tensor, scores: Tensor, states: Tensor, u: Tensor) -> Tensor:
    """o `[B, T, HV, V]` from the states at the chunks' starts and the corrected values."""
    o = q_decayed @ states + scores @ u
    return o.flatten(2, 3).transpose(1, 2)


FUNCTIONS = {"chunk_systems": chunk_systems, "chunk_outputs": chunk_outputs}


def compile_functions() -> None:
    """Compiles the parts of the rule between its custom gradients."""
    FUNCTIONS.update({n: torch.compile(f, dynamic=False) for n, f in FUNCTIONS.items()})


def invert_unit_lower(system: Tensor) -> Tensor:
    """(I + A)⁻¹ for strictly lower A `[..., C, C]`, C = 16 · 2ⁿ, by substitution in blocks.

    The diagonal blocks of 16 rows are inverted row by row; two neighbours X and Y with the block
    A₂₁ below X then make the inverse of twice the size, whose lower left is -Y A₂₁ X.
    """
    size = system.shape[-1]
    blocks = _block_pairs(system, _BLOCK)
    diagonal = torch.stack([blocks[..., i, :, i, :] for i in range(blocks.shape[-2])], dim=-3)
    inverse = torch.zeros_like(diagonal)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for i in range(1, _BLOCK):
        row = diagonal[..., i, :i, None] * inverse[..., :i, :i]
        inverse[..., i, :i] = -row.sum(-2)
    width = _BLOCK
    while width < size:
        pairs = _block_pairs(system, width)
        below = [pairs[..., 2 * i + 1, :, 2 * i, :] for i in range(size // width // 2)]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ torch.stack(below, dim=-3) @ first)
        top = torch.cat((first, torch.zeros_like(first)), dim=-1)
        inverse = torch.cat((top, torch.cat((corner, second), dim=-1)), dim=-2)
        width *= 2
    return inverse.squeeze(-3)


def _block_pairs(matrix: Tensor, width: int) -> Tensor:
    """`[..., C, C]` as `[..., block row, row, block column, column]`."""
    return matrix.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))


class InvertUnitLower(torch.autograd.Function):
    """T = (I + A)⁻¹ with dA = -Tᵀ dT Tᵀ; in full fp32 also where TF32 is on."""

    @staticmethod
    def forward(ctx, system: Tensor) -> Tensor:
        """Inverts and keeps the inverse."""
        with _full_precision():
            inverse = invert_unit_lower(system)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Gradient with respect to the strictly lower entries."""
        (inverse,) = ctx.saved_tensors
        with _full_precision():
            return -(inverse.mT @ grad @ inverse.mT).tril(-1)


class _full_precision:
    """Turns TF32 off for the matrix products inside."""

    def __enter__(self) -> None:
        self.allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *exc: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.allowed


class ChunkScan(torch.autograd.Function):
    """u_c = v_c - w_c S_c; S_{c+1} = d_c S_c + k_cᵀ u_c, with the per-chunk gradients batched."""

    @staticmethod
    def forward(
        ctx, values: Tensor, reads: Tensor, keys: Tensor, decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States before each chunk `[B, HV, chunks, K, V]` and corrected values u."""
        state = values.new_zeros(*values.shape[:2], keys.shape[-1], values.shape[-1]).flatten(0, 1)
        states, corrected = [], []
        for v, w, k, d in _by_chunk(values, reads, keys, decay[..., None, None]):
            u = torch.baddbmm(v, w, state, alpha=-1)
            states.append(state)
            corrected.append(u)
            state = torch.baddbmm(state * d, k.mT, u)
        states, corrected = _stack(states, values), _stack(corrected, values)
        ctx.save_for_backward(states, corrected, reads, keys, decay)
        return states, corrected

    @staticmethod
    def backward(ctx, grad_states: Tensor, grad_u: Tensor) -> tuple[Tensor, ...]:
        """Runs the chunks backwards for dS and du, then all products at once."""
        states, corrected, reads, keys, decay = ctx.saved_tensors
        grad_state = torch.zeros_like(states[:, :, 0]).flatten(0, 1)
        after, totals = [], []
        chunks = _by_chunk(grad_states, grad_u, reads, keys, decay[..., None, None])
        for ds, du, w, k, d in reversed(list(chunks)):
            du = torch.baddbmm(du, k, grad_state)
            after.append(grad_state)
            totals.append(du)
            grad_state = torch.baddbmm(torch.addcmul(ds, grad_state, d), w.mT, du, alpha=-1)
        after, totals = _stack(after[::-1], states), _stack(totals[::-1], states)
        grad_reads = -(totals @ states.mT)
        return totals, grad_reads, corrected @ after.mT, (after * states).sum((-2, -1))


def _by_chunk(*tensors: Tensor) -> zip:
    """Iterates over the chunks of `[B, HV, chunks, ...]` with the leading dimensions merged."""
    return zip(*(t.flatten(0, 1).unbind(1) for t in tensors), strict=True)


def _stack(chunks: list[Tensor], like: Tensor) -> Tensor:
    """`[B, HV, chunks, ...]` from per-chunk tensors `[B · HV, ...]`."""
    return torch.stack(chunks, dim=1).unflatten(0, like.shape[:2])
