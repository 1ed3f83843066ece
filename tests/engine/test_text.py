"""Text, stop strings and held-back text: one token at a time, whatever a step committed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec import SamplingParams
from hybridspec.bundled import bundled_model_path
from hybridspec.engine.request import Request, RequestGroup
from hybridspec.engine.text import Text
from hybridspec.models import load_tokenizer
from hybridspec.ops.sampling import NO_TOKEN
from hybridspec.runtime import SlotOptions
from hybridspec.speculate import Logprob

TOKENIZER = load_tokenizer(bundled_model_path())  # a token is a byte; 256 is special
SPECIAL = 256
OPTIONS = SlotOptions()

settings.register_profile("text", derandomize=True, deadline=None, max_examples=200)
PROFILE = settings.get_profile("text")
LETTERS = st.text(st.sampled_from("abé\u20ac"), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("abé\u20ac"), min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(1, 5), max_size=40)


def request_for(params: SamplingParams, *, limit: int = 1000) -> Request:
    group = RequestGroup(
        request_id=0,
        prompt=None,
        prompt_token_ids=[1, 2],
        params=params,
        stop_ids=frozenset({SPECIAL, *params.stop_token_ids}),
        limit=limit,
        tokenizer=TOKENIZER,
    )
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=params.skip_special_tokens)
    keeps_stop = params.include_stop_str_in_output
    text = Text(detokenizer, tuple(params.stop), keeps_stop=keeps_stop)
    return Request(group=group, options=OPTIONS, text=text)


def run(request: Request, tokens: list[int], cuts: list[int]) -> tuple[object, ...]:
    """Feed tokens in steps of these sizes; return all that must not depend on the sizes."""
    pieces, start = [], 0
    for size in [*cuts, len(tokens)]:
        step = tokens[start : start + size]
        start += size
        reports = None
        if request.params.logprobs is not None:
            reports = [{max(token, 0): Logprob(-token / 8, 1)} for token in step]
        taken = request.take(step, reports)
        request.post(taken, 0, [], 0, False)
        posted = request.outbox[-1]
        assert posted.token_ids == step[:taken]
        pieces.append(posted.text)
        if request.finish_reason is not None:
            break
    output = request.output().outputs[0]
    assert "".join(pieces) == output.text
    return output, request.token_ids


@PROFILE
@given(
    text=LETTERS,
    stops=STOPS,
    cuts=CUTS,
    keeps=st.booleans(),
    least=st.integers(0, 6),
    limit=st.integers(1, 30),
    end=st.sampled_from([[], [SPECIAL], [NO_TOKEN], [0xE2, 0x82]]),
)
def test_the_split_into_steps_changes_nothing(
    text: str, stops: list[str], cuts: list[int], keeps: bool, least: int, limit: int,
    end: list[int],
) -> None:  # fmt: skip
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=keeps, min_tokens=least, logprobs=0
    )
    tokens = [*text.encode(), *end]
    single = run(request_for(params, limit=limit), tokens, [1] * len(tokens))
    assert run(request_for(params, limit=limit), tokens, cuts) == single
    # Without reports, tokens that plainly end nothing are taken in together.
    params = replace(params, logprobs=None)
    output, ids = run(request_for(params, limit=limit), tokens, cuts)
    assert (replace(single[0], logprobs=None, cumulative_logprob=None), single[1]) == (output, ids)


@PROFILE
@given(text=LETTERS, stops=STOPS, keeps=st.booleans())
def test_it_ends_where_a_stop_string_first_stands(text: str, stops: list[str], keeps: bool) -> None:
    """Against the definition: the first character whose coming completes a stop string."""
    request = request_for(SamplingParams(stop=stops, include_stop_str_in_output=keeps))
    run(request, [*text.encode()], [])
    output = request.output().outputs[0]
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if not ends:
        held = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert (output.text, output.finish_reason) == (text[: len(text) - held], None)
        return
    found = [s for s in stops if text[: ends[0]].endswith(s)]
    longest = max(found, key=len)
    assert output.text == text[: ends[0] - (0 if keeps else len(longest))]
    assert (output.finish_reason, output.stop_reason) == ("stop", longest)


@pytest.mark.parametrize(
    ("params", "tokens", "text", "reason"),
    [
        ({}, b"ab", "ab", None),
        ({}, [*b"ab", SPECIAL], "ab", None),
        ({"skip_special_tokens": False}, [*b"ab", SPECIAL], "ab", None),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            [*b"ab", SPECIAL],
            "ab<|file|>",
            None,
        ),
        ({"stop_token_ids": [98]}, b"ab", "a", 98),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, b"ab", "ab", 98),
        ({"stop": "b"}, b"ab", "a", "b"),
        ({"stop": ["<|file|>"]}, [*b"ab", SPECIAL], "ab", "<|file|>"),
        ({"stop": "\ufffd"}, [*b"ab", 0xE2, SPECIAL], "ab", "\ufffd"),
    ],
)
def test_reasons_of_a_stop(
    params: dict[str, object], tokens: list[int] | bytes, text: str, reason: object
) -> None:
    request = request_for(SamplingParams(**params), limit=len(tokens))
    request.take(list(tokens))
    output = request.output().outputs[0]
    assert (output.text, output.stop_reason) == (text, reason)
    ended_by_length = list(tokens) == [*b"ab"] and not params
    assert output.finish_reason == ("length" if ended_by_length else "stop")


def test_a_request_that_has_ended_takes_no_more() -> None:
    request = request_for(SamplingParams(stop="b"))
    assert request.take([*b"ab", 99, 100]) == 2
    assert request.take([*b"cd"]) == 0
    assert request.token_ids == [*b"ab"]
    failed = request_for(SamplingParams())
    assert failed.take([97, NO_TOKEN]) == 1
    assert failed.take([97]) == 0 and failed.finish_reason == "error"


def test_a_step_output_keeps_showing_its_own_step() -> None:
    request = request_for(SamplingParams(logprobs=0))
    steps = []
    for text in (b"ab", "\u20ac".encode()[:2], "\u20ac".encode()[2:]):
        request.take([*text], [{token: Logprob(-1.0, 1)} for token in text])
        request.post(len(text), 0, [], 0, False)
        steps.append(request.outbox.popleft())
    outputs = [step.output.outputs[0] for step in steps]
    assert [output.text for output in outputs] == ["ab", "ab", "ab\u20ac"]
    assert [len(output.token_ids) for output in outputs] == [2, 4, 5]
    assert [output.cumulative_logprob for output in outputs] == [-2.0, -4.0, -5.0]
    assert [step.text for step in steps] == ["ab", "", "\u20ac"]


def test_what_waits_to_be_fetched_is_plain_values() -> None:
    """The garbage collector follows no object per request and step."""
    request = request_for(SamplingParams())
    for step in range(3):
        request.take([97, 98])
        request.stats.committed_per_step += [2] * (step > 0)
        request.post(2, 1, [97, 99], 5, step == 2)
    kinds = {type(part) for posted in request.group.posted for part in (posted, *posted)}
    assert kinds == {tuple, int, str, bool, type(None)}
    assert {type(draft) for posted in request.group.posted for draft in posted[6]} == {int}
    outbox = request.outbox
    assert len(outbox) == 3 and outbox[-1].step == 2 and outbox[-1].is_fold
    assert outbox.popleft().origins == ["prefill"] * 2
    [second, third] = outbox
    assert (second.token_ids, second.drafted) == ([97, 98], [97, 99])
    assert second.origins == ["accepted", "recovered"] and second.text == "ab"
    assert third.output.outputs[0].text == "ababab" and second.output.outputs[0].text == "abab"
    outbox.clear()
    assert not request.outbox and not request.group.posted


def test_reports_name_their_tokens() -> None:
    request = request_for(SamplingParams(logprobs=1, prompt_logprobs=0))
    request.group.prompt_logprobs = [None]
    request.group.add_prompt_reports([{2: Logprob(-1.0, 1)}])
    request.take([97], [{97: Logprob(-1.0, 2), SPECIAL: Logprob(-0.5, 1)}])
    output = request.output()
    [report] = output.outputs[0].logprobs
    assert {token: one.decoded_token for token, one in report.items()} == {97: "a", 256: "<|file|>"}
    assert output.prompt_logprobs == [None, {2: Logprob(-1.0, 1, "\x02")}]
