"""Runs chat templates in a process of their own, which ends with the one that takes too long."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["MAX_CHARACTERS", "MAX_SECONDS", "TemplateError", "TemplateFailure", "run_template"]

MAX_SECONDS = 10.0  # of a template, compiling it included
MAX_CHARACTERS = 1 << 24  # of a prompt
_MAX_BYTES = 1 << 30  # of the process
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(ValueError):
    """A template that is not valid Jinja."""


class TemplateFailure(ValueError):  # noqa: N818
    """A template that fails on its variables, or takes too much."""


def run_template(template: str, variables: dict[str, Any]) -> str:
    """Render a template.

    Args:
        template: text of a Jinja template.
        variables: what it sees; values of JSON's types.

    Raises:
        TemplateError: if it is not valid Jinja.
        TemplateFailure: if it fails, takes longer than MAX_SECONDS or too much memory, or makes
            more than MAX_CHARACTERS.
    """
    try:
        job = json.dumps({"template": template, "variables": variables})
    except (ValueError, RecursionError) as error:
        raise TemplateFailure(str(error)) from None
    answer = _process.answer(job)
    if "syntax" in answer:
        raise TemplateError(answer["syntax"])
    if "failure" in answer:
        raise TemplateFailure(answer["failure"])
    return answer["text"]


class _TemplateProcess:
    """One process for all templates, started when first needed and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: list[Any] = []

    def answer(self, job: str) -> dict[str, str]:
        """Have a job carried out, one at a time."""
        with self._lock:
            process = self._running()
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                process.kill()

            timer = threading.Timer(MAX_SECONDS, end)
            timer.daemon = True
            timer.start()
            answer: dict[str, str] = {}
            try:
                with contextlib.suppress(BrokenPipeError):
                    answer = _ask(process, job)
            finally:  # an interruption leaves an answer behind that nobody may take for the next
                timer.cancel()
                if not answer or "spent" in answer:
                    self.stop()
        if answer:
            return answer
        if is_late.is_set():
            return {"failure": f"it takes longer than {MAX_SECONDS:g} seconds"}
        return {"failure": "the process that runs it died of it"}

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
            pass

    def forget(self) -> None:
        """Leave the process to the parent that this one was forked from."""
        self._lock = threading.Lock()
        self._inherited.append(self._process)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        if importlib.util.find_spec("jinja2") is None:
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        settings = {
            "path": sys.path,
            "max_bytes": _MAX_BYTES,
            "max_characters": MAX_CHARACTERS,
        }
        _write(self._process, json.dumps(settings))
        return self._process


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def _ask(process: subprocess.Popen[bytes], job: str) -> dict[str, str]:
    """Return the answer to a job, an empty one if the process ended before."""
    _write(process, job)
    assert process.stdout is not None
    line = process.stdout.readline()
    answer: dict[str, str] = json.loads(line) if line.endswith(b"\n") else {}
    return answer


_process = _TemplateProcess()
atexit.register(_process.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
