"""The flags of a model and of how it runs, which most commands share; imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from hybridspec.config import (
    ATTENTION_BACKENDS,
    DRAFTERS,
    DTYPES,
    EXACTNESS,
    KV_LAYOUTS,
    MAX_DRAFT_TOKENS,
    RINGS,
    SPECULATION,
    STATE_DTYPES,
    EngineConfig,
)

__all__ = ["add_model_flags", "add_model_word", "add_speculation_flags", "flag_of"]


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def _rates(text: str) -> tuple[float, ...]:
    """Return numbers with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers with commas between, got {text!r}"
        ) from None


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add which model runs, and how."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a Hugging Face model folder, or an id on the hub (default: the bundled model)",
    )
    group.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of a model on the hub"
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="take tokenizer and chat template from this model (default: the model's own)",
    )
    group.add_argument(
        "--dummy-weights",
        action="store_true",
        help="random numbers as weights, to measure a geometry from config.json alone",
    )
    _add_engine(group)
    _add_prefixes(group)


def add_model_word(parser: argparse.ArgumentParser) -> None:
    """Let the model be the command's one word, as it is in `vllm serve`."""
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="the same as --model")


def _add_engine(group: Any) -> None:
    """Add how the model runs to the flags that say which one."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for name, metavar, choices, what in (
        ("dtype", "D", DTYPES, f"of weights and activations: {', '.join(DTYPES)}"),
        ("state_dtype", "D", STATE_DTYPES, f"of the recurrent state: {', '.join(STATE_DTYPES)}"),
        (
            "ring",
            "R",
            RINGS,
            "what rings keep since a fold: u, corrections (default), or raw, rows as they came",
        ),
        (
            "exact",
            "E",
            EXACTNESS,
            "what drafts and batches cannot change: tokens (default), or every bit: bitwise",
        ),
        (
            "kv_layout",
            "L",
            KV_LAYOUTS,
            "paged (default), or contiguous: room for the longest request in every slot, which "
            "FlashAttention-3 needs",
        ),
        (
            "attention_backend",
            "B",
            ATTENTION_BACKENDS,
            "attention of verify steps: auto (default), triton, fa3, reference",
        ),
    ):
        group.add_argument(
            flag_of(name), choices=choices, default=defaults[name], metavar=metavar, help=what
        )
    group.add_argument(
        "--device", default=defaults["device"], metavar="D", help="auto, cpu, cuda or cuda:N"
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a request, prompt included (default: the model's limit)",
    )
    group.add_argument(
        "--memory-fraction",
        "--gpu-memory-utilization",
        type=float,
        default=defaults["memory_fraction"],
        metavar="F",
        help="share of the GPU's memory to use (default: %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads, at most one a core (default: 1 for models as small as the bundled one)",
    )


def _add_prefixes(group: Any) -> None:
    """Add whether prompts reuse what was computed of others."""
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig().enable_prefix_caching,
        help="whether prompts reuse what was computed of others like them (default: yes)",
    )
    group.add_argument(
        "--prefix-states",
        type=int,
        metavar="N",
        help="prefixes whose recurrent states are kept for that (default: at most 64)",
    )


def add_speculation_flags(parser: argparse.ArgumentParser, *, is_optional: bool) -> None:
    """Add how it drafts; `is_optional`: whether a command may do without."""
    default = EngineConfig().draft_tokens
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--draft-tokens",
        type=int,
        metavar="K",
        help=f"drafts per step, 0..{MAX_DRAFT_TOKENS} (default: {default})",
    )
    group.add_argument(
        "--speculation",
        choices=SPECULATION,
        default="fixed",
        metavar="MODE",
        help="fixed: K drafts a step (default); dynamic: up to K, as many as pay at the present "
        "load and acceptance; off: plain decoding",
    )
    group.add_argument(
        "--drafter",
        choices=DRAFTERS,
        default="auto",
        metavar="D",
        help="mtp: the model's draft head; lookup: its own text; none; auto: mtp if there is one, "
        "else lookup (default)",
    )
    group.add_argument(
        "--mtp-from",
        metavar="MODEL",
        help="take the draft head (mtp.* tensors) from this model, such as the base of a fine-tune",
    )
    group.add_argument(
        "--verify-rows",
        type=int,
        metavar="N",
        help="rows checked per step over all requests, most probable drafts first (default: all)",
    )
    group.add_argument(
        "--acceptance",
        type=_rates,
        metavar="P1,P2,...",
        help="to measure: accept the drafts of a step by force with these probabilities, of the "
        "first, the second, ...; the output is synthetic",
    )
    group.add_argument(
        "--acceptance-spread",
        type=float,
        metavar="F",
        help="half the width around them within which each draft draws its own (default: 0)",
    )
    if is_optional:
        group.add_argument(
            "--no-speculation", action="store_true", help="plain decoding, the same as 0 drafts"
        )
