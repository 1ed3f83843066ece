"""Where a request ends: END, stop tokens, stop strings, limits, wherever in a step that falls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.ascii_tokenizer import END, text_of, write_ascii_tokenizer
from helpers.drafters import right_script, run, scripted_engine
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, CheckpointError, SamplingParams
from hybridspec.engine.request import Request, RequestGroup
from hybridspec.engine.text import Text
from hybridspec.models.tokenizer import load_tokenizer
from hybridspec.runtime import Allocator, SlotOptions

PROMPT = [ord(c) - 32 for c in "import os"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text is noise of printable characters."""
    path = tmp_path_factory.mktemp("ascii")
    build_tiny_checkpoint(path, eos_token_id=END, seed=2)
    write_ascii_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[int]:
    """The endless continuation of PROMPT: sampled, so that it does not loop."""
    params = sampling(max_tokens=60, ignore_eos=True)
    llm = LLM(folder, draft_tokens=0, device="cpu")
    tokens = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0].outputs[0].token_ids
    assert END not in tokens
    return tokens


def sampling(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 11, "max_tokens": 40, **changes})


def run_right(
    folder: Path, plain: list[int], params: SamplingParams, k: int = 4, late: int = 0
) -> Request:
    """Run PROMPT with drafts that are all right, so that each step brings k + 1 tokens."""
    engine = scripted_engine(folder, {tuple(PROMPT): plain}, right_script, k)
    engine.run_ahead = late
    [request] = run(engine, [PROMPT], [params])
    assert engine.allocator.num_live == 0
    return request


def first_seen_at(tokens: list[int], index: int) -> bool:
    return tokens.index(tokens[index]) == index


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_at_every_place_in_a_step(
    folder: Path, plain: list[int], place: int, late: int
) -> None:
    if not first_seen_at(plain, place):
        place = next(i for i in range(place, len(plain)) if first_seen_at(plain, i))
    request = run_right(folder, plain, sampling(stop_token_ids=[plain[place]]), late=late)
    assert request.token_ids == plain[: place + 1]
    assert request.finish_reason == "stop"
    assert sum(request.stats.committed_per_step) == place  # the first token is the prefill's
    assert request.output().outputs[0].text == text_of(plain[:place])


def test_nothing_after_a_stop_stays_in_the_state(
    folder: Path, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the cut, the cursors cover the prompt and the kept tokens, the newest one excepted."""
    place = next(i for i in range(6, 30) if first_seen_at(plain, i))
    engine = scripted_engine(folder, {tuple(PROMPT): plain}, right_script, 4)
    request = engine.make_request(PROMPT, sampling(stop_token_ids=[plain[place]]))
    engine.submit(request)
    seen = {}
    release = Allocator.release

    def spy(allocator: Allocator, slot: int) -> None:
        seen["seq_len"] = int(engine.pools.seq_len[slot])
        release(allocator, slot)

    monkeypatch.setattr(Allocator, "release", spy)
    while engine.has_work:
        engine.step()
    assert seen["seq_len"] == len(PROMPT) + place


@pytest.mark.parametrize("k", [0, 3, 7])
@pytest.mark.parametrize("start", [1, 2, 5, 9])
def test_a_stop_string_over_token_borders(
    folder: Path, plain: list[int], start: int, k: int
) -> None:
    text = text_of(plain)
    stop = text[start : start + 3]
    start = text.find(stop)
    llm = LLM(folder, draft_tokens=k, device="cpu")
    params = sampling(stop=stop, max_tokens=60)
    [result] = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)
    [output] = result.outputs
    assert output.text == text[:start]
    assert output.finish_reason == "stop"
    assert output.token_ids == plain[: len(output.token_ids)]
    kept = text_of(output.token_ids)
    assert stop in kept and stop not in kept[:-1]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_string_at_every_place_in_a_step(
    folder: Path, plain: list[int], place: int, late: int
) -> None:
    """Drafts are all right, so that the string mostly ends inside accepted drafts."""
    text = text_of(plain)
    stop = text[place - 1 : place + 1]
    start = text.find(stop)
    request = run_right(folder, plain, sampling(stop=[stop, "not in the text"]), late=late)
    assert request.token_ids == plain[: start + 2]
    assert request.finish_reason == "stop"
    assert sum(request.stats.committed_per_step) == start + 1
    assert request.output().outputs[0].text == text[:start]
    assert "".join(step.text for step in request.outbox) == text[:start]
    assert [t for step in request.outbox for t in step.token_ids] == request.token_ids


def test_streamed_text_never_shows_a_stop_string(folder: Path, plain: list[int]) -> None:
    text = text_of(plain)
    stop = text[12:17]
    llm = LLM(folder, draft_tokens=1, device="cpu")
    pieces = [
        output.text
        for output in llm.stream(
            prompt_token_ids=PROMPT, sampling_params=sampling(stop=stop, max_tokens=60)
        )
    ]
    assert "".join(pieces) == text[: text.find(stop)]


@pytest.mark.parametrize("k", [0, 3])
def test_min_tokens(folder: Path, plain: list[int], k: int) -> None:
    """Stop tokens cannot be chosen early, and are chosen as soon as they may be."""
    stop = plain[4]
    params = sampling(stop_token_ids=[stop], min_tokens=8)
    llm = LLM(folder, draft_tokens=k, device="cpu")
    tokens = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0].outputs[0].token_ids
    assert tokens[:4] == plain[:4]
    assert stop not in tokens[:8]
    reference = LLM(folder, draft_tokens=0, device="cpu")
    [expected] = reference.generate(prompt_token_ids=PROMPT, sampling_params=params)
    assert tokens == expected.outputs[0].token_ids


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9])
def test_limits(folder: Path, plain: list[int], limit: int, k: int) -> None:
    llm = LLM(folder, draft_tokens=k, device="cpu")
    [result] = llm.generate(
        prompt_token_ids=PROMPT, sampling_params=sampling(max_tokens=limit, ignore_eos=True)
    )
    assert result.outputs[0].token_ids == plain[:limit]
    assert result.outputs[0].finish_reason == "length"


def test_the_context_is_a_limit(folder: Path, plain: list[int]) -> None:
    llm = LLM(folder, draft_tokens=3, device="cpu", max_model_len=len(PROMPT) + 7)
    params = sampling(max_tokens=None, ignore_eos=True)
    [result] = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)
    assert result.outputs[0].token_ids == plain[:7]
    assert result.outputs[0].finish_reason == "length"


def test_eos_ends_and_can_be_ignored(folder: Path) -> None:
    """A model that always says END."""
    engine = LLM(folder, draft_tokens=3, device="cpu")._engine
    logits = type(engine.model).logits

    def biased(model: object, hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(model, hidden)
        scores[:, END] += 1e6
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.model), "logits", biased)
        kinds = [sampling(), sampling(ignore_eos=True, max_tokens=5), sampling(min_tokens=3)]
        requests = run(engine, [PROMPT] * 3, kinds)
    assert requests[0].token_ids == [END]
    assert requests[0].output().outputs[0].text == ""
    assert requests[1].token_ids == [END] * 5
    assert END not in requests[2].token_ids[:3]
    assert requests[2].token_ids[3:] == [END]
    assert [r.finish_reason for r in requests] == ["stop", "length", "stop"]


def test_text_held_back_is_handed_out_at_the_end(folder: Path) -> None:
    group = RequestGroup(
        request_id=0,
        prompt=None,
        prompt_token_ids=PROMPT,
        params=SamplingParams(stop="</end>"),
        stop_ids=frozenset(),
        limit=6,
    )
    text = Text(load_tokenizer(folder).detokenizer(), ["</end>"])
    request = Request(group=group, options=SlotOptions(), text=text)
    request.take([ord(c) - 32 for c in "ab</"])
    assert text.take() == "ab"
    request.take([ord(c) - 32 for c in "eX"])
    assert request.finish_reason == "length"
    assert text.take() == "</eX"


def test_the_drafter_in_these_tests_is_always_right(folder: Path, plain: list[int]) -> None:
    """Teeth: the steps above really commit several tokens each."""
    request = run_right(folder, plain, sampling(max_tokens=31))
    assert request.stats.committed_per_step == [5] * 6


def test_a_stop_text_that_is_a_special_token(folder: Path, plain: list[int]) -> None:
    """Its text never appears, since special tokens are left out of it."""
    always = {END: 100.0}
    for params in (
        sampling(stop="<|end|>", ignore_eos=True, logit_bias=always),
        sampling(stop=["x", "<|end|>"], ignore_eos=True, logit_bias=always),
    ):
        [result] = LLM(folder, device="cpu").generate(
            prompt_token_ids=PROMPT, sampling_params=params
        )
        assert result.outputs[0].token_ids == [END]
        assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("", "stop")
    unstopped = run_right(folder, plain, sampling(stop="<|end", ignore_eos=True))
    assert unstopped.token_ids == plain[:40]


@pytest.mark.parametrize("has_generation_config", [False, True])
def test_the_tokenizers_end_counts_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_generation_config: bool
) -> None:
    """A fine-tune that names another end in its tokenizer, and nowhere else."""
    build_tiny_checkpoint(tmp_path, eos_token_id=3, seed=2)
    write_ascii_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": 3}') if has_generation_config else file.unlink()
    llm = LLM(tmp_path, device="cpu")
    forced = {
        token: llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0].outputs[0]
        for token, params in (
            (token, sampling(max_tokens=3, logit_bias={token: 100.0})) for token in (3, END)
        )
    }
    assert forced[3].token_ids == [3]
    assert forced[END].token_ids == [END] * (3 if has_generation_config else 1)
    warnings = [message for message in caplog.messages if "eos_token" in message]
    assert len(warnings) == (0 if has_generation_config else 1)
    assert all("'<|end|>' (96) is not among the end tokens [3]" in text for text in warnings)


@pytest.mark.parametrize("content", ['{"eos_token": 3}', "{"])
def test_a_tokenizers_end_that_is_none(tmp_path: Path, content: str) -> None:
    build_tiny_checkpoint(tmp_path, eos_token_id=3)
    write_ascii_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer_config.json: "):
        LLM(tmp_path, device="cpu")
