"""From command-line words to options; imports no torch, so that mistakes are answered at once."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from hybridspec.bundled import PROMPT_KINDS
from hybridspec.cli.engine_flags import flag_of
from hybridspec.cli.parser import NUM_PROMPTS, SAMPLING, WITHOUT_MODEL, build_parser
from hybridspec.cli.usage import UsageError, usage_errors
from hybridspec.config import EngineConfig, SamplingParams

__all__ = ["engine_options", "parse", "sampling_params"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line.

    Args:
        argv: words after the program's name; None takes those of the process.

    Returns:
        The flags by name; `command` says which command.

    Raises:
        UsageError: if a flag or its value is wrong.
    """
    arguments = build_parser().parse_args(argv)
    for name in ("num_prompts", "repeats"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise UsageError(f"{flag_of(name)}: expected a positive number, got {value}")
    if arguments.command in WITHOUT_MODEL:
        return arguments
    _settle_model(arguments)
    _refuse_contradictions(arguments)
    _settle_drafts(arguments)
    _settle_acceptance(arguments)
    if arguments.command == "compare":
        _settle_prompts(arguments)
    if arguments.command == "generate" and not arguments.chat:
        for name in ("system", "chat_template", "template_args"):
            if getattr(arguments, name) not in (None, []):
                raise UsageError(f"{flag_of(name).removesuffix('s')}: needs --chat")
    return arguments


def _settle_model(arguments: argparse.Namespace) -> None:
    """Take the model from the word of commands that have one."""
    word = vars(arguments).pop("model_word", None)
    if word is not None and arguments.model is not None:
        raise UsageError("MODEL and --model: give one of them")
    arguments.model = arguments.model if word is None else word


def _settle_prompts(arguments: argparse.Namespace) -> None:
    """Fill in which of the package's prompts to run; refuse to choose where others are given."""
    given = "PROMPT" if arguments.prompts else "--prompt-token-ids"
    for name, default in (("kind", PROMPT_KINDS[0]), ("num_prompts", NUM_PROMPTS)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif arguments.prompts or arguments.prompt_token_ids:
            raise UsageError(f"{given} and {flag_of(name)}: give one of them")


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Refuse flags of which one would be ignored."""
    if getattr(arguments, "json", False) and getattr(arguments, "quiet", False):
        raise UsageError("--json and --quiet: give one of them")
    plain = {
        "--no-speculation": getattr(arguments, "no_speculation", False),
        "--drafter none": arguments.drafter == "none",
        "--draft-tokens 0": arguments.draft_tokens == 0,
        "--speculation off": arguments.speculation == "off",
    }
    speculative = {
        "--draft-tokens": bool(arguments.draft_tokens),
        "--drafter": arguments.drafter in ("mtp", "lookup"),
        "--verify-rows": arguments.verify_rows is not None,
        "--acceptance": arguments.acceptance is not None,
        "--speculation dynamic": arguments.speculation == "dynamic",
        "--draft-vocab": getattr(arguments, "draft_vocab", None) is not None,
    }
    for one, is_plain in plain.items():
        for other, is_given in speculative.items():
            if is_plain and is_given:
                raise UsageError(f"{one} and {other}: give one of them")


def _settle_acceptance(arguments: argparse.Namespace) -> None:
    """Fill in the spread of acceptance by force, which means nothing without it."""
    if arguments.acceptance_spread is None:
        arguments.acceptance_spread = EngineConfig().acceptance_spread
    elif arguments.acceptance is None:
        raise UsageError("--acceptance-spread: needs --acceptance")


def _settle_drafts(arguments: argparse.Namespace) -> None:
    """Fill in the number of drafts; flags that would be ignored without drafts are refused."""
    if getattr(arguments, "no_speculation", False):
        if arguments.draft_tokens is not None:
            raise UsageError("--no-speculation and --draft-tokens: give one of them")
        arguments.draft_tokens = 0
    elif arguments.speculation == "off":
        arguments.draft_tokens = 0
    elif arguments.draft_tokens is None:
        arguments.draft_tokens = EngineConfig().draft_tokens
    has_no_drafts = arguments.draft_tokens == 0 or arguments.drafter == "none"
    if arguments.mtp_from is not None and (has_no_drafts or arguments.drafter == "lookup"):
        raise UsageError(
            "--mtp-from: expected drafts from a head, got "
            + ("plain decoding" if has_no_drafts else "--drafter lookup")
        )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that the flags ask for; raises UsageError on wrong values."""
    names = (*SAMPLING, "stop", "stop_token_ids", "bad_words", "ignore_eos")
    given = {name: getattr(arguments, name) for name in names}
    for name in ("n", "logprobs", "prompt_logprobs"):  # flags of `generate` only
        if hasattr(arguments, name):
            given[name] = getattr(arguments, name)
    with usage_errors():
        return SamplingParams(**given, logit_bias=_logit_bias(arguments.logit_bias))


def _logit_bias(words: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for word in words:
        token, _, value = word.partition(":")
        try:
            number, amount = int(token), float(value)
        except ValueError:
            raise UsageError(f"--logit-bias: expected ID:BIAS, got {word!r}") from None
        if number in bias:
            raise UsageError(f"--logit-bias: expected each token once, got {number} twice")
        bias[number] = amount
    return bias


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that the flags ask for; raises UsageError on wrong values."""
    names = {field.name for field in dataclasses.fields(EngineConfig)} - {"seed"}  # the request's
    options = {name: value for name, value in vars(arguments).items() if name in names}
    with usage_errors():
        EngineConfig(**options)
    return options
