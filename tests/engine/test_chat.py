"""`LLM.chat`: a conversation goes through the template and comes back as an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.ascii_tokenizer import END, write_ascii_tokenizer
from helpers.chat_templates import PLAIN, add_chat_files
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, CheckpointError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("chat")
    build_tiny_checkpoint(folder, eos_token_id=END, seed=2)
    write_ascii_tokenizer(folder)
    add_chat_files(folder, PLAIN)
    return LLM(folder, device="cpu")


def test_an_answer_is_that_to_the_rendered_prompt(llm: LLM) -> None:
    prompt = "user: Hello<|end|>\nassistant:"
    [result] = llm.chat(MESSAGES, GREEDY)
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    [expected] = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)
    assert result.prompt == llm.chat_prompt(MESSAGES) == prompt
    assert result.prompt_token_ids == ids
    assert END in ids
    assert result.outputs[0] == expected.outputs[0]


def test_many_conversations(llm: LLM) -> None:
    others = [{"role": "user", "content": "Bye"}]
    results = llm.chat([MESSAGES, others], [GREEDY, SamplingParams(temperature=0, max_tokens=2)])
    assert [result.prompt for result in results] == [
        llm.chat_prompt(MESSAGES),
        llm.chat_prompt(others),
    ]
    assert [len(result.outputs[0].token_ids) for result in results] == [8, 2]
    assert results[0].outputs == llm.chat(MESSAGES, GREEDY)[0].outputs


def test_template_options(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ mood }}{{ tools[0].name }}{{ add_generation_prompt }}"
    options = {"chat_template": template, "mood": "!", "tools": [{"name": "f"}]}
    [result] = llm.chat(MESSAGES, GREEDY, add_generation_prompt=False, **options)
    assert result.prompt == "Hello!fFalse"
    [result] = llm.chat(
        [*MESSAGES, {"role": "assistant", "content": "Good"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert result.prompt == "user: Hello<|end|>\nassistant: Good"


def test_a_streamed_answer(llm: LLM) -> None:
    steps = list(llm.stream_chat(MESSAGES, GREEDY))
    [whole] = llm.chat(MESSAGES, GREEDY)
    assert "".join(step.text for step in steps) == whole.outputs[0].text
    assert steps[-1].output.outputs == whole.outputs
    with pytest.raises(ValueError, match="^messages: expected at least one"):
        llm.stream_chat([])


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, eos_token_id=END)
    write_ascii_tokenizer(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="^chat_template: .* has no chat template; give"):
        llm.chat(MESSAGES, GREEDY)
    [result] = llm.chat(MESSAGES, GREEDY, chat_template=PLAIN)
    assert result.outputs[0].finish_reason


def test_default_sampling_params(tmp_path: Path) -> None:
    """What generation_config.json recommends is used where the caller names nothing."""
    build_tiny_checkpoint(tmp_path, eos_token_id=None)
    llm = LLM(tmp_path, device="cpu")
    file = tmp_path / "generation_config.json"
    assert llm.default_sampling_params() == SamplingParams()
    for fields, expected in (
        ({"eos_token_id": 3}, SamplingParams()),
        ({"temperature": None, "top_k": 20}, SamplingParams(top_k=20)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.2},
            SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.2),
        ),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.5, "min_p": 0.1},
            SamplingParams(temperature=0, repetition_penalty=1.5, min_p=0.1),
        ),
        (
            {"do_sample": False, "max_new_tokens": 9, "repetition_penalty": 1.5},
            SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.5),
        ),
    ):
        file.write_text(json.dumps(fields), encoding="utf-8")
        assert llm.default_sampling_params() == expected
    [unnamed] = llm.generate(prompt_token_ids=[1, 2, 3])
    [named] = llm.generate(prompt_token_ids=[1, 2, 3], sampling_params=expected)
    assert unnamed.outputs == named.outputs
    assert len(unnamed.outputs[0].token_ids) == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "generation_config.json: not readable as JSON"),
        ("[]", "generation_config.json: expected a JSON object, found list"),
        ('{"temperature": 1e400}', "generation_config.json: temperature: expected a number in"),
        (
            '{"temperature": 1%s}' % ("0" * 400),
            "generation_config.json: temperature: expected a number in",
        ),
        ('{"do_sample": "no"}', "generation_config.json: do_sample: expected a bool, got 'no'"),
        ('{"do_sample": 0}', "generation_config.json: do_sample: expected a bool, got 0"),
        ('{"suppress_tokens": 3}', "generation_config.json: suppress_tokens: expected a list, got"),
        ('{"bad_words_ids": 3, "suppress_tokens": [3]}', "json: bad_words: expected a list, got 3"),
        ('{"bad_words_ids": [3]}', "generation_config.json: bad_words: expected texts or lists"),
        ('{"stop_strings": [3]}', "generation_config.json: stop: expected non-empty strings"),
        ('{"min_new_tokens": "a"}', "generation_config.json: min_tokens: expected an integer"),
        ('{"min_new_tokens": 9, "max_new_tokens": 8}', "json: min_tokens: expected at most max_to"),
        ('{"temperature": "hot"}', "generation_config.json: temperature: expected a number"),
        ('{"top_p": 3}', "generation_config.json: top_p: expected a number in .0, 1."),
    ],
)
def test_broken_defaults(tmp_path: Path, content: str, message: str) -> None:
    from hybridspec.models.generation import sampling_defaults

    (tmp_path / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, None),
        ({"min_new_tokens": 5}, {"min_tokens": 5}),
        ({"min_new_tokens": 500}, {"min_tokens": 500, "max_tokens": 500}),
        ({"stop_strings": "END"}, {"stop": "END"}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"bad_words_ids": [[3, 4]]}, {"bad_words": [[3, 4]]}),
        (
            {"bad_words_ids": [[3, 4]], "suppress_tokens": [5, 6]},
            {"bad_words": [[3, 4], [5], [6]]},
        ),
    ],
    ids=str,
)
def test_fields_that_are_read(
    tmp_path: Path, fields: dict[str, object], expected: dict[str, object] | None
) -> None:
    from hybridspec.models.generation import sampling_defaults

    (tmp_path / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert sampling_defaults(tmp_path) == SamplingParams(**(expected or fields))


def test_fields_that_are_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from hybridspec.models.generation import sampling_defaults

    fields = {"max_length": 20, "num_beams": 4, "no_repeat_ngram_size": 3, "\x1b": 1}
    neutral = {"typical_p": 1.0, "length_penalty": 1.0, "early_stopping": False, "use_cache": True}
    read = {"temperature": 0.5, "suppress_tokens": [3], "transformers_version": "5.0"}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**fields, **neutral, **read}), encoding="utf-8")
    for _ in range(2):
        sampling_defaults(tmp_path)
    names = "\\x1b, max_length, no_repeat_ngram_size, num_beams"
    assert caplog.messages == [f"{file}: not carried out: {names}"]
