"""`hybridspec compare`: are the tokens the same, and how much faster do they come?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from hybridspec.bundled import held_out_prompts
from hybridspec.cli import loading
from hybridspec.cli.arguments import sampling_params
from hybridspec.cli.prompts import Prompt, parse_token_ids
from hybridspec.cli.render import (
    DUMMY_WEIGHTS,
    PlainConsole,
    drafter_name,
    has_own_head,
    percent,
    synthetic,
)
from hybridspec.cli.report import raise_error
from hybridspec.cli.usage import UsageError, usage_errors

if TYPE_CHECKING:
    from hybridspec import LLM, SamplingParams
    from hybridspec.engine import RequestOutput

__all__ = ["Pair", "first_difference", "run"]

_NAME_WIDTH = 32
_MOST_LOGPROBS = 1024  # of a position, the most likely ones; more would take long to hand over


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt decoded both ways.

    Attributes:
        name: what to call the prompt.
        plain, speculative: what the two engines handed back.
        is_synthetic: whether drafts were accepted by force, so that tokens are not compared.
    """

    name: str
    plain: RequestOutput
    speculative: RequestOutput
    is_synthetic: bool

    @property
    def difference(self) -> int | None:
        """Index of the first token that differs, or None."""
        if self.is_synthetic:
            return None
        return first_difference(
            self.plain.outputs[0].token_ids, self.speculative.outputs[0].token_ids
        )

    @property
    def logprobs(self) -> tuple[int, int]:
        """How many log-probabilities were compared, and how many of them differ in a bit."""
        compared = differing = 0
        reports = [output.outputs[0].logprobs or [] for output in (self.plain, self.speculative)]
        for left, right in zip(*reports, strict=False):
            for token in left.keys() | right.keys():
                values = [one[token].logprob for one in (left, right) if token in one]
                compared += 1
                differing += len(values) < 2 or values[0] != values[1]
        return compared, differing

    @property
    def ratio(self) -> float | None:
        """How many times faster the tokens came; None if there were no steps to time."""
        plain, speculative = _tokens_per_second(self.plain), _tokens_per_second(self.speculative)
        return speculative / plain if plain and speculative else None


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two token lists differ, None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status, 1 if tokens or bits differ."""
    if arguments.drafter == "none":
        raise UsageError("--drafter: expected another than none to compare with plain decoding")
    if arguments.draft_tokens == 0:
        raise UsageError("--draft-tokens: expected 1 or more to compare with plain decoding, got 0")
    params = sampling_params(arguments)
    prompts = _prompts(arguments)
    # The first engine must leave the second one its share of a GPU's memory.
    share = arguments.memory_fraction / 2
    plain = loading.open_engine(arguments, draft_tokens=0, memory_fraction=share)
    speculative = loading.open_engine(arguments)
    with usage_errors():
        for prompt in prompts:
            # Checks it, runs nothing yet.
            speculative.stream(prompt.text, params, prompt_token_ids=prompt.token_ids)
    for llm in (plain, speculative):
        loading.warm_up(llm)
    if arguments.exact == "bitwise" and speculative.config.acceptance is None:
        count = min(plain.model_config.vocab_size, _MOST_LOGPROBS)
        params = dataclasses.replace(params, logprobs=count)
    console = PlainConsole(quiet=arguments.json)
    if speculative.config.dummy_weights:
        console.print(f"weights: {DUMMY_WEIGHTS}", style="bold", soft_wrap=True)
    if (label := synthetic(speculative.config)) is not None:
        console.print(f"acceptance: {label}", style="bold", soft_wrap=True)
    console.print(_heading(), style="dim", soft_wrap=True)
    pairs = []
    total = arguments.repeats * len(prompts)
    for index in range(total):
        prompt = prompts[index % len(prompts)]
        with loading.progress(f"{index + 1} of {total}: {prompt.source}"):
            pair = _run_pair(plain, speculative, prompt, params, is_plain_first=index % 2 == 0)
        console.print(_row(pair), soft_wrap=True)
        pairs.append(pair)
    if arguments.json:
        print(json.dumps(as_json(pairs, speculative), allow_nan=False))
    else:
        _print_summary(console, pairs, speculative)
    is_same = all(pair.difference is None and pair.logprobs[1] == 0 for pair in pairs)
    return 0 if is_same else 1


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    if not all(arguments.prompts):
        raise UsageError("PROMPT: expected a prompt, got an empty one")
    if arguments.prompts and arguments.prompt_token_ids:
        raise UsageError("PROMPT and --prompt-token-ids: give one of them")
    if arguments.prompt_token_ids:
        return [
            Prompt(token_ids=parse_token_ids(text), source=text)
            for text in arguments.prompt_token_ids
        ]
    if arguments.prompts:
        return [Prompt(text=text, source=repr(text)) for text in arguments.prompts]
    known = held_out_prompts(arguments.kind)
    if arguments.num_prompts > len(known):
        raise UsageError(
            f"--num-prompts: expected at most {len(known)}, got {arguments.num_prompts}"
        )
    spread = [known[i * len(known) // arguments.num_prompts] for i in range(arguments.num_prompts)]
    return [Prompt(text=prompt.text, source=prompt.source) for prompt in spread]


def _run_pair(
    plain: LLM, speculative: LLM, prompt: Prompt, params: SamplingParams, *, is_plain_first: bool
) -> Pair:
    outputs = {}
    for llm in (plain, speculative) if is_plain_first else (speculative, plain):
        [outputs[llm]] = llm.generate(prompt.text, params, prompt_token_ids=prompt.token_ids)
        raise_error(outputs[llm])
    return Pair(
        name=prompt.source or "",
        plain=outputs[plain],
        speculative=outputs[speculative],
        is_synthetic=speculative.config.acceptance is not None,
    )


def _tokens_per_second(output: RequestOutput) -> float | None:
    stats = output.stats
    return sum(stats.committed_per_step) / stats.decode_s if stats.decode_s > 0 else None


def _heading() -> str:
    return f"{'prompt':{_NAME_WIDTH}} tokens  plain/s  spec/s  ratio  same tokens"


def _row(pair: Pair) -> Text:
    name = pair.name if len(pair.name) <= _NAME_WIDTH else pair.name[: _NAME_WIDTH - 1] + "…"
    speeds = [_tokens_per_second(output) for output in (pair.plain, pair.speculative)]
    plain, speculative = ("-" if speed is None else f"{speed:.0f}" for speed in speeds)
    ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
    line = Text(f"{name:{_NAME_WIDTH}} {len(pair.plain.outputs[0].token_ids):6d}  ")
    line.append(f"{plain:>7}  {speculative:>6}  {ratio:>5}  ")
    if pair.is_synthetic:
        return line.append("synthetic")
    if pair.difference is None:
        return line.append("yes", "green")
    return line.append(f"NO, from token {pair.difference}", "bold red")


def _ratios(pairs: Sequence[Pair]) -> list[float]:
    return sorted(pair.ratio for pair in pairs if pair.ratio is not None)


def _logprobs(pairs: Sequence[Pair]) -> tuple[int, int]:
    counts = [pair.logprobs for pair in pairs]
    return sum(compared for compared, _ in counts), sum(differing for _, differing in counts)


def _committed_per_step(pairs: Sequence[Pair]) -> float | None:
    committed = [n for pair in pairs for n in pair.speculative.stats.committed_per_step]
    return sum(committed) / len(committed) if committed else None


def _acceptance(pairs: Sequence[Pair]) -> list[float | None]:
    from hybridspec.engine.outputs import acceptance_by_position

    return acceptance_by_position([pair.speculative.stats for pair in pairs])


def _print_summary(console: Console, pairs: Sequence[Pair], llm: LLM) -> None:
    num_different = sum(pair.difference is not None for pair in pairs)
    console.print()
    if any(pair.is_synthetic for pair in pairs):
        verdict = "tokens are not compared: drafts were accepted by force"
        console.print(verdict, style="bold", soft_wrap=True)
    elif num_different:
        verdict = f"tokens differ in {num_different} of {len(pairs)} runs"
        console.print(verdict, style="bold red", soft_wrap=True)
    else:
        console.print(f"tokens identical in all {len(pairs)} runs", style="green", soft_wrap=True)
    compared, differing = _logprobs(pairs)
    if compared:
        console.print(
            f"log-probabilities: {compared:,} compared bit for bit, {differing:,} differ",
            style="bold red" if differing else "green",
            soft_wrap=True,
        )
    ratios, per_step = _ratios(pairs), _committed_per_step(pairs)
    if ratios and per_step is not None:
        console.print(
            f"speculative is {statistics.median(ratios):.2f} times as fast as plain decoding "
            f"(median; {ratios[0]:.2f} to {ratios[-1]:.2f})",
            style="bold",
            soft_wrap=True,
        )
        rates = ", ".join(percent(rate) for rate in _acceptance(pairs))
        console.print(
            f"{per_step:.2f} tokens per step of at most {llm.config.draft_tokens + 1}; "
            f"accepted by position: {rates}"
            + ("" if has_own_head(llm.config) else f"; drafter: {drafter_name(llm.config)}"),
            soft_wrap=True,
        )


def as_json(pairs: Sequence[Pair], llm: LLM) -> dict[str, Any]:
    """Return every run and the ratio as one JSON object."""
    ratios = _ratios(pairs)
    return {
        "identical": None
        if llm.config.acceptance is not None
        else all(pair.difference is None for pair in pairs),
        "exact": llm.config.exact,
        "logprobs_compared": _logprobs(pairs)[0],
        "logprobs_differing": _logprobs(pairs)[1],
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_lowest": ratios[0] if ratios else None,
        "ratio_highest": ratios[-1] if ratios else None,
        "tokens_per_step": _committed_per_step(pairs),
        "acceptance_by_position": _acceptance(pairs),
        "model": llm.describe().model,
        "dummy_weights": llm.config.dummy_weights,
        "synthetic_acceptance": llm.config.acceptance,
        "acceptance_spread": llm.config.acceptance_spread,
        "drafter": llm.config.drafter,
        "mtp_from": llm.config.mtp_from,
        "draft_tokens": llm.config.draft_tokens,
        "device": llm.config.device,
        "dtype": llm.config.dtype,
        "runs": [
            {
                "prompt": pair.name,
                "num_tokens": len(pair.plain.outputs[0].token_ids),
                "plain_tokens_per_second": _tokens_per_second(pair.plain),
                "speculative_tokens_per_second": _tokens_per_second(pair.speculative),
                "ratio": pair.ratio,
                "first_difference": pair.difference,
            }
            for pair in pairs
        ],
    }
