"""The command line: `hybridspec generate`, `compare`, `info`, `doctor`, `serve`, `bench-serve`.

A user's mistake ends as one line on standard error and exit status 2.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hybridspec.cli.usage import UsageError
from hybridspec.errors import (
    CapacityError,
    CheckpointError,
    UnsupportedError,
    missing_package,
    visible,
)

__all__ = ["main"]

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; None takes those of the process.

    Returns:
        Exit status: 0; 1 where `compare` finds a difference, or `doctor` that models cannot run; 2
        for a wrong call or an unsuitable model, told in one line on standard error; 130 after
        Ctrl-C; 141 where the reader of standard output went away.
    """
    try:
        _prepare_streams()
        from hybridspec.cli.arguments import parse  # here, so that an interruption is caught

        arguments = parse(argv)
        command = importlib.import_module(f"hybridspec.cli.{arguments.command.replace('-', '_')}")
        status: int = command.run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as request:  # --help and --version
        return int(request.code or 0)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer would raise again when the interpreter flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        found = missing_package(error)
        if found is None:
            raise
        package, extra = found
        return _complain(f"{package} is not installed: pip install 'hybridspec[{extra}]'")
    except (UsageError, CheckpointError, UnsupportedError, CapacityError, OSError) as error:
        return _complain(_explain(error))


def _prepare_streams() -> None:
    """Make the standard streams what the commands count on, whatever the locale or the caller."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the program that started this one
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text that the terminal cannot show is no failure
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):  # prompts are UTF-8 wherever they come from
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _complain(message: str) -> int:
    print("hybridspec: error:", visible(" ".join(message.split())), file=sys.stderr)
    return _EXIT_USAGE
