"""The flags of `hybridspec serve` and `bench-serve`; imports nothing that the server needs."""

from __future__ import annotations

import argparse

__all__ = ["BENCH_SERVE", "SERVE", "add_bench_flags", "add_serve_flags"]

SERVE = """\
Serve a model with OpenAI's interface, on this machine only unless --host says
otherwise; a page at / shows it at work. Needs: pip install 'hybridspec[serve]'
"""

BENCH_SERVE = """\
Put load on a running server with OpenAI's interface and print what its clients
see. Run it in a process of its own, on the same machine or another. Exit status
1 if a request failed.
"""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server itself."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (default: --model)"
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="ask for one of these keys, a line each"
    )
    group.add_argument(
        "--max-requests",
        type=int,
        default=256,
        metavar="N",
        help="continuations that may run or wait; more are turned away (default: %(default)s)",
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="serve from N processes on Ray Serve, each with the model and, where there are GPUs, "
        "one of its own; needs: pip install 'hybridspec[cluster]' (default: this process alone)",
    )
    group.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests have to finish after SIGTERM (default: %(default)g)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        dest="cors_origins",
        help="let browsers use it from pages of this origin; may be given several times",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file, or the name of one of the model's templates",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring templates of their own",
    )
    _add_batch_flags(parser)


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add what matters to an engine with many requests at a time."""
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="requests that run at the same time; others wait (default: 64 on a CPU, 256 on a GPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="prompt rows of a forward pass (default: 2048 on a CPU, 8192 on a GPU)",
    )
    group.add_argument(
        "--draft-vocab",
        metavar="FILE",
        help="the draft head chooses from these words: a JSON file of ids, or a text whose most "
        "frequent ones are taken (default: all)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="run steps on a GPU operator by operator, without CUDA graphs",
    )
    group.add_argument(
        "--capture-prompts",
        action=argparse.BooleanOptionalAction,
        help="whether to capture forwards of prompt rows too (default: where they can be)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 1000000, got {text!r}")
    return value


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the measuring client."""
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: the package's)"
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="where it answers (default: %(default)s)",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="send the first key of this file")
    group = parser.add_argument_group("load")
    for name, default, what in (
        ("--num-requests", 64, "requests in all"),
        ("--concurrency", 16, "requests at a time"),
        ("--max-tokens", 128, "tokens of each answer"),
    ):
        group.add_argument(
            name, type=_count, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    group.add_argument(
        "--rate",
        type=_positive,
        metavar="R",
        help="begin so many a second, at random moments, in place of --concurrency",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the moments and of the answers"
    )
    group.add_argument(
        "--use-eos", action="store_true", help="let answers end early, at the end-of-text token"
    )
    group.add_argument("--chat", action="store_true", help="send each prompt as a conversation")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--plot", metavar="FILE", help="write the distribution of times as SVG")
