"""What a page of vLLM's cache holds of one request and GDN layer, and for which models."""

from __future__ import annotations

from typing import Any

import torch

from hybridspec.errors import UnsupportedError

__all__ = ["num_drafts", "refuse", "ring_dtypes", "ring_rows", "ring_shapes"]

_MOST_DRAFTS = 7  # rows of a step that the kernels are tested with, less one
_MODELS = {
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
}


def num_drafts(vllm_config: Any) -> int:
    """Return the drafts of a step that a ring has to hold; 0 if the model gets no ring."""
    speculative = vllm_config.speculative_config
    if speculative is None or vllm_config.model_config.architecture not in _MODELS:
        return 0
    return int(speculative.num_speculative_tokens)


def ring_rows(drafts: int) -> int:
    """Return the rows of a ring (R): a power of two that holds four steps of the most rows."""
    return 16 if drafts < 4 else 32


def ring_shapes(
    shapes: tuple[tuple[int, ...], ...], key_heads: int, drafts: int
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of conv, state, u, k and decay, given the first two.

    Args:
        shapes: what vLLM keeps: the convolution's inputs, and the state [HV, V, K].
        key_heads: H, of this rank.
        drafts: most drafts of a step.
    """
    conv, state = shapes
    value_heads, value_dim, key_dim = state
    rows = ring_rows(drafts)
    return (
        conv,
        state,
        (value_heads, rows, value_dim),
        (key_heads, rows, key_dim),
        (value_heads, rows),
    )


def ring_dtypes(
    dtypes: tuple[torch.dtype, ...], rows_dtype: torch.dtype
) -> tuple[torch.dtype, ...]:
    """Return the dtypes of conv, state, u, k and decay, given the first two and that of rows."""
    conv, state = dtypes
    return (conv, state, rows_dtype, rows_dtype, torch.float32)


def refuse(vllm_config: Any, *, is_cuda: bool) -> None:
    """Raise for settings of vLLM under which a window would be lost.

    Args:
        vllm_config: vLLM's configuration.
        is_cuda: whether vLLM runs on CUDA.

    Raises:
        UnsupportedError: naming the setting, and what to do.
    """
    drafts = vllm_config.speculative_config.num_speculative_tokens
    if drafts > _MOST_DRAFTS:
        raise UnsupportedError(
            f"num_speculative_tokens: expected at most {_MOST_DRAFTS} for hybridspec's ring, "
            f"got {drafts}"
        )
    cache = vllm_config.cache_config
    if cache.enable_prefix_caching or cache.mamba_cache_mode != "none":
        raise UnsupportedError(
            "enable_prefix_caching: hybridspec's ring has no prefix caching, since a cached state "
            "would lack the rows of its window; start vLLM with --no-enable-prefix-caching"
        )
    if vllm_config.kv_transfer_config is not None:
        raise UnsupportedError(
            "kv_transfer_config: hybridspec's cursors are not part of a page, so pages cannot be "
            "sent elsewhere; start vLLM without a KV connector"
        )
    if not is_cuda:
        raise UnsupportedError("device: hybridspec's ring runs on CUDA within vLLM")
