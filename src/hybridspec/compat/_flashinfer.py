"""Checks and preparation shared by the functions of `compat.flashinfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.compat._calls import CallerError

__all__ = [
    "MAX_TOKENS",
    "NAMES",
    "RING_SLOTS",
    "W_RING",
    "as_int32",
    "check_range",
    "cursors_to_move",
    "required",
    "seed_of_rounding",
    "with_last_stride_one",
]

W_RING = 16
RING_SLOTS = 32
MAX_TOKENS = 8

# What the ops' messages call an argument, where FlashInfer has another name for it.
NAMES = {
    "state": "initial_state_source",
    "slots": "initial_state_indices",
    "ring.k": "k_cache",
    "ring.u": "u_cache",
    "ring.v": "v_cache",
    "ring.a": "a_cache",
    "ring.b": "b_cache",
    "ring.cum_log_decay": "g_cache",
    "ring.history_len": "hist_len",
    "ring.ring_start": "cache_base",
    "out": "output",
}


def required(name: str, tensor: Tensor | None) -> Tensor:
    """Return a tensor, or raise where there is none."""
    if not isinstance(tensor, Tensor):
        raise CallerError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    return tensor


def as_int32(indices: Tensor | None) -> Tensor | None:
    """Return indices as the ops take them, int32 and side by side."""
    if indices is None:
        return None
    return required("initial_state_indices", indices).to(torch.int32).contiguous()


def cursors_to_move(hist_len: Tensor, cache_base: Tensor | None, most: int, text: str) -> Tensor:
    """Return `cache_base`, or raise unless both cursors are legal and can be moved in place.

    Args:
        hist_len: rows of each window, 0..most.
        cache_base: first row of each window.
        most: longest window.
        text: how messages call its range.
    """
    if cache_base is None:
        raise CallerError(
            "cache_base: restart_hist_on_flush=True moves cursors in place and needs a "
            "caller-owned cache_base, [B] int32, kept from call to call; got None. Or pass "
            "restart_hist_on_flush=False and move the cursors yourself"
        )
    for name, cursor in (("hist_len", hist_len), ("cache_base", cache_base)):
        if not cursor.is_contiguous():
            raise CallerError(
                f"{name}: restart_hist_on_flush=True moves it in place and needs it contiguous, "
                f"got strides {tuple(cursor.stride())}"
            )
    if not (hist_len.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_range("hist_len", hist_len, most, text)
        check_range("cache_base", cache_base, RING_SLOTS - 1, f"[0, {RING_SLOTS})")
    return cache_base


def check_range(name: str, cursor: Tensor, most: int, text: str) -> None:
    """Raise unless all values are in 0..most; waits for the device."""
    if cursor.numel() == 0:
        return
    least, largest = (int(bound) for bound in cursor.aminmax())
    if least < 0 or largest > most:
        raise CallerError(f"{name} out of legal range {text}: found {least} to {largest}")


def with_last_stride_one(rows: Tensor) -> Tensor:
    """Return rows as the ops take them."""
    return rows if rows.dim() == 0 or rows.stride(-1) == 1 else rows.contiguous()


def seed_of_rounding(rand_seed: Tensor | int | None, device: torch.device) -> Tensor:
    """Return a seed as the ops take it, [1] int64; nothing waits for the device."""
    if isinstance(rand_seed, Tensor):
        if rand_seed.numel() != 1:
            raise CallerError(f"rand_seed: expected one number, got {list(rand_seed.shape)}")
        return rand_seed.reshape(1).to(torch.int64)
    if not isinstance(rand_seed, int) or not -(2**63) <= rand_seed < 2**63:
        raise CallerError(
            f"rand_seed: stochastic_rounding=True needs a number of 64 bits, got {rand_seed!r}"
        )
    return torch.full((1,), rand_seed, dtype=torch.int64, device=device)
