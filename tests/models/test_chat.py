"""Prompts from chat templates equal those of transformers; what does not do says why."""

from __future__ import annotations

import enum
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.ascii_tokenizer import write_ascii_tokenizer
from helpers.chat_templates import CHATML, PLAIN, STRICT, TOOLS, add_chat_files
from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.chat import ChatTemplates, is_conversation

QUESTION = {"role": "user", "content": "What is <b>2 + 2</b>?"}
SYSTEM = {"role": "system", "content": "Be brief, s'il vous plaît."}
ANSWER = {"role": "assistant", "content": "  Four. \n"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": " I need the sum.\n",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2, "ü"]}}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ],
}
TOOL = {"role": "tool", "content": "4"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "x"}],
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add <numbers> & 'more'",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}

# What templates get in place of these, since few of them take both forms.
WITH_OBJECTS = {
    **CALL,
    "tool_calls": [
        CALL["tool_calls"][0],
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
    ],
}
JOINED = {"role": "user", "content": "Twox"}

CONVERSATIONS = {
    "question": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "history": [SYSTEM, QUESTION, ANSWER, QUESTION],
    "answered": [QUESTION, ANSWER],
    "tools used": [QUESTION, CALL, TOOL, TOOL],
    "tools answered": [SYSTEM, QUESTION, CALL, TOOL, ANSWER, QUESTION],
    "parts": [PARTS],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers with special tokens, whose template is given in each call."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_ascii_tokenizer(folder)
    add_chat_files(folder, PLAIN)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def templates(tokenizer: PreTrainedTokenizerBase) -> ChatTemplates:
    return ChatTemplates.from_folder(tokenizer.name_or_path)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "extra",
    [{}, {"tools": [ADD, ADD]}, {"enable_thinking": False}, {"documents": [{"title": "t"}]}],
    ids=lambda extra: next(iter(extra), "none"),
)
@pytest.mark.parametrize("template", [PLAIN, CHATML, STRICT, TOOLS])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_equal_to_transformers(
    tokenizer: PreTrainedTokenizerBase,
    templates: ChatTemplates,
    conversation: str,
    template: str,
    extra: dict[str, Any],
    add_generation_prompt: bool,
) -> None:
    """The same text, or both refuse."""
    messages = CONVERSATIONS[conversation]
    theirs = [{id(CALL): WITH_OBJECTS, id(PARTS): JOINED}.get(id(m), m) for m in messages]
    options = {"chat_template": template, "add_generation_prompt": add_generation_prompt, **extra}
    before = json.dumps(messages)
    try:
        expected = tokenizer.apply_chat_template(theirs, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(ValueError, match="^messages: the chat template fails on them: ") as own:
            templates.render(messages, **options)
        assert str(error) in str(own.value)
    else:
        assert templates.render(messages, **options) == expected
        if conversation == "parts" and template == CHATML:  # it joins them itself
            assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected
    assert json.dumps(messages) == before


def test_both_kinds_of_outcome_occur(templates: ChatTemplates) -> None:
    """Teeth: the table above holds texts with everything in them, and refusals."""
    text = templates.render(CONVERSATIONS["tools used"], tools=[ADD], chat_template=CHATML)
    for part in ("Functions:", "<think>\nI need", '"b": [\n', "ü", "<numbers> & 'more'", "</call>"):
        assert part in text
    with pytest.raises(ValueError, match="Roles must take turns, found user"):
        templates.render([QUESTION, QUESTION], chat_template=STRICT)


@pytest.mark.parametrize("content", ["  Four. \n", "Four", PARTS["content"]], ids=str)
@pytest.mark.parametrize("template", [PLAIN, CHATML, STRICT])
def test_going_on_with_the_last_message(
    tokenizer: PreTrainedTokenizerBase, templates: ChatTemplates, template: str, content: Any
) -> None:
    options = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": CHATML if isinstance(content, list) else template,
    }
    messages = [QUESTION, {"role": "assistant", "content": content}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert templates.render(messages, **options) == expected
    assert not expected.endswith(("<|end|>", "<|im_end|>\n"))


def test_tokens_are_those_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    from hybridspec.models import load_tokenizer

    own = load_tokenizer(tokenizer.name_or_path)
    text = ChatTemplates.from_folder(tokenizer.name_or_path).render([QUESTION, ANSWER])
    expected = tokenizer.apply_chat_template(
        [QUESTION, ANSWER], add_generation_prompt=True, return_dict=False
    )
    assert own.encode(text, add_special_tokens=False) == expected
    assert 96 in expected  # the end token, written out by the template


def test_where_templates_are_found(tmp_path: Path) -> None:
    def answer(**options: Any) -> str:
        return ChatTemplates.from_folder(tmp_path).render([QUESTION], **options)

    with pytest.raises(ValueError, match="^chat_template: .* has no chat template; give"):
        answer()
    add_chat_files(tmp_path, "field")
    assert answer() == "field"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    add_chat_files(tmp_path, named)
    assert (answer(), answer(tools=[ADD]), answer(tools=[])) == ("one", "two", "one")
    assert answer(chat_template="tool_use") == "two"
    assert answer(chat_template="tool_use {{ eos_token }}") == "tool_use <|end|>"
    add_chat_files(tmp_path, named[1:])
    with pytest.raises(ValueError, match="no default template .it has tool_use."):
        answer()
    add_chat_files(tmp_path, "file", is_file=True)
    assert answer() == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (answer(), answer(tools=[ADD])) == ("file", "more")


def test_special_tokens_of_older_folders(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    found = ChatTemplates.from_folder(tmp_path)
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
    assert found.render([QUESTION], chat_template=template) == "<s></s>"
    add_chat_files(tmp_path, PLAIN)
    assert ChatTemplates.from_folder(tmp_path).variables["eos_token"] == "<|end|>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: expected a text or a"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template: expected"),
        ("special_tokens_map.json", "{", "special_tokens_map.json: not readable"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: not readable as UTF-8"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1: Expected an expression"),
        ("chat_template.jinja", "\n{% nonsense %}", "chat template, line 2: .*nonsense"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplates.from_folder(tmp_path).render([QUESTION])


LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP
DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]


class Mood(enum.Enum):
    GOOD = 1


@pytest.mark.parametrize(
    ("messages", "options", "error", "message"),
    [
        ([], {}, ValueError, "^messages: expected at least one message"),
        ("hello", {}, TypeError, "^messages: expected a list of dicts, got str"),
        (QUESTION, {}, TypeError, "^messages: expected a list of dicts, got dict"),
        ([["user", "x"]], {}, TypeError, "^messages: expected dicts, got list"),
        ([{"content": "x"}], {}, ValueError, "^messages: expected a role in each, got None"),
        ([{"role": "user", "content": Mood.GOOD}], {}, TypeError, "^messages: .* got Mood"),
        ([QUESTION], {"add_generation_prompt": 1}, TypeError, "^add_generation_prompt: "),
        ([QUESTION], {"mood": {1: 2}}, TypeError, "^mood: expected texts as keys, got 1"),
        ([QUESTION], {"mood": LOOP}, ValueError, "^mood: expected at most 100 values inside each"),
        ([{"role": DEEP}], {}, ValueError, "^messages: expected a role in each, got .* too large"),
        ([QUESTION], {"tools": 5}, TypeError, "^tools: expected a list of dicts, got int"),
        ([QUESTION], {"tools": [len]}, TypeError, "^tools: expected .* got builtin_function"),
        ([QUESTION], {"mood": Mood.GOOD}, TypeError, "^mood: expected .* got Mood"),
        ([QUESTION], {"chat_template": 3}, TypeError, "^chat_template: expected a text, got int"),
        ([QUESTION], {"chat_template": "{{ 1 +"}, ValueError, "^chat_template: not valid Jinja"),
        ([QUESTION], {"chat_template": "{{ x.y.z }}"}, ValueError, "'x' is undefined"),
        ([QUESTION], {"chat_template": "{{ 1 + 'a' }}"}, ValueError, "unsupported operand"),
        (
            [QUESTION],
            {"continue_final_message": True},
            ValueError,
            "^continue_final_message: expected False with add_generation_prompt",
        ),
        (
            [{"role": "assistant"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            ValueError,
            "^continue_final_message: expected text in the last message",
        ),
        (
            [ANSWER],
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "chat_template": "{{ messages[0].role }}",
            },
            ValueError,
            "^continue_final_message: the chat template does not show",
        ),
    ],
)
def test_what_cannot_be_rendered(
    messages: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ChatTemplates({"default": PLAIN}, {}, "here").render(messages, **options)


def test_pictures_are_refused() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedError, match="^messages: content of type 'image_url'"):
        ChatTemplates({"default": PLAIN}, {}, "").render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        ({"content": [3]}, UnsupportedError, "content of type 'int', only text"),
        ({"content": [{"text": "x"}]}, UnsupportedError, "content of type None, only text"),
        ({"content": [{"type": "text"}]}, TypeError, "expected a text in each part, got NoneType"),
        ({"tool_calls": 3}, TypeError, "expected a list of tool_calls, got int"),
        ({"tool_calls": [{"function": {"arguments": "{"}}]}, ValueError, "a JSON object, got '{'"),
        ({"tool_calls": [{"function": {"arguments": "3"}}]}, ValueError, "a JSON object, got '3'"),
        ({"tool_calls": [{"arguments": "[" * 9999}]}, ValueError, "a JSON object, got '"),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^messages: .*{re.escape(text)}"):
        ChatTemplates({"default": PLAIN}, {}, "").render([{"role": "assistant", **message}])


def test_arguments_of_tool_calls_are_objects() -> None:
    template = (
        "{% for call in messages[0].tool_calls %}{% set f = call.function or call %}"
        "{{ f.name }}{% for key, value in f.arguments|items %} {{ key }}={{ value }}{% endfor %};"
        "{% endfor %}"
    )
    calls = [
        {"function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": {"b": 2}}},
        {"name": "h", "arguments": '{"c": "x"}'},
        {"function": {"name": "i", "arguments": ""}},
    ]
    messages = [{"role": "assistant", "tool_calls": calls}]
    rendered = ChatTemplates({}, {}, "").render(messages, chat_template=template)
    assert rendered == "f a=1;g b=2;h c=x;i;"


def test_both_ways_to_name_variables() -> None:
    templates = ChatTemplates({"default": "{{ a }}{{ b }}"}, {}, "")
    assert templates.render([QUESTION], chat_template_kwargs={"a": 1}, b=2) == "12"
    assert templates.render([QUESTION], chat_template_kwargs=None, a=3) == "3"
    for kwargs, said in (
        ({"a": 1}, "'a' is given twice"),
        ({"tools": []}, "'tools' is an argument of its own"),
    ):
        with pytest.raises(ValueError, match=f"^chat_template_kwargs: {said}"):
            templates.render([QUESTION], chat_template_kwargs=kwargs, a=2)
    with pytest.raises(TypeError, match="^chat_template_kwargs: expected a dict, got list"):
        templates.render([QUESTION], chat_template_kwargs=[1])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(3) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match="unsafe|undefined|immutable|not safely callable"):
        ChatTemplates({}, {}, "").render([QUESTION], chat_template=template)


def test_one_or_many_conversations() -> None:
    assert is_conversation([QUESTION])
    assert is_conversation([])
    assert not is_conversation([[QUESTION], [QUESTION]])
    assert not is_conversation(([QUESTION],))
