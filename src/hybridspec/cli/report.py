"""A request as `hybridspec generate` shows it: its text or steps, and what speculation did."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

import hybridspec
from hybridspec.cli import loading
from hybridspec.cli.prompts import Prompt
from hybridspec.cli.render import (
    ACCEPTED,
    DUMMY_WEIGHTS,
    MarkedText,
    PlainConsole,
    amount,
    drafter_name,
    drafting,
    has_own_head,
    logprob_line,
    percent,
    print_facts,
    printable,
    synthetic,
    trace_heading,
    trace_line,
)
from hybridspec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hybridspec import LLM, SamplingParams
    from hybridspec.engine import CompletionOutput, RequestOutput, StepOutput
    from hybridspec.speculate import TokenLogprobs

__all__ = ["Result", "raise_error", "report"]


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
        outputs = self.output.outputs
        num_prompt = len(self.output.prompt_token_ids)
        kv = sum(info.kv_bytes(num_prompt + len(one.token_ids)) for one in outputs)
        return {
            "bytes_per_request": len(outputs) * sum(info.request_bytes.values()) + kv,
            "bytes_per_request_with_snapshots": len(outputs) * info.snapshot_bytes + kv,
            "bytes_of_keys_and_values_in_both": kv,
        }

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(len(one.token_ids) for one in self.output.outputs)


def report(
    arguments: argparse.Namespace,
    llm: LLM,
    params: SamplingParams,
    prompt: Prompt,
    steps: Iterator[StepOutput],
) -> Result:
    """Run a request and show it in the form that the flags ask for.

    Raises:
        CheckpointError: if the model's logits held NaN; what came before is shown.
    """
    if arguments.json:
        result = _collect(llm, params, steps, on_step=lambda step: None)
        document = as_json(result, with_steps=arguments.trace)
        print(json.dumps(document, allow_nan=False), flush=True)
    else:
        result = _show(arguments, llm, params, prompt, steps)
    raise_error(result.output)
    return result


def raise_error(output: RequestOutput) -> None:
    """Raise CheckpointError if a continuation failed."""
    for one in output.outputs:
        if one.error is not None:
            raise CheckpointError(one.error)


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
) -> Result:
    """Stream the text or the steps, then the log-probabilities and the panel."""
    console = PlainConsole()
    draft_tokens = llm.config.draft_tokens
    take = _marker(llm)
    held_back = Text()
    if arguments.trace:
        console.print(trace_heading(draft_tokens), soft_wrap=True)
    has_echo = console.is_terminal and not arguments.quiet and not arguments.trace

    def on_step(step: StepOutput) -> None:
        if has_echo and step.step == 0 and step.index == 0:
            _echo(console, prompt)  # not before: the progress line clears the line it ends on
        if params.n > 1:
            return
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
    for one in result.output.outputs if params.n > 1 else ():
        heading = f"continuation {one.index + 1} of {params.n} (ended by {one.finish_reason})"
        console.print(heading, style="dim", soft_wrap=True)
        console.print(Text(printable(_shown_text(llm, one))), soft_wrap=True)
    console.print()
    _print_logprobs(console, result)
    if not arguments.quiet and not arguments.chat:
        console.print()
        print_facts(console, "hybridspec", facts(result, prompt, console.is_terminal))
    return result


def _shown_text(llm: LLM, one: CompletionOutput) -> str:
    return one.text if llm.tokenizer is not None else " ".join(map(str, one.token_ids))


def _print_logprobs(console: Console, result: Result) -> None:
    """Print what was asked for with --logprobs and --prompt-logprobs, a line for each token."""
    output = result.output
    parts: list[tuple[str, Sequence[TokenLogprobs | None]]]
    parts = [("prompt", output.prompt_logprobs or [])]
    parts += [(f"continuation {one.index + 1}", one.logprobs or []) for one in output.outputs]
    for name, reports in parts:
        if reports:
            console.print()
            heading = f"log-probability, rank, token, most likely tokens: {name}"
            console.print(heading, style="bold", soft_wrap=True)
        for found in reports:
            if found is not None:
                line = logprob_line(found, lambda token: _piece(result.llm, token))
                console.print(line, soft_wrap=True)


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
    ended = ", ".join(str(one.finish_reason) for one in result.output.outputs)
    committed = stats.committed_per_step
    speed = result.tokens_per_second
    num_drafts = result.llm.config.draft_tokens
    rows: list[tuple[str, str | Text]] = []
    if result.llm.config.dummy_weights:
        rows.append(("weights", DUMMY_WEIGHTS))
    if (label := synthetic(result.llm.config)) is not None:
        rows.append(("acceptance", label))
    if is_terminal and num_drafts:
        legend = Text().append("accepted drafts", ACCEPTED).append("   the model's own tokens")
        rows.append(("text", legend))
    rows.append(
        (
            "tokens",
            f"{result.num_new_tokens} after a prompt of {len(result.output.prompt_token_ids)}"
            f" (ended by {ended})",
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
        if not has_own_head(result.llm.config):
            rows.append(("drafter", drafter_name(result.llm.config)))
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
    num_prompt, num_new = len(output.prompt_token_ids), result.num_new_tokens
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
        **drafting(config),
        "device": config.device,
        "dtype": config.dtype,
        "temperature": result.params.temperature,
        "seed": result.params.seed,
        "version": hybridspec.__version__,
    }
    if with_steps:
        document["counters"] = dataclasses.asdict(result.llm.counters())
    if len(output.outputs) > 1:
        document["continuations"] = [
            {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
            for one in output.outputs
        ]
    if completion.logprobs is not None:
        each = [_reports_as_json(result.llm, one.logprobs or []) for one in output.outputs]
        document["logprobs"] = each if len(each) > 1 else each[0]
    if output.prompt_logprobs is not None:
        document["prompt_logprobs"] = _reports_as_json(result.llm, output.prompt_logprobs)
    if with_steps:
        document["steps"] = [_step_as_json(step) for step in result.steps]
    return document


def _step_as_json(step: StepOutput) -> dict[str, Any]:
    return {
        "index": step.index,
        "step": step.step,
        "drafted": step.drafted,
        "token_ids": step.token_ids,
        "origins": step.origins,
        "history_len": step.history_len,
        "is_fold": step.is_fold,
        "expected_tokens": step.expected_tokens,
    }


def _reports_as_json(llm: LLM, reports: Sequence[TokenLogprobs | None]) -> list[Any]:
    """Return for each token a list: itself, then the most likely ones; None for a first token."""
    return [
        None
        if found is None
        else [
            {
                "token_id": token,
                "text": _piece(llm, token),
                "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
                "rank": entry.rank,
            }
            for token, entry in found.items()
        ]
        for found in reports
    ]
