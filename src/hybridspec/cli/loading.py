"""From flags to an engine that is loaded and warm."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hybridspec.cli.arguments import engine_options
from hybridspec.cli.render import amount
from hybridspec.cli.usage import usage_errors
from hybridspec.config import SamplingParams

if TYPE_CHECKING:
    from hybridspec import LLM

__all__ = ["open_engine", "progress", "warm_up"]

_WARM_UP_TOKENS = 24


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on standard error and only if that is a terminal.

    Yields:
        A function that shows how far it is, behind the text.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            yield lambda more: status.update(f"{text}: {more}")
    else:
        yield lambda more: None


def open_engine(arguments: argparse.Namespace, **overrides: Any) -> LLM:
    """Load the model that the flags name, downloading it first if need be; shows how far it is.

    Args:
        arguments: parsed flags.
        overrides: engine options that replace those of the flags.

    Raises:
        UsageError, CheckpointError, UnsupportedError, CapacityError, OSError: if the model or an
            option does not do; the message says what.
    """
    options = engine_options(arguments) | overrides
    from hybridspec import LLM
    from hybridspec.engine.resolve import model_folder

    with usage_errors():
        # Downloads show bars of their own, so they are done before anything else is shown.
        model = "bundled" if arguments.model is None else arguments.model
        folder = model_folder(
            model, has_weights=not options["dummy_weights"], revision=options.pop("revision")
        )
        if options["tokenizer"] is not None:
            options["tokenizer"] = str(model_folder(options["tokenizer"], has_weights=False))
        if options["mtp_from"] is not None and options["draft_tokens"] > 0:
            options["mtp_from"] = str(model_folder(options["mtp_from"], only="mtp."))
        with progress("loading the model") as show:
            return LLM(folder, **options, on_progress=_shown_bytes(show))


def _shown_bytes(show: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return what shows bytes as a share of all, each percent once."""
    last = -1

    def on_progress(done: int, total: int) -> None:
        nonlocal last
        share = 100 * done // max(total, 1)
        if share > last:
            last = share
            show(f"{share} % of {amount(total)}")

    return on_progress


def warm_up(llm: LLM) -> None:
    """Run a short request, so that what happens only in the first steps is not timed."""
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    assert llm.config.max_model_len is not None
    room = llm.config.max_model_len - 1
    with progress("warming up"):
        llm.generate(prompt_token_ids=[0] * min(8, room), sampling_params=params)
