"""Rows of q, k and v side by side, as vLLM packs them, and its names for the ops' arguments."""

from __future__ import annotations

from torch import Tensor

from hybridspec.compat._calls import CallerError

__all__ = ["NAMES", "split_heads"]

# What the ops' messages call an argument, where vLLM has another name for it.
NAMES = {
    "q": "mixed_qkv",
    "k": "mixed_qkv",
    "v": "mixed_qkv",
    "ring.k": "k_cache",
    "ring.u": "d_cache",
    "ring.cum_log_decay": "g_cache",
    "ring.history_len": "write_pos",
    "ring.ring_start": "cache_base",
    "ring.max_window": "max_cache_len",
    "history_len": "write_pos",
    "ring_start": "cache_base",
    "ring_capacity": "cache_buf_len",
    "most_unmarked": "max_cache_len",
    "max_verify_tokens": "max_spec_len",
    "cu_seqlens": "query_start_loc",
    "slots": "ssm_state_indices",
    "blocks": "state_batch_indices",
    "num_committed": "num_accepted",
    "is_reset": "do_reset",
    "is_fold": "is_flush",
    "padding": "null_block_id",
    "use_qk_l2norm": "use_qk_l2norm_in_kernel",
}


def split_heads(mixed_qkv: Tensor, state: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """View q and k [N, H, K] and v [N, HV, V] in rows [N, 2HK + HV V].

    Args:
        mixed_qkv: the rows.
        state: states [blocks, HV, V, K].
        name: what the caller calls `state`.

    Raises:
        CallerError: if a tensor has other dimensions, or no H fits.
    """
    for argument, tensor, dims in (("mixed_qkv", mixed_qkv, 2), (name, state, 4)):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CallerError(f"{argument}: expected a tensor of {dims} dimensions, got {got}")
    _, value_heads, value_dim, key_dim = state.shape
    width, values = mixed_qkv.shape[1], value_heads * value_dim
    heads = (width - values) // (2 * key_dim)
    if heads < 1 or 2 * heads * key_dim + values != width:
        raise CallerError(
            f"mixed_qkv: expected 2HK + HV V columns for HV={value_heads}, V={value_dim}, "
            f"K={key_dim} and some H, got {width}"
        )
    keys = heads * key_dim
    q, k, v = mixed_qkv.split((keys, keys, values), 1)
    return (
        q.unflatten(1, (heads, key_dim)),
        k.unflatten(1, (heads, key_dim)),
        v.unflatten(1, (value_heads, value_dim)),
    )
