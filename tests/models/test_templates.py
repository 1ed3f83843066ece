"""Templates that would run for ever, eat memory or break the compiler end in one line."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from hybridspec.models import templates as templates_module
from hybridspec.models.chat import ChatTemplates
from hybridspec.models.templates import TemplateError, TemplateFailure, run_template

QUESTION = {"role": "user", "content": "Hello"}
DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}"
)

# What Jinja or Python refuses when the template is compiled.
INVALID = {
    "break outside a loop": "{% break %}",
    "continue outside a loop": "{% if x %}{% continue %}{% endif %}",
    "keyword given twice": "{{ dict(a=1, a=2) }}",
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "ifs": "{% if x %}" * 500 + "{% endif %}" * 500,
    "loops": "{% for a in x %}" * 30 + "{% endfor %}" * 30,
    "nots": "{{ " + "not " * 5000 + "1 }}",
    "unary": "{{ " + "-" * 5000 + "1 }}",
    "unknown filter": "{{ 1 | nonsense }}",
    "unknown test": "{{ 1 is nonsense }}",
    "unknown tag": "{% nonsense %}",
    "unclosed": "{% for a in x %}",
    "unclosed text": "{{ 'abc }}",
    "import": "{% import 3 + %}",
    "generation without end": "{% generation %}",
    "block twice": "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    "assigning to a call": "{% set f() = 3 %}",
    "a number of many digits": "{{ 10 ** 10000 }}",
    "surrogate": "{% \ud800 %}",
    "zero byte": "{% \0 %}",
    "else twice": "{% if a %}{% else %}{% else %}{% endif %}",
    "a loop over nothing": "{% for %}{% endfor %}",
    "a filter without a name": "{{ 1 | }}",
}
# What fails when it runs, and what it says.
FAILING = {
    "include": ("{% include 'x' %}", "no loader"),
    "extends": ("{% extends 'x' %}", "no loader"),
    "import of a file": ("{% import 'x' as y %}", "no loader"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a long text": ("{{ 'a' * 3000000000 }}", "more than"),
    "a long list": ("{{ ([0] * 1000000000)|length }}", "more than"),
    "center": ("{{ 'a'|center(3000000000) }}", "more than"),
    "a method": ("{{ 'a'.ljust(3000000000) }}", "more than"),
    "a wide format": ("{{ '%3000000000d' % 1 }}", ""),
    "a wide format filter": ("{{ '%3000000000s'|format('x') }}", ""),
    "a wide format method": ("{{ '{:>3000000000}'.format(1) }}", ""),
    "indent": ("{{ 'a\nb'|indent(2000000000) }}", "more than"),
    "replace": ("{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "more than"),
    "join": ("{{ ('a' * 1000000)|join('b' * 1000000) }}", "more than"),
    "expandtabs": ("{{ ('\t' * 100000).expandtabs(1000000) }}", "more than"),
    "json": ("{{ [[[1]]]|tojson(indent=2000000000) }}", "more than"),
    "doubling": (DOUBLING.replace("BODY", "ns.x ~ ns.x"), "more than"),
    "adding": (DOUBLING.replace("BODY", "ns.x + ns.x"), "more than"),
    "a range": ("{{ range(10 ** 12)|list }}", "Range too big"),
    "a prompt": ("{% for i in range(40) %}{{ 'a' * 1000000 }}{% endfor %}", "more than 16777216"),
    "a division": ("{{ 1 // 0 }}", "zero"),
    "a remainder": ("{{ 1 % 0 }}", "zero"),
    "a sum of kinds": ("{{ 1 + 'a' }}", ""),
    "undefined": ("{{ x.y }}", "undefined"),
    "attributes": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "changes": ("{{ messages.append(3) }}", "unsafe"),
    "escapes": ("{{ raise_exception('\x1b[31m\x07\n') }}", re.escape(r"\x1b[31m\x07\n")),
    "a long complaint": ("{{ raise_exception('a' * 1000000) }}", "a{500}$"),
    "no complaint": ("{{ raise_exception('') }}", "TemplateError"),
    "a date": ("{{ strftime_now(3) }}", "str"),
    "tokens": ("{{ 1 + 'a' }}", "unsupported operand"),
}
# What would run for ever.
ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "lists in loops": "{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}",
    "lists of lists": DOUBLING.replace("BODY", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a slice": "{{ []|slice(10 ** 9)|list|length }}",
    "a power": "{{ (7 ** 99999999) is odd }}",
    "growing numbers": DOUBLING.replace("'ab'", "3").replace("BODY", "ns.x * ns.x"),
    "comparing lists": (
        DOUBLING.replace("BODY", "[ns.x, ns.x]")
        + DOUBLING.replace("ns", "m").replace("BODY", "[m.x, m.x]")
        + "{{ ns.x == m.x }}"
    ),
    "lorem": "{% for i in range(99999) %}{{ lipsum(n=99)|length }}{% endfor %}",
}


def render(template: str) -> str:
    return ChatTemplates({}, {}, "").render([QUESTION], chat_template=template)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_templates(name: str) -> None:
    with pytest.raises(ValueError, match="^chat_template: not valid Jinja, ") as error:
        render(INVALID[name])
    assert_one_line(error.value)


@pytest.mark.parametrize("name", FAILING)
def test_failing_templates(name: str) -> None:
    template, said = FAILING[name]
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"^messages: .* fails on them: .*{said}") as error:
        render(template)
    assert_one_line(error.value)
    assert time.monotonic() - start < templates_module.MAX_SECONDS + 5
    assert render("{{ messages[0].content }}") == "Hello"


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    render("start the process")
    monkeypatch.setattr(templates_module, "MAX_SECONDS", 0.5)
    with pytest.raises(ValueError, match="fails on them: it takes (longer than 0.5 s|more than)"):
        render(ENDLESS[name])
    monkeypatch.undo()
    assert render("{{ messages[0].content }}") == "Hello"


def assert_one_line(error: BaseException) -> None:
    assert str(error).isprintable() and len(str(error)) < 700


def test_values_keep_their_types() -> None:
    text = "é\ud800\u2028\n"
    values: dict[str, Any] = {"a": [1, 2.5, None, True, {"b": text}], "c": float("inf")}
    rendered = run_template("{{ a }}|{{ c + 1 }}|{{ a[4].b }}|{{ d is defined }}", values)
    assert rendered == f"{values['a']}|inf|{text}|False"


def test_variables_that_are_no_json() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateFailure, match="recursion"):
        run_template("", {"deep": deep})
    with pytest.raises(TemplateFailure, match="digits"):
        run_template("", {"number": 10**5000})


def test_an_interruption_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: Any, job: str) -> dict[str, str]:
        templates_module._write(process, job)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(templates_module, "_ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_template("one", {})
    assert run_template("two", {}) == "two"


def test_a_process_that_dies_is_started_again() -> None:
    run_template("one", {})
    process = templates_module._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert run_template("two", {}) == "two"


def test_threads_get_their_own_answers() -> None:
    found = {}

    def ask(number: int) -> None:
        found[number] = [run_template("{{ n }}-{{ i }}", {"n": number, "i": i}) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [f"{n}-{i}" for i in range(20)] for n in range(4)}


def test_a_forked_child_has_a_process_of_its_own() -> None:
    code = (
        "import os\n"
        "from hybridspec.models.templates import run_template\n"
        "run_template('x', {})\n"
        "child = os.fork()\n"
        "for i in range(50):\n"
        "    expected = f'{child == 0}{i}'\n"
        "    assert run_template('{{ text }}', {'text': expected}) == expected\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_errors_say_which_kind() -> None:
    with pytest.raises(TemplateError, match="^line 2: "):
        run_template("\n{% if %}", {})
    with pytest.raises(TemplateFailure, match="undefined"):
        run_template("{{ x.y }}", {})
