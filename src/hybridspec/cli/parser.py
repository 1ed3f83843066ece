"""The parser of the command line: every command's flags and their help; imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from typing import Any, NoReturn

import hybridspec
from hybridspec.bundled import PROMPT_KINDS
from hybridspec.cli.engine_flags import (
    add_model_flags,
    add_model_word,
    add_speculation_flags,
    flag_of,
)
from hybridspec.cli.serve_flags import BENCH_SERVE, SERVE, add_bench_flags, add_serve_flags
from hybridspec.cli.usage import UsageError
from hybridspec.config import SamplingParams

__all__ = ["NUM_PROMPTS", "SAMPLING", "WITHOUT_MODEL", "build_parser"]

_DESCRIPTION = """\
Exact speculative decoding for hybrid language models, in which a rejected
draft costs nothing. Without --model, every command runs a small model that
comes with the package: it continues Python code.
"""

_GENERATE = """\
Continue a prompt and show which tokens came from accepted drafts.
"""

_COMPARE = """\
Run plain and speculative decoding of the same model, interleaved, over a set
of prompts; check that both give the same tokens; print how much faster
speculation is (median over the prompts). Exit status 1 if any token differs.
"""

_INFO = """\
Show a model's geometry, the backend of each operation and why it was chosen,
and what a request takes in memory.
"""

_DOCTOR = """\
Look for what this machine and its packages bring: a line for each thing, what
it enables, and how to get it where it is missing. Exit status 1 if models
cannot run here.
"""

# Type, metavar and help of the flag of each sampling parameter that is a number. Defaults are
# those of SamplingParams, except where _CLI_DEFAULTS says otherwise.
SAMPLING: dict[str, tuple[Any, str, str]] = {
    "max_tokens": (int, "N", "most tokens to generate"),
    "min_tokens": (int, "N", "tokens before which nothing ends the text"),
    "temperature": (float, "T", "0 is greedy"),
    "top_k": (int, "K", "keep the K most likely tokens, 0 all"),
    "top_p": (float, "P", "keep the most likely tokens up to this probability"),
    "min_p": (float, "P", "drop tokens below P times the likeliest"),
    "repetition_penalty": (float, "R", "divides the logits of tokens seen before"),
    "frequency_penalty": (float, "F", "subtracted for each time a token was generated"),
    "presence_penalty": (float, "F", "subtracted once if a token was generated"),
    "seed": (int, "S", "of the noise"),
}
_CLI_DEFAULTS = {"temperature": 0.0}
NUM_PROMPTS = 8  # of the package's, in compare
WITHOUT_MODEL = ("bench-serve", "doctor")  # commands that load none


class _Parser(argparse.ArgumentParser):
    """Reports mistakes by raising, so that main() prints them as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Take `--flag=--` as the value that it is; argparse would make an empty list of it."""
        if not action.option_strings or arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value


def _formatter(prog: str) -> argparse.HelpFormatter:
    columns = min(shutil.get_terminal_size().columns, 100)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=columns - 2)


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="text to continue; - reads standard input. Without it: what is piped in, else a "
        "prompt that comes with the bundled model",
    )
    group.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    group.add_argument(
        "--prompt-token-ids",
        metavar="IDS",
        help="token ids with commas between, for a model without a tokenizer",
    )


def _add_sampling(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    known = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    known |= {**_CLI_DEFAULTS, **defaults}
    group = parser.add_argument_group("sampling")
    for name, (kind, metavar, what) in SAMPLING.items():
        default = "drawn and shown" if known[name] is None else f"{known[name]:g}"
        group.add_argument(
            flag_of(name),
            type=kind,
            default=known[name],
            metavar=metavar,
            help=f"{what} (default: {default})",
        )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        dest="stop_token_ids",
        help="end after this token; may be given several times",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        dest="bad_words",
        help="never say this; may be given several times",
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID:BIAS",
        help="add to the logit of a token; may be given several times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-text token"
    )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat",
        action="store_true",
        help="answer line by line, PROMPT first, with the model's chat template; ends at the end "
        "of the input or with /exit",
    )
    group.add_argument("--system", metavar="TEXT", help="a system message before all others")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file, or the name of one of the model's templates",
    )
    group.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="template_args",
        help="what else the template looks at; JSON or text; may be given several times",
    )


def _add_json(group: Any, what: str) -> None:
    group.add_argument("--json", action="store_true", help=f"print one JSON object: {what}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="hybridspec", description=_DESCRIPTION, formatter_class=_formatter, allow_abbrev=False
    )
    version = f"hybridspec {hybridspec.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for name, summary, description, add_flags, words in (
        ("generate", "continue a prompt", _GENERATE, _add_generate, "[PROMPT] "),
        ("compare", "plain against speculative decoding", _COMPARE, _add_compare, "[PROMPT ...] "),
        ("info", "geometry, backends and memory of a model", _INFO, _add_info, "[MODEL] "),
        ("doctor", "what of this machine is used, what is missing", _DOCTOR, _add_doctor, ""),
        ("serve", "a server with OpenAI's interface", SERVE, _add_serve, "[MODEL] "),
        ("bench-serve", "load on a server", BENCH_SERVE, add_bench_flags, "[PROMPT ...] "),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            usage=f"hybridspec {name} {words}[options]",
            formatter_class=_formatter,
            allow_abbrev=False,
        )
        command.prog = f"hybridspec {name}"
        add_flags(command)
        if name not in WITHOUT_MODEL:
            add_model_flags(command)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_prompt(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--trace",
        action="store_true",
        help="show every step: what was drafted, accepted and added, the ring's fill, folds",
    )
    _add_json(group, "text, tokens, speed, acceptance; with --chat, a line for each answer")
    group.add_argument("--quiet", action="store_true", help="the text only")
    group.add_argument("--n", type=int, default=1, metavar="N", help="continuations (default: 1)")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="log-probabilities of the tokens and of the N most likely ones",
    )
    group.add_argument(
        "--prompt-logprobs", type=int, metavar="N", help="the same for the tokens of the prompt"
    )
    _add_chat(parser)
    add_speculation_flags(parser, is_optional=True)
    _add_sampling(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="texts to continue (default: some that come with the package)",
    )
    group.add_argument(
        "--prompt-token-ids",
        action="append",
        default=[],
        metavar="IDS",
        help="token ids with commas between, for a model without a tokenizer; may be given several "
        "times",
    )
    group.add_argument(
        "--kind",
        choices=PROMPT_KINDS,
        help=f"which of the package's prompts: %(choices)s (default: {PROMPT_KINDS[0]})",
        metavar="KIND",
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"how many of them (default: {NUM_PROMPTS})",
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="runs of each prompt, both ways (default: %(default)s)",
    )
    _add_json(parser.add_argument_group("output"), "every run and the ratio")
    add_speculation_flags(parser, is_optional=False)
    _add_sampling(parser, max_tokens=64, seed=0)


def _add_info(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    _add_json(parser.add_argument_group("output"), "the same facts")
    add_speculation_flags(parser, is_optional=True)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_json(parser.add_argument_group("output"), "the same lines")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    add_serve_flags(parser)
    add_speculation_flags(parser, is_optional=True)
