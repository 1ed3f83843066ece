"""Which backend each op of an engine uses, and why, as its layers decide."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from hybridspec.errors import UnsupportedError
from hybridspec.models import ModelConfig
from hybridspec.models.hybrid import MIXERS
from hybridspec.models.layers import (
    ATTENTION,
    CAUSAL_CONV1D,
    GATED_DELTA_RULE,
    NORM_AND_ROTATE,
    PROMPT_ATTENTION,
)
from hybridspec.models.mlp import EXPERTS, MoeMlp
from hybridspec.models.products import PRODUCTS
from hybridspec.ops.sampling import explain_choose
from hybridspec.runtime import MemorySpecs, Pools

__all__ = ["Choices", "choose_backends"]

_log = logging.getLogger("hybridspec")
_SERVES = "serves this device, these dtypes and sizes"
# By op, by preference: backends whose sums have one order, whatever batch, drafts and load are.
_ORDERED = {
    GATED_DELTA_RULE: ("ordered_cuda", "ordered"),
    CAUSAL_CONV1D: ("triton",),
    ATTENTION: ("pieces",),
    PROMPT_ATTENTION: ("triton",),
    NORM_AND_ROTATE: ("triton",),
    EXPERTS: ("ordered",),
}
_ONLY_ORDERED = ("ordered", "ordered_cuda", "pieces")  # backends that serve nothing else
_IN_ORDER = "adds up in one order, whatever else a step holds"
_SAMPLE_PAGE = 64  # rows; no backend looks at more of a page

Choices = dict[str, tuple[str, str]]  # by op: the backend and the reason


def choose_backends(
    model: ModelConfig,
    specs: MemorySpecs,
    *,
    device: torch.device,
    page_size: int,
    max_pages_per_slot: int,
    attention: str,
    max_verify_tokens: int,
    is_ordered: bool = False,
) -> Choices:
    """Choose what serves each op of a model's layers, once for all steps.

    The layers are asked with a memory of one slot and few pages, so that whatever a backend looks
    at is as it will be. Prompts take the requested attention too where it supports them.

    Args:
        model: sizes of the model.
        specs: what its layers keep.
        device: where it runs.
        page_size, max_pages_per_slot: of keys and values.
        attention: "auto", or what has to attend in verify steps.
        max_verify_tokens: most rows of a request in a verify step.
        is_ordered: whether only backends will do that add up in an order that no load changes.

    Returns:
        For each op the backend and the reason, also why not the others.

    Raises:
        UnsupportedError: if what was requested cannot serve.
    """
    by_kind = dict(zip(model.layer_kinds, specs.layers, strict=True))
    if specs.head is not None:
        by_kind["attention"] = specs.head
    sample = Pools(
        MemorySpecs(layers=tuple(by_kind.values()), head=None, options=specs.options),
        num_slots=1,
        num_pages=min(max_pages_per_slot, 2),  # so that the page table is as wide, or wider than 1
        page_size=min(page_size, _SAMPLE_PAGE),
        max_pages_per_slot=max_pages_per_slot,
        device=device,
    )
    choices: Choices = {}
    for kind, memory in zip(by_kind, sample.memories, strict=True):
        for op, refusals in MIXERS[kind].refusals(model, memory, max_verify_tokens).items():
            if is_ordered and op in _ORDERED:
                choices[op] = _ordered_choice(op, refusals)
                continue
            for name in _ONLY_ORDERED:
                refusals.pop(name, None)
            requested = _requested(op, attention, refusals)
            if refusals.get(requested) is not None:
                raise UnsupportedError(
                    f"attention_backend: {requested!r} cannot serve this engine: "
                    f"{refusals[requested]} (device {device}, page size {page_size}, "
                    f"{max_pages_per_slot} pages a slot)"
                )
            choices[op] = _choice(refusals, requested, is_asked_for=op == ATTENTION)
    for op in (ATTENTION, PROMPT_ATTENTION):
        choices.setdefault(op, ("reference", "no layer attends"))
    if model.moe is not None:
        choices[EXPERTS] = _experts_choice(model, device, specs.options.dtype, is_ordered)
    if is_ordered:
        choices[PRODUCTS] = ("ordered", _IN_ORDER)
    elif device.type == "cuda" and specs.options.dtype in (torch.bfloat16, torch.float16):
        choices[PRODUCTS] = (
            "tuned",
            "torch's, or where it is quicker, measured at the first start, "
            "another algorithm of cuBLASLt",
        )
    choices["sampling"] = _choice(explain_choose(device), "auto", is_asked_for=False)
    _log.info("attention: %s, prompts: %s", choices[ATTENTION][0], choices[PROMPT_ATTENTION][0])
    return choices


def _experts_choice(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, is_ordered: bool
) -> tuple[str, str]:
    """Return what mixes the experts of few rows, and who serves a row alone."""
    refusals, alone = MoeMlp.refusals(model, device, dtype)
    if is_ordered:
        return _ordered_choice(EXPERTS, refusals)
    name, reason = _choice(refusals, "auto", is_asked_for=False)
    if device.type == "cuda":
        reason += f"; a row alone: {', '.join(_choice(alone, 'auto', is_asked_for=False))}"
    return name, reason


def _ordered_choice(op: str, refusals: Mapping[str, str | None]) -> tuple[str, str]:
    """Return the backend of an op whose sums have one order."""
    for name in _ORDERED[op]:
        if refusals[name] is None:
            return name, _IN_ORDER
    reasons = "; ".join(f"{name!r}: {refusals[name]}" for name in _ORDERED[op])
    raise UnsupportedError(
        f"exact: 'bitwise' needs {op} in one order, which cannot serve: {reasons}"
    )


def _requested(op: str, attention: str, refusals: Mapping[str, str | None]) -> str:
    """Return what was asked for of an op: the option speaks of attention in verify steps."""
    if op == ATTENTION or attention == "auto":
        return attention if op == ATTENTION else "auto"
    if op == PROMPT_ATTENTION:
        return attention if refusals[attention] is None else "reference"
    return "auto"


def _choice(
    refusals: Mapping[str, str | None], requested: str, *, is_asked_for: bool
) -> tuple[str, str]:
    """Return the backend, and why it and not the others."""
    name = requested
    if requested == "auto":
        name = next(name for name, reason in refusals.items() if reason is None)
    first = "plain PyTorch" if name == "reference" else _SERVES
    parts = [f"asked for; {first}" if is_asked_for and requested != "auto" else first]
    parts += [f"not {other}: {why}" for other, why in refusals.items() if why and other != name]
    return name, "; ".join(parts)
