"""The process in which chat templates run: it reads jobs and writes answers, a line each.

Templates are programs that come with a checkpoint, or from a caller. One that never ends or eats
memory does so here and not in the engine's process; the parent ends what takes too long. Run by
path, so that it starts without the package.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_MAX_MESSAGE = 500  # characters


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _environment() -> jinja2.Environment:
    """Return an environment like that of transformers."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks an assistant's words for training; renders its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def _message(error: Exception) -> str:
    text = str(getattr(error, "message", None) or error) or type(error).__name__
    line = getattr(error, "lineno", None)
    is_in_template = line is not None and hasattr(error, "message")
    return (f"line {line}: {text}" if is_in_template else text)[:_MAX_MESSAGE]


def _answer(job: dict[str, Any], max_characters: int) -> dict[str, str]:
    """Carry out one job: {"template", "variables"} to {"text"}, {"syntax"} or {"failure"}."""
    try:
        template = _compiled(job["template"])
    except MemoryError:
        raise
    except Exception as error:  # Jinja's own, and Python's about the code that Jinja makes
        return {"syntax": _message(error)}
    try:
        text = template.render(job["variables"])
    except MemoryError:
        raise
    except Exception as error:  # whatever a foreign program fails with
        return {"failure": str(error)[:_MAX_MESSAGE] or type(error).__name__}
    if len(text) > max_characters:
        return {"failure": f"it makes more than {max_characters} characters"}
    return {"text": text}


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _run() -> None:
    """Answer jobs until the input ends."""
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = settings["path"]
    _environment()
    _limit_memory(settings["max_bytes"])
    out = sys.stdout.buffer
    for line in iter(sys.stdin.buffer.readline, b""):
        try:
            answer = json.dumps(_answer(json.loads(line), settings["max_characters"]))
        except MemoryError:
            failure = f"it takes more than {settings['max_bytes'] >> 20} MiB"
            answer = json.dumps({"failure": failure, "spent": ""})  # the heap is in pieces
        out.write(answer.encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    _run()
