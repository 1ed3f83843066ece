"""Tokens, steps and numbers in a terminal, and without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

if TYPE_CHECKING:
    from hybridspec.config import EngineConfig
    from hybridspec.engine import StepOutput
    from hybridspec.models.tokenizer import Detokenizer
    from hybridspec.speculate import TokenLogprobs

__all__ = [
    "ACCEPTED",
    "DUMMY_WEIGHTS",
    "MarkedText",
    "PlainConsole",
    "amount",
    "drafter_name",
    "drafting",
    "has_own_head",
    "logprob_line",
    "percent",
    "print_facts",
    "printable",
    "synthetic",
    "trace_heading",
    "trace_line",
]

DUMMY_WEIGHTS = "DUMMY: random numbers, so speed is real, acceptance and text are not"
_DRAFTERS = {"mtp": "MTP head", "lookup": "prompt lookup", "none": "none"}

# Names of styles; what they are depends on whether the terminal has colours (PlainConsole).
ACCEPTED, REJECTED, OWN, FAINT = "accepted", "rejected", "own", "faint"

_COLOURS = {ACCEPTED: "green", REJECTED: "red strike", OWN: "bold", FAINT: "dim"}
_NO_COLOURS = {**_COLOURS, ACCEPTED: "underline", REJECTED: "strike"}

# Escape sequences in generated text would act on the terminal: show their pictures instead.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # these have no pictures


class PlainConsole(Console):
    """rich's console without guesses at what to colour, which tells main() of a broken pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if self.width < 1:  # COLUMNS=0, as some programs set it; nothing at all would be shown
            self.width = 80
        has_colours = self.color_system is not None and not self.no_color
        self.push_theme(Theme(_COLOURS if has_colours else _NO_COLOURS))

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def printable(text: str) -> str:
    """Return text with its control characters, line feeds and tabs aside, made visible."""
    return text.translate(_CONTROLS)


def amount(num_bytes: float) -> str:
    """Return a number of bytes with a unit that suits it.

    Example:
        >>> amount(512), amount(402_653), amount(75_497_472)
        ('512 B', '393 KiB', '72.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            digits = 1 if num_bytes < 100 and unit != "B" else 0
            return f"{num_bytes:,.{digits}f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def percent(share: float | None) -> str:
    """Return a share as percent, "-" for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def drafter_name(config: EngineConfig) -> str:
    """Return what drafts in an engine of this resolved config."""
    name = _DRAFTERS.get(config.drafter, config.drafter)
    return name if config.mtp_from is None else f"{name} of {config.mtp_from}"


def synthetic(config: EngineConfig) -> str | None:
    """Return the label of forced acceptance, None where there is none."""
    if config.acceptance is None:
        return None
    rates = ", ".join(f"{rate:g}" for rate in config.acceptance)
    spread = f", spread {config.acceptance_spread:g}" if config.acceptance_spread else ""
    return f"SYNTHETIC: accepted by force ({rates}{spread}), so the text is not the model's"


def drafting(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of JSON documents on weights and drafts."""
    return {
        "dummy_weights": config.dummy_weights,
        "synthetic_acceptance": config.acceptance,
        "acceptance_spread": config.acceptance_spread,
        "drafter": config.drafter,
        "mtp_from": config.mtp_from,
        "draft_tokens": config.draft_tokens,
        "speculation": config.speculation,
    }


def has_own_head(config: EngineConfig) -> bool:
    """Return whether the checkpoint's own head drafts, which goes without saying."""
    return config.drafter == "mtp" and config.mtp_from is None


class MarkedText:
    """Text of a continuation, each character with the origin of the token that brought it.

    Text may come later than its tokens, where a character needs more than one token or where a
    stop string may have begun.

    Args:
        detokenizer: turns tokens into text, as the engine's own does.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._origins: list[str] = []
        self._newest = ""

    def take(self, step: StepOutput) -> Text:
        """Return the text that a step adds, marked."""
        for token, origin in zip(step.token_ids, step.origins, strict=True):
            self._newest = origin
            self._origins += [origin] * len(self._detokenizer.push([token]))
        if step.finished:
            self._origins += [self._newest] * len(self._detokenizer.finish())
        marked = Text()
        origins, self._origins = self._origins[: len(step.text)], self._origins[len(step.text) :]
        for character, origin in zip(printable(step.text), origins, strict=False):
            marked.append(character, ACCEPTED if origin == "accepted" else None)
        marked.append(printable(step.text[len(origins) :]))
        return marked


def shown(token: int, piece: str) -> str:
    """Return a token as a quoted text, or as its number where it is no whole text."""
    return json.dumps(printable(piece), ensure_ascii=False) if piece else f"#{token}"


def trace_heading(draft_tokens: int) -> Text:
    """Return the line above the steps."""
    drafted = "drafted".ljust(_drafted_width(draft_tokens))
    return Text(f"step history fold  {drafted}  accepted  then", FAINT)


def trace_line(step: StepOutput, draft_tokens: int, piece: Callable[[int], str]) -> Text:
    """Return one step as one line: what was drafted, how much of it was right, what came then.

    Args:
        step: what the engine reports.
        draft_tokens: drafts per step, for the width of the column.
        piece: text of a token alone, "" if it has none.
    """
    num_accepted = step.origins.count("accepted")
    is_prefill = step.origins[:1] == ["prefill"]
    line = Text(f"{step.step:4d} ")
    line.append(f"{'' if is_prefill else step.history_len:>7} ")
    line.append("fold  " if step.is_fold else "      ", "yellow")
    width = len(line) + _drafted_width(draft_tokens)
    for index, token in enumerate(step.drafted):
        line.append(" " if index else "")
        line.append(shown(token, piece(token)), ACCEPTED if index < num_accepted else REJECTED)
    line.pad_right(max(width - len(line), 0))
    share = f"{num_accepted} of {len(step.drafted)}" if step.drafted else ""
    line.append(f"  {share:8s}  ")
    if step.origins and step.origins[-1] != "accepted":
        own = step.token_ids[-1]
        line.append(f"{step.origins[-1]:9s} ")
        line.append(shown(own, piece(own)), OWN)
    if step.expected_tokens is not None:
        line.append(f"  {len(step.token_ids)} of {step.expected_tokens:.1f} expected", FAINT)
    if step.finished:
        line.append(f"  {step.finish_reason}", FAINT)
    return line


def logprob_line(report: TokenLogprobs, piece: Callable[[int], str]) -> Text:
    """Return how likely a token was, and behind it the most likely ones.

    Args:
        report: by token id, the token itself first.
        piece: text of a token alone, "" if it has none.
    """
    (token, own), *others = report.items()
    line = Text(f"{own.logprob:9.3f} {own.rank:6d}  ").append(shown(token, piece(token)), OWN)
    for token, other in others:
        line.append(f"  {shown(token, piece(token))} {other.logprob:.3f}", FAINT)
    return line


def _drafted_width(draft_tokens: int) -> int:
    return max(5 * draft_tokens - 1, len("drafted"))


def print_facts(
    console: Console, title: str, facts: Sequence[tuple[str, str | Text]], **style: Any
) -> None:
    """Print names and values: a panel in a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        for name, value in facts:
            console.print(f"{name}: {value}", soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style=FAINT)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    console.print(Panel(table, title=title, title_align="left", expand=False, **style))
