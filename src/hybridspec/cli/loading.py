"""From flags to an engine that is loaded and warm."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridspec.cli.arguments import engine_options, usage_errors
from hybridspec.config import SamplingParams

if TYPE_CHECKING:
    from hybridspec import LLM

__all__ = ["open_engine", "progress", "warm_up"]

_SMALL_HIDDEN_SIZE = 512  # up to here a step is made of small operations, slower on two threads
_WARM_UP_TOKENS = 24


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show what is going on, on standard error and only if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        yield


def open_engine(arguments: argparse.Namespace, **overrides: Any) -> LLM:
    """Load the model that the flags name.

    Args:
        arguments: parsed flags; `threads` is applied to torch.
        overrides: engine options that replace those of the flags.

    Raises:
        UsageError, CheckpointError, UnsupportedError, CapacityError, OSError: if the model or an
            option does not do; the message says what.
    """
    options = engine_options(arguments) | overrides
    import torch

    from hybridspec import LLM

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with usage_errors():
        llm = LLM("bundled" if arguments.model is None else arguments.model, **options)
    is_small = llm.model_config.hidden_size <= _SMALL_HIDDEN_SIZE
    if arguments.threads is None and is_small and llm.config.device == "cpu":
        torch.set_num_threads(1)
    return llm


def warm_up(llm: LLM) -> None:
    """Run a short request, so that what happens only in the first steps is not timed."""
    params = SamplingParams(temperature=0.0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    assert llm.config.max_model_len is not None
    room = llm.config.max_model_len - 1
    llm.generate(prompt_token_ids=[0] * min(8, room), sampling_params=params)
