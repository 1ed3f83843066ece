"""What the official OpenAI client sees of a running server."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers.serving import Running
from hybridspec import LLM, SamplingParams

PROMPT = "import os\n"
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 20}
MESSAGES = [{"role": "user", "content": "def main"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "now")
]


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM("bundled", device="cpu")


def expected(offline: LLM, prompt: Any = PROMPT, **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})
    given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    return offline.generate(given, params)[0].outputs


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("small", "hybridspec")
    assert client.models.retrieve("small") == model
    with pytest.raises(openai.NotFoundError, match="expected 'small', got 'other'"):
        client.models.retrieve("other")


def test_a_completion(client: openai.OpenAI, offline: LLM) -> None:
    [output] = expected(offline)
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (output.text, "length")
    usage = answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts == (len(PROMPT) + 1, 20, len(PROMPT) + 21)
    short = client.completions.create(model="small", prompt=PROMPT, temperature=0)
    assert short.usage.completion_tokens == 16


def test_a_streamed_completion(client: openai.OpenAI, offline: LLM) -> None:
    [output] = expected(offline)
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
    )
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == output.text
    assert [chunk.choices[0].finish_reason for chunk in pieces][-1] == "length"
    assert last.choices == [] and last.usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1
    bare = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert all(chunk.choices and chunk.usage is None for chunk in bare)


def test_forms_of_prompts(client: openai.OpenAI, offline: LLM) -> None:
    tokens = offline.tokenizer.encode(PROMPT)
    right = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    for prompt in ([PROMPT], tokens, [tokens]):
        assert client.completions.create(prompt=prompt, **GREEDY).choices[0].text == right
    many = client.completions.create(prompt=["def f", "class A"], n=2, **GREEDY).choices
    assert [choice.index for choice in many] == [0, 1, 2, 3]
    assert many[0].text == many[1].text != many[2].text == many[3].text


def test_stops(client: openai.OpenAI, offline: LLM) -> None:
    text = expected(offline)[0].text
    stop = text[6:9]
    for options in ({}, {"include_stop_str_in_output": True}):
        wanted = text[: text.index(stop)] + (stop if options else "")
        for stream in (False, True):
            answer = client.completions.create(
                prompt=PROMPT, stop=[stop], extra_body=options, stream=stream, **GREEDY
            )
            choices = [one.choices[0] for one in answer] if stream else answer.choices
            assert "".join(choice.text for choice in choices) == wanted
            assert choices[-1].finish_reason == "stop"
            assert choices[-1].stop_reason == stop


def test_seeds_and_several_choices(client: openai.OpenAI, offline: LLM) -> None:
    sampled = {"model": "small", "prompt": PROMPT, "max_tokens": 20, "temperature": 1.0}
    whole = client.completions.create(seed=5, n=3, **sampled)
    right = [one.text for one in expected(offline, temperature=1.0, seed=5, n=3)]
    assert [choice.text for choice in whole.choices] == right
    texts = ["", "", ""]
    for chunk in client.completions.create(seed=5, n=3, stream=True, **sampled):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == right
    other = client.completions.create(seed=6, **sampled)
    assert other.choices[0].text != right[0]


def test_log_probabilities_and_echo(client: openai.OpenAI, offline: LLM) -> None:
    [output] = expected(offline, logprobs=2)
    choice = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    for token, report, value in zip(
        output.token_ids, output.logprobs, found.token_logprobs, strict=True
    ):
        assert value == pytest.approx(report[token].logprob, abs=1e-4)
    assert all(len(top) >= 2 for top in found.top_logprobs)
    answer = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (0, len(PROMPT) + 1)
    scored = answer.choices[0]
    assert scored.text == PROMPT
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.token_logprobs) == len(PROMPT) + 1
    assert max(scored.logprobs.token_logprobs[1:]) <= 0
    streamed = list(
        client.completions.create(prompt=PROMPT, echo=True, logprobs=1, stream=True, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT + output.text


def test_a_chat(client: openai.OpenAI, offline: LLM, running: Running) -> None:
    """The template opens reasoning, and the model never ends it."""
    prompt = running.llm.chat_prompt(MESSAGES)
    [output] = expected(offline, offline.tokenizer.encode(prompt, add_special_tokens=False))
    message = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message
    assert message.reasoning == output.text.lstrip("\n")
    assert (message.role, message.content) == ("assistant", "")
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    prompt = running.llm.chat_prompt(MESSAGES, enable_thinking=False)
    [output] = expected(offline, offline.tokenizer.encode(prompt, add_special_tokens=False))
    answer = client.chat.completions.create(messages=MESSAGES, extra_body=plain, **GREEDY)
    assert answer.choices[0].message.content == output.text
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, extra_body=plain, stream=True, **GREEDY)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == output.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    options = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(messages=MESSAGES, **options).choices[0].logprobs
    assert len(whole.content) == 20
    for entry in whole.content:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]
    with pytest.raises(openai.BadRequestError, match="top_logprobs: expected logprobs with it"):
        client.chat.completions.create(messages=MESSAGES, top_logprobs=3, **GREEDY)


def test_a_forced_call(client: openai.OpenAI) -> None:
    """The model knows nothing of tools, so its arguments are noise; the form is ours."""
    call = {"type": "function", "function": {"name": "now"}}
    options = {**GREEDY, "tools": TOOLS, "tool_choice": call, "stop": "\n"}
    message = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    [made] = message.tool_calls
    assert (made.type, made.function.name) == ("function", "now")
    assert message.content is None
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
    calls = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.id] == ["now"]
    assert "".join(call.function.arguments for call in calls) == made.function.arguments


def test_a_conversation_with_calls(client: openai.OpenAI) -> None:
    """Arguments come as JSON text, as the interface has them."""
    call = {"id": "1", "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"a": 1})}}  # fmt: skip
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    answer = client.chat.completions.create(messages=messages, tools=TOOLS, **GREEDY)
    assert answer.usage.completion_tokens == 20


def test_what_was_drafted_is_told_where_asked(client: openai.OpenAI, offline: LLM) -> None:
    [output] = expected(offline)
    asked = {"return_speculation": True}
    whole = client.completions.create(prompt=PROMPT, extra_body=asked, **GREEDY)
    counts = whole.usage.speculation
    assert counts["committed_tokens"] == 19
    assert 0 < counts["accepted_tokens"] <= counts["drafted_tokens"]
    chunks = client.completions.create(prompt=PROMPT, stream=True, extra_body=asked, **GREEDY)
    marked = [one for chunk in chunks for one in chunk.choices[0].speculation["pieces"]]
    assert "".join(text for text, _ in marked) == output.text
    assert sum(origin == "accepted" for _, origin in marked) == counts["accepted_tokens"]


def test_tokens_of_texts(client: openai.OpenAI, offline: LLM, running: Running) -> None:
    body = {"prompt": PROMPT, "return_token_strs": True}
    answer = client.post("/../tokenize", body=body, cast_to=object)
    assert answer["tokens"] == offline.tokenizer.encode(PROMPT)
    assert answer["count"] == len(answer["tokens"]) and "".join(answer["token_strs"][1:]) == PROMPT
    body = {"tokens": answer["tokens"]}
    assert client.post("/../detokenize", body=body, cast_to=object) == {
        "prompt": "<|file|>" + PROMPT
    }
    chat = client.post("/../tokenize", body={"messages": MESSAGES}, cast_to=object)
    prompt = running.llm.chat_prompt(MESSAGES)
    assert chat["tokens"] == offline.tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize("seed", range(25))
def test_random_options_equal_the_offline_answer(
    client: openai.OpenAI, offline: LLM, seed: int
) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.3]),
        "seed": rng.randrange(2**62),
        "max_tokens": rng.randrange(1, 40),
        "n": rng.choice([1, 1, 3]),
        "stop": rng.choice([None, ["\n"], ["e", "self"], ["é"]]),
        "frequency_penalty": rng.choice([0, 0.5]),
        "presence_penalty": rng.choice([0, 1.5]),
    }
    ours: dict[str, Any] = {
        "top_k": rng.choice([-1, 0, 5]),
        "top_p": rng.choice([1, 0.8]),
        "min_p": rng.choice([0, 0.05]),
        "repetition_penalty": rng.choice([1, 1.2]),
        "draft_tokens": rng.choice([None, 0, 1, 3]),
        "min_tokens": rng.choice([0, 1]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "allowed_token_ids": rng.choice([None, list(range(32, 127))]),
    }
    prompt = rng.choice([PROMPT, "class A:\n", "é"])
    outputs = expected(offline, prompt, **options, **ours)
    right = [(one.text, one.finish_reason, one.stop_reason) for one in outputs]
    answer = client.completions.create(model="small", prompt=prompt, extra_body=ours, **options)
    found = [(one.text, one.finish_reason, one.stop_reason) for one in answer.choices]
    assert found == right
    texts = [""] * options["n"]
    chunks = client.completions.create(
        model="small", prompt=prompt, extra_body=ours, stream=True, **options
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [text for text, _, _ in right]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature: expected a number in"),
        ({"n": 17}, "n: expected at most 16, got 17"),
        ({"n": 9, "prompt": ["a"] * 9}, "n: expected at most 80 continuations, got 81"),
        ({"logprobs": 21}, "logprobs: expected at most 20, got 21"),
        ({"logprobs": -1}, "logprobs: expected 0 or more, got -1"),
        ({"logit_bias": {"x": 1}}, "logit_bias: expected token ids"),
        ({"logit_bias": {"5000": 1}}, "logit_bias: expected ids below"),
        ({"max_tokens": 0}, "max_tokens: expected an integer at least 1"),
        ({"prompt": "a" * 5000}, "prompt: expected fewer tokens than the context of 4096"),
        ({"prompt": "a" * 300_000}, "prompt: expected at most"),
        ({"prompt": []}, "prompt: expected 1 to 64 prompts"),
        ({"prompt": [1, 300]}, "prompt_token_ids: expected ids in"),
        ({"stop": ["a"] * 33}, "stop: expected at most 32 entries"),
        ({"stop": "a" * 1025}, "stop: expected at most 1024 characters each"),
        ({"stop": ["a", "b" * 1025]}, "stop: expected at most 1024 characters each"),
        ({"logit_bias": {str(i): 1 for i in range(9000)}}, "logit_bias: expected at most 8192"),
        (
            {"extra_body": {"allowed_token_ids": [1] * 300_000}},
            "allowed_token_ids: expected at most 262144 entries",
        ),
        ({"suffix": "x"}, "suffix: not supported"),
        ({"best_of": 2}, "best_of: not supported"),
        ({"extra_body": {"structured_outputs": {"json": {}}}}, "structured_outputs: not supported"),
        ({"extra_body": {"draft_tokens": 7}}, "draft_tokens: expected at most the engine's 3"),
        ({"extra_body": {"top_k": "many"}}, "top_k: "),
    ],
)
def test_refused_completions(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"prompt": PROMPT, **GREEDY, **options})
    assert refused.value.body["message"].startswith(message)
    assert refused.value.body["type"] == "invalid_request_error"
    assert refused.value.body["param"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "x"}]}, "messages: expected a role"),
        (
            {"messages": [{"role": "user", "content": "a" * 300_000}]},
            "prompt: expected at most 262144 characters",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"tool_choice": "required"}, "tool_choice: expected tools with it"),
        ({"tools": [{"type": "function"}]}, "tools: expected functions with a name"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected at most 20, got 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: expected 0 or more, got -1"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template: templates of requests"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs: tools"),
    ],
)
def test_refused_chats(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **options})
    assert refused.value.body["message"].startswith(message)


def test_fields_that_change_nothing_are_taken(
    client: openai.OpenAI, offline: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    silent = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me",
              "parallel_tool_calls": True, "prompt_cache_key": "k"}  # fmt: skip
    client.chat.completions.create(messages=MESSAGES, **silent, **GREEDY)
    assert not caplog.records
    for _ in range(2):
        client.completions.create(prompt=PROMPT, extra_body={"new_field_1": 3}, **GREEDY)
    assert [record.getMessage() for record in caplog.records] == [
        "requests have an unknown field 'new_field_1', which is ignored"
    ]


def test_the_example_of_the_guide(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    block = block.replace("http://127.0.0.1:8000", running.url)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/serving.md", "exec"), names)
    names["client"].close()
    assert len(capsys.readouterr().out) > 60
