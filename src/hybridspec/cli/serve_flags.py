"""The flags of `hybridspec serve`; imports nothing that the server needs."""

from __future__ import annotations

import argparse

__all__ = ["SERVE", "add_serve_flags"]

SERVE = """\
Serve a model with OpenAI's interface, on this machine only unless --host says
otherwise; a page at / shows it at work. Needs: pip install 'hybridspec[serve]'
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
