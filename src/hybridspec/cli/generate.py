"""`hybridspec generate`: continue one prompt and say what speculation did for it."""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import hybridspec
from hybridspec.cli import loading
from hybridspec.cli.arguments import sampling_params, usage_errors
from hybridspec.cli.prompts import Prompt, read_prompt
from hybridspec.cli.render import (
    ACCEPTED,
    MarkedText,
    PlainConsole,
    amount,
    percent,
    print_facts,
    printable,
    trace_heading,
    trace_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridspec import LLM, SamplingParams
    from hybridspec.engine import RequestOutput, StepOutput

__all__ = ["Result", "run"]

_SEED_BITS = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request with what is needed to report on it.

    Attributes:
        llm: the engine that ran it.
        params: its sampling parameters, the seed filled in.
        output: what the engine handed back.
        steps: every step, the prefill first.
    """

    llm: LLM
    params: SamplingParams
    output: RequestOutput
    steps: list[StepOutput]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the verify steps by their time; None if there was no such step."""
        stats = self.output.stats
        return sum(stats.committed_per_step) / stats.decode_s if stats.decode_s > 0 else None

    def memory(self) -> dict[str, int]:
        """Return bytes of this request, here and in an engine that keeps state snapshots."""
        info = self.llm.describe()
        output = self.output
        num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        kv = num_tokens * info.kv_bytes_per_token
        return {
            "bytes_per_request": sum(info.request_bytes.values()) + kv,
            "bytes_per_request_with_snapshots": info.snapshot_bytes + kv,
            "bytes_of_keys_and_values_in_both": kv,
        }


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    if arguments.temperature > 0 and arguments.seed is None:
        arguments.seed = secrets.randbits(_SEED_BITS)
    params = sampling_params(arguments)
    prompt = read_prompt(arguments)
    with loading.progress("loading the model"):
        llm = loading.open_engine(arguments)
        with usage_errors():
            steps = llm.stream(prompt.text, params, prompt_token_ids=prompt.token_ids)
        loading.warm_up(llm)
    if arguments.json:
        result = _collect(llm, params, steps, on_step=lambda step: None)
        print(json.dumps(as_json(result, with_steps=arguments.trace), allow_nan=False))
    else:
        _show(arguments, llm, params, prompt, steps)
    return 0


def _collect(
    llm: LLM,
    params: SamplingParams,
    steps: Iterator[StepOutput],
    on_step: Callable[[StepOutput], None],
) -> Result:
    seen = []
    with loading.progress("reading the prompt"):
        first = next(steps)
    for step in itertools.chain([first], steps):
        on_step(step)
        seen.append(step)
    return Result(llm=llm, params=params, output=seen[-1].output, steps=seen)


def _show(
    arguments: argparse.Namespace,
    llm: LLM,
    params: SamplingParams,
    prompt: Prompt,
    steps: Iterator[StepOutput],
) -> None:
    """Stream the text or the steps, then the panel."""
    console = PlainConsole()
    draft_tokens = llm.config.draft_tokens
    take = _marker(llm)
    held_back = Text()
    if arguments.trace:
        console.print(trace_heading(draft_tokens), soft_wrap=True)
    elif console.is_terminal and not arguments.quiet:
        _echo(console, prompt)

    def on_step(step: StepOutput) -> None:
        text = take(step)
        if arguments.trace:
            held_back.append_text(text)
            line = trace_line(step, draft_tokens, lambda token: _piece(llm, token))
            console.print(line, soft_wrap=True)
        else:
            console.print(text, end="", soft_wrap=True)
            console.file.flush()

    result = _collect(llm, params, steps, on_step)
    if arguments.trace and not arguments.quiet:
        console.print()
        console.print(held_back, end="", soft_wrap=True)
    console.print()
    if not arguments.quiet:
        console.print()
        print_facts(console, "hybridspec", facts(result, prompt, console.is_terminal))


def _marker(llm: LLM) -> Callable[[StepOutput], Text]:
    """Return what turns a step into marked text; token ids where there is no tokenizer."""
    if llm.tokenizer is None:
        return _marked_ids
    return MarkedText(llm.tokenizer.detokenizer()).take


def _marked_ids(step: StepOutput) -> Text:
    marked = Text()
    for token, origin in zip(step.token_ids, step.origins, strict=True):
        marked.append(str(token), ACCEPTED if origin == "accepted" else None).append(" ")
    return marked


def _piece(llm: LLM, token: int) -> str:
    """Return the text of a token alone, "" where it is no whole text."""
    if llm.tokenizer is None:
        return ""
    text: str = llm.tokenizer.decode([token])
    return "" if "\ufffd" in text else text


def _echo(console: Console, prompt: Prompt) -> None:
    if prompt.source is not None:
        console.print(f"prompt: {prompt.source}", style="dim italic")
    if prompt.text is not None:
        console.print(Text(printable(prompt.text), "dim"), end="", soft_wrap=True)


def facts(result: Result, prompt: Prompt, is_terminal: bool) -> list[tuple[str, str | Text]]:
    """Return the names and values of the panel below the text."""
    stats = result.output.stats
    completion = result.output.outputs[0]
    committed = stats.committed_per_step
    speed = result.tokens_per_second
    num_drafts = result.llm.config.draft_tokens
    rows: list[tuple[str, str | Text]] = []
    if is_terminal and num_drafts:
        legend = Text().append("accepted drafts", ACCEPTED).append("   the model's own tokens")
        rows.append(("text", legend))
    rows.append(
        (
            "tokens",
            f"{len(completion.token_ids)} after a prompt of {len(result.output.prompt_token_ids)}"
            f" (ended by {completion.finish_reason})",
        )
    )
    rows.append(
        ("tokens per second", "-" if speed is None else f"{speed:,.0f} in {stats.decode_s:.2f} s")
    )
    if committed:
        rows.append(
            (
                "tokens per step",
                f"{sum(committed) / len(committed):.2f} committed of at most {num_drafts + 1}"
                f" (steps: {len(committed)}, folds: {stats.folds})",
            )
        )
    if num_drafts:
        rates = "   ".join(
            f"{j}: {percent(rate)}" for j, rate in enumerate(stats.acceptance_by_position(), 1)
        )
        rows.append(("accepted by position", rates or "-"))
    memory = result.memory()
    here = amount(memory["bytes_per_request"])
    if num_drafts:
        here += f" here, {amount(memory['bytes_per_request_with_snapshots'])} with state snapshots"
    rows.append(("memory of the request", here))
    if result.params.temperature > 0:
        rows.append(("seed", str(result.params.seed)))
    return rows


def as_json(result: Result, *, with_steps: bool) -> dict[str, Any]:
    """Return the whole outcome as one JSON object."""
    output, config = result.output, result.llm.config
    stats, completion = output.stats, output.outputs[0]
    num_prompt, num_new = len(output.prompt_token_ids), len(completion.token_ids)
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
        "committed_per_step": stats.committed_per_step,
        "drafted_per_step": stats.drafted_per_step,
        "acceptance_by_position": stats.acceptance_by_position(),
        "tokens_per_second": result.tokens_per_second,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "folds": stats.folds,
        "memory": result.memory(),
        "model": result.llm.describe().model,
        "draft_tokens": config.draft_tokens,
        "device": config.device,
        "dtype": config.dtype,
        "temperature": result.params.temperature,
        "seed": result.params.seed,
        "version": hybridspec.__version__,
    }
    if with_steps:
        document["steps"] = [
            {
                "step": step.step,
                "drafted": step.drafted,
                "token_ids": step.token_ids,
                "origins": step.origins,
                "history_len": step.history_len,
                "is_fold": step.is_fold,
            }
            for step in result.steps
        ]
    return document
