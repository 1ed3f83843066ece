"""Which backend each op takes in an engine, and why, found by asking the ops themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hybridspec.errors import UnsupportedError
from hybridspec.models import ModelConfig
from hybridspec.ops import paged_attention
from hybridspec.ops.causal_conv1d import launch as conv_launch
from hybridspec.ops.gated_delta_rule.choice import verify_backends
from hybridspec.runtime import GdnMemory, KvMemory, Pools

__all__ = ["AttentionChoice", "backends_in_use", "choose_attention"]

_log = logging.getLogger("hybridspec")
_SERVES = "serves this device, these dtypes and sizes"

AttentionChoice = dict[str, tuple[str, str]]


def choose_attention(
    pools: Pools, config: ModelConfig, *, requested: str, max_verify_tokens: int
) -> AttentionChoice:
    """Choose what attends over these pools, once for all steps.

    Prompts are attended by FlashAttention-3 where it serves and nothing else was asked for.

    Args:
        pools: the memories; their layout and dtype decide.
        config: sizes of the model.
        requested: "auto", or what has to serve verify steps.
        max_verify_tokens: most rows of a request in a verify step.

    Returns:
        For "verify" and "prefill" the backend and the reason, also why not the others.

    Raises:
        UnsupportedError: if what was requested cannot serve these pools.
    """
    if not pools.of_kind(KvMemory):
        none = ("reference", "no layer attends")
        return {"verify": none, "prefill": none}
    call = _attention_call(pools, config)
    q, out = call[0], torch.empty_like(call[0])
    refusals = {
        name: explain(*call, out, max_verify_tokens)
        for name, explain in paged_attention.verify_backends(q).items()
    }
    name = requested
    if requested == "auto":
        name = next(name for name, reason in refusals.items() if reason is None)
    elif refusals[name] is not None:
        raise UnsupportedError(
            f"attention_backend: {name!r} cannot serve this engine: {refusals[name]} "
            f"(device {pools.device}, page size {pools.page_size}, {pools.page_table.shape[1]} "
            f"pages a slot)"
        )
    is_asked_for = requested != "auto"
    choice = {"verify": (name, _reason(name, refusals, is_asked_for=is_asked_for))}
    refusals = {
        other: explain(*call, out, config.max_positions)
        for other, explain in paged_attention.prefill_backends(q).items()
    }
    name = "reference"
    if requested in ("auto", "fa3") and refusals["fa3"] is None:
        name = "fa3"
    choice["prefill"] = (name, _reason(name, refusals, is_asked_for=False))
    _log.info("attention: %s, prompts: %s", choice["verify"][0], choice["prefill"][0])
    return choice


def _reason(name: str, refusals: Mapping[str, str | None], *, is_asked_for: bool) -> str:
    """Say why a backend was chosen, and what the others cannot do."""
    first = "plain PyTorch" if name == "reference" else _SERVES
    parts = [f"asked for; {first}" if is_asked_for else first]
    parts += [f"not {other}: {why}" for other, why in refusals.items() if why and other != name]
    return "; ".join(parts)


def _attention_call(pools: Pools, config: ModelConfig) -> tuple[Any, ...]:
    """Return tensors like those of a call of one row, as far as backends look at them."""
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    dtype = pools.specs.options.dtype
    qk = torch.empty(1, heads + kv_heads, config.head_dim, dtype=dtype, device=pools.device)
    q, k = qk.split((heads, kv_heads), dim=1)
    kv = pools.of_kind(KvMemory)[0]
    slots = pools.seq_len.new_zeros(1)
    cu_seqlens = pools.seq_len.new_zeros(2)
    return (
        q, k, torch.empty_like(k), kv.k_pages, kv.v_pages, pools.page_table, pools.seq_len,
        cu_seqlens, slots,
    )  # fmt: skip


def backends_in_use(pools: Pools, attention: AttentionChoice) -> dict[str, tuple[str, str]]:
    """Name the backend of each op for the tensors of these pools, with the reason."""
    chosen = {}
    for memory in pools.of_kind(GdnMemory)[:1]:
        chosen["gated_delta_rule"] = _gdn_choice(memory)
        chosen["causal_conv1d"] = _conv_choice(memory)
    chosen["paged_attention"] = attention["verify"]
    chosen["attention of prompts"] = attention["prefill"]
    chosen["sampling"] = ("reference", "plain PyTorch, the only backend of this op")
    return chosen


def _gdn_choice(memory: GdnMemory) -> tuple[str, str]:
    ring = memory.ring
    q, out = (rows[:1, :, 0].contiguous() for rows in (ring.k, ring.u))
    gate = out[:, :, 0]
    refusals = {
        name: explain(q, q, out, gate, gate, memory.state, ring, out, 1)
        for name, explain in verify_backends(q).items()
    }
    name = next(name for name, reason in refusals.items() if reason is None)
    return name, _reason(name, refusals, is_asked_for=False)


def _conv_choice(memory: GdnMemory) -> tuple[str, str]:
    ring = memory.conv_ring
    x = ring[:1, 0].contiguous()
    weight = ring.new_empty(ring.shape[2], 4)
    refusal = conv_launch.explain_verify(x, weight, ring, x, 1)
    name = "triton" if refusal is None else "reference"
    return name, _reason(name, {"triton": refusal}, is_asked_for=False)
