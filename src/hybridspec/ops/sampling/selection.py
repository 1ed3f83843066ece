"""From logits to one token per row: filters, then argmax(processed logits + noise)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import Dims, check, check_dtype

__all__ = ["process_logits", "sample"]


def _is_on(values: Tensor | None, off: float) -> bool:
    """Whether a filter can change anything; on an accelerator the values are not looked at."""
    if values is None:
        return False
    return values.is_cuda or bool((values != off).any())


def process_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Scaled and filtered logits: what `sample` adds the noise to; nothing is modified.

        x_i = (logit_i - max logit) / temperature            (temperature 0: divided by 1)
        top_k:  keep x_i >= the k-th largest x
        top_p:  in order of falling x (ties: lower id first), keep i while the probability before
                it, among what top_k kept, is < top_p; the first is always kept
        min_p:  keep probability_i >= min_p * largest probability
        everything else: -inf

    Args:
        logits: [N, V], floating; in.
        temperature: [N], fp32, >= 0; in.
        top_k: [N], int32, 0 = off, or None = off for all rows; in.
        top_p: [N], fp32, 1 = off, or None; in.
        min_p: [N], fp32, 0 = off, or None; in.

    Returns:
        [N, V], fp32; the largest entry of a row is 0.

    Raises:
        ValueError: if shapes disagree.

    Numerics:
        fp32 throughout. The cumulative probabilities of top_p are an fp32 sum.
    """
    dims: Dims = {}
    check("logits", logits, "N V", dims)
    check("temperature", temperature, "N", dims)
    for name, values in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if values is not None:
            check(name, values, "N", dims)
    x = logits.to(torch.float32)
    x = x - x.amax(-1, keepdim=True)
    x = x / torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    use_k, use_p, use_min = _is_on(top_k, 0), _is_on(top_p, 1.0), _is_on(min_p, 0.0)
    if use_k or use_p:
        x = _filter_sorted(x, top_k if use_k else None, top_p if use_p else None)
    if use_min and min_p is not None:
        # log(0) = -inf keeps every token, which is what 0 means.
        x = torch.where(x >= min_p.log().unsqueeze(-1), x, -torch.inf)
    return x


def _filter_sorted(x: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Apply top_k, then top_p, on one sort of the rows."""
    vocab_size = x.shape[-1]
    ordered, token_ids = torch.sort(x, dim=-1, descending=True, stable=True)
    if top_k is not None:
        last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
        smallest = ordered.gather(-1, last.long().unsqueeze(-1))
        ordered = torch.where(ordered >= smallest, ordered, -torch.inf)
    if top_p is not None:
        # A sum of fp32 probabilities may reach 1 before the last token: 1 must still mean all.
        limit = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(-1)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        keep[:, 1:] = ordered.softmax(-1).cumsum(-1)[:, :-1] < limit
        ordered = torch.where(keep, ordered, -torch.inf)
    return torch.empty_like(x).scatter_(-1, token_ids, ordered)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    noise: Tensor | None,
) -> Tensor:
    """Choose one token per row; nothing is modified.

        token = argmax_i(process_logits(logits)_i + noise_i),   no noise where temperature = 0

    Args:
        logits: [N, V], floating; in.
        temperature: [N], fp32, 0 = greedy; in.
        top_k: [N], int32, 0 = off, or None = off for all rows; in.
        top_p: [N], fp32, 1 = off, or None; in.
        min_p: [N], fp32, 0 = off, or None; in.
        noise: [N, V], fp32, from `gumbel_noise`; or None, which is allowed only if every row is
            greedy and is the fast path: one argmax; in.

    Returns:
        Token ids [N], int64; the lowest id where several tokens are equally good.

    Raises:
        ValueError: if shapes disagree, or (checked on CPU) `noise` is None and a row is not
            greedy.

    Numerics:
        fp32. Rows never influence each other.
    """
    dims: Dims = {}
    check("logits", logits, "N V", dims)
    check("temperature", temperature, "N", dims)
    has_random = temperature.is_cuda or bool(temperature.any())
    if noise is None:
        if has_random and not temperature.is_cuda:
            raise ValueError("noise: expected a tensor [N, V], because a temperature is not 0")
        return logits.argmax(-1)
    if not has_random:
        return logits.argmax(-1)
    check("noise", noise, "N V", dims)
    check_dtype("noise", noise, torch.float32)
    x = process_logits(logits, temperature, top_k, top_p, min_p)
    is_random = (temperature > 0).unsqueeze(-1)
    return (x + torch.where(is_random, noise, 0.0)).argmax(-1)
