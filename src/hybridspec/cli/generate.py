"""`hybridspec generate`: continue one prompt and report what speculation did for it."""

from __future__ import annotations

import argparse
import secrets

from hybridspec.cli import chat, loading, report
from hybridspec.cli.arguments import sampling_params
from hybridspec.cli.prompts import read_prompt
from hybridspec.cli.usage import UsageError, usage_errors

__all__ = ["run"]

_SEED_BITS = 31


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    if arguments.temperature > 0 and arguments.seed is None:
        arguments.seed = secrets.randbits(_SEED_BITS)
    params = sampling_params(arguments)
    if params.n > 1 and arguments.trace and not arguments.json:
        raise UsageError(f"--n: --trace shows one continuation, got {params.n} (--json shows all)")
    if arguments.chat:
        return chat.run(arguments, params)
    prompt = read_prompt(arguments)
    llm = loading.open_engine(arguments)
    with usage_errors():
        steps = llm.stream(prompt.text, params, prompt_token_ids=prompt.token_ids)
    loading.warm_up(llm)
    report.report(arguments, llm, params, prompt, steps)
    return 0
