"""Flags: every parameter has one, mistakes are one line, help fits a terminal."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest

import hybridspec
from hybridspec.cli.arguments import engine_options, parse, sampling_params
from hybridspec.cli.usage import UsageError
from hybridspec.config import EngineConfig, SamplingParams

# For programs: what they do is no matter of a text on a terminal.
WITHOUT_FLAGS = {
    "capture_prompts",
    "draft_vocab",
    "allowed_token_ids",
    "detokenize",
    "enforce_eager",
    "include_stop_str_in_output",
    "max_num_batched_tokens",
    "max_num_seqs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
}


def test_every_parameter_of_a_request_has_a_flag() -> None:
    arguments = vars(parse(["generate"]))
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names - WITHOUT_FLAGS <= arguments.keys()


@pytest.mark.parametrize("command", ["generate", "compare", "info"])
def test_every_engine_option_has_a_flag(command: str) -> None:
    options = engine_options(parse([command]))
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert options.keys() == names - WITHOUT_FLAGS - {"seed"}  # --seed is the request's
    assert EngineConfig(**options) == EngineConfig()


def test_defaults_are_those_of_the_library_but_greedy() -> None:
    assert sampling_params(parse(["generate"])) == SamplingParams(temperature=0.0)
    assert sampling_params(parse(["compare"])) == SamplingParams(
        temperature=0.0, max_tokens=64, seed=0
    )


def test_two_dashes_can_be_a_value() -> None:
    arguments = parse(["generate", "--stop=--", "--dtype", "auto", "--", "--json"])
    assert (arguments.stop, arguments.prompt, arguments.json) == (["--"], "--json", False)


def test_no_speculation_is_zero_drafts() -> None:
    assert parse(["generate", "--no-speculation"]).draft_tokens == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "COMMAND"),
        ("gen", "invalid choice: 'gen'"),
        ("generate --no-such-flag", "--no-such-flag"),
        ("generate --max-tok 3", "--max-tok"),
        ("generate --max-tokens many", "--max-tokens"),
        ("generate --max-tokens", "--max-tokens"),
        ("compare --num-prompts 0", "--num-prompts"),
        ("generate --max-tokens=--", "--max-tokens: invalid int value: '--'"),
        ("generate --stop-token-id=--", "--stop-token-id: invalid int value: '--'"),
        ("generate a b", "b"),
        ("generate --dtype float8", "--dtype"),
        ("generate --kv-layout rows", "--kv-layout"),
        ("generate --attention-backend cuda", "--attention-backend"),
        ("generate --no-speculation --draft-tokens 5", "--no-speculation and --draft-tokens"),
        ("info --no-speculation --draft-tokens 0", "--no-speculation and --draft-tokens"),
        ("generate --no-speculation --mtp-from x", "--mtp-from: expected drafts from a head, got"),
        ("info --draft-tokens 0 --mtp-from x", "--mtp-from: expected drafts from a head, got"),
        ("generate --drafter none --mtp-from x", "got plain decoding"),
        ("compare --drafter lookup --mtp-from x", "got --drafter lookup"),
        ("generate --no-speculation --drafter mtp", "--no-speculation and --drafter: give one"),
        ("info --no-speculation --drafter lookup", "--no-speculation and --drafter: give one"),
        ("generate --no-speculation --verify-rows 4", "--no-speculation and --verify-rows"),
        ("generate --draft-tokens 0 --verify-rows 4", "--draft-tokens 0 and --verify-rows"),
        ("generate --draft-tokens 0 --drafter mtp", "--draft-tokens 0 and --drafter: give one"),
        ("generate --drafter none --draft-tokens 5", "--drafter none and --draft-tokens: give"),
        ("generate --drafter none --verify-rows 5", "--drafter none and --verify-rows: give one"),
        ("generate --acceptance 0.8,x", "expected numbers with commas between, got '0.8,x'"),
        ("generate --acceptance 0.8,1.5", "acceptance: expected a number in [0, 1], got 1.5"),
        ("generate --acceptance-spread 0.1", "--acceptance-spread: needs --acceptance"),
        ("serve --no-speculation --acceptance 0.8", "--no-speculation and --acceptance: give one"),
        ("serve --no-speculation --draft-vocab a", "--no-speculation and --draft-vocab: give one"),
        ("serve --speculation off --draft-tokens 2", "--speculation off and --draft-tokens: give"),
        ("generate --no-speculation --speculation dynamic", "--no-speculation and --speculation d"),
        ("generate --speculation sometimes", "--speculation"),
        ("generate --json --quiet", "--json and --quiet: give one of them"),
        ("generate --logit-bias 3:1 --logit-bias 3:2", "--logit-bias: expected each token once"),
        ("generate --chat --template-arg a=1 --template-arg a=2", "expected each name once, got a"),
        ("generate --system=", "--system: needs --chat"),
        ("generate --chat-template=", "--chat-template: needs --chat"),
        ("generate --template-arg=", "--template-arg: needs --chat"),
        ("generate --prompt-file=", "--prompt-file: expected a file, got an empty name"),
        ("generate --chat --chat-template=", "--chat-template: expected a file or a name, got an"),
        ("generate --revision main", "revision: expected an id on the hub with it, got"),
        ("generate --system x", "--system: needs --chat"),
        ("generate --chat-template x", "--chat-template: needs --chat"),
        ("generate --template-arg a=1", "--template-arg: needs --chat"),
        ("generate --logit-bias 3", "--logit-bias: expected ID:BIAS, got '3'"),
        ("generate --logit-bias a:1", "--logit-bias: expected ID:BIAS, got 'a:1'"),
        ("generate --n 2 --trace", "--n: --trace shows one continuation"),
        ("generate --chat --n 2", "--n: expected 1 in a conversation"),
        ("generate --chat --prompt-token-ids 3", "--prompt-token-ids: a conversation"),
        ("generate --chat --template-arg x", "--template-arg: expected NAME=VALUE, got 'x'"),
        ("generate --chat --template-arg a-b=1", "--template-arg: expected NAME=VALUE"),
        ("generate --chat --template-arg messages=1", "--template-arg: expected another name"),
        ("generate --chat --template-arg chat_template_kwargs=1", "expected another name than"),
        ("generate --chat --template-arg add_generation_prompt=1", "expected true or false as add"),
        ("generate --chat --template-arg continue_final_message=x", "got 'x'"),
        ("generate --chat --template-arg tools=5", "--template-arg: expected a list as tools"),
        ("generate --chat --chat-template no/such.jinja", "no/such.jinja: No such file"),
        ("compare --num-prompts 0", "--num-prompts"),
        ("compare --repeats -1", "--repeats"),
        ("compare text --num-prompts 8", "PROMPT and --num-prompts: give one of them"),
        ("compare --prompt-token-ids 1 --kind code", "--prompt-token-ids and --kind: give one of"),
        ("generate --prompt-token-ids 1,,2", "whole numbers with commas between, got '1,,2'"),
        ("compare --kind poems", "--kind"),
        ("info x", "x"),
    ],
)
def test_a_wrong_command_line_is_one_line(cli: Callable, words: str, said: str) -> None:
    outcome = cli(*words.split())
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("hybridspec: error: ")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "--max-tokens 0",
        "--min-tokens -1",
        "--min-tokens 9 --max-tokens 8",
        "--temperature -1",
        "--temperature nan",
        "--top-p 0",
        "--top-p 1.5",
        "--top-k -2",
        "--min-p 2",
        "--repetition-penalty 0",
        "--frequency-penalty nan",
        "--presence-penalty inf",
        "--logit-bias 3:101",
        "--logprobs -2",
        "--prompt-logprobs -2",
        "--threads 0",
        f"--temperature 1{'0' * 400}",
        f"--top-k 1{'0' * 4000}",
        "--n 0",
        "--seed -1",
        "--stop-token-id -1",
        "--draft-tokens 8",
        "--draft-tokens -1",
        "--device tpu",
        "--max-model-len 1",
        "--memory-fraction 0",
    ],
)
def test_a_wrong_value_is_one_line_before_anything_is_loaded(cli: Callable, words: str) -> None:
    outcome = cli("generate", "x", *words.split(), "--model", "/no/such/folder")
    assert outcome.status == 2
    name = words.split()[-2].removeprefix("--").replace("-", "_")
    assert outcome.err.startswith("hybridspec: error: ")
    assert name in outcome.err or "min_tokens" in outcome.err
    assert outcome.err.count("\n") == 1


def test_version(cli: Callable) -> None:
    outcome = cli("--version")
    assert (outcome.status, outcome.out) == (0, f"hybridspec {hybridspec.__version__}\n")


@pytest.mark.parametrize("command", ["", "generate", "compare", "info"])
def test_help_fits_eighty_columns(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli(*command.split(), "--help")
    assert outcome.status == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert outcome.out.startswith("usage: hybridspec")


def test_help_and_mistakes_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from hybridspec.cli import main\n"
        "statuses = main(['--help']), main(['generate', '--top-p', '3'])\n"
        "sys.exit(f'{statuses} {\"torch\" in sys.modules}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "(0, 2) False"


def test_usage_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="threads"):
        engine_options(parse(["info", "--threads", "0"]))
    assert issubclass(UsageError, ValueError)
