"""What callers set is checked, and every message names the argument."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridspec.config import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("temperature", True, TypeError),
        ("top_k", -1, ValueError),
        ("top_k", 2.5, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.01, ValueError),
        ("min_p", -0.01, ValueError),
        ("min_p", 1.5, ValueError),
        ("seed", -1, ValueError),
        ("seed", 2**63, ValueError),
        ("max_tokens", 0, ValueError),
        ("max_tokens", 1.0, TypeError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 1000, ValueError),
        ("stop", "", ValueError),
        ("stop", ["a", ""], ValueError),
        ("stop", [1], ValueError),
        ("stop", 1, TypeError),
        ("stop", b"a", TypeError),
        ("stop_token_ids", 1, TypeError),
        ("stop_token_ids", "12", TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", ["a"], TypeError),
        ("ignore_eos", 1, TypeError),
        ("n", 0, ValueError),
        ("n", 10**10, ValueError),
        ("n", True, TypeError),
        ("n", None, TypeError),
        ("repetition_penalty", 0.0, ValueError),
        ("repetition_penalty", float("inf"), ValueError),
        ("frequency_penalty", 2.1, ValueError),
        ("frequency_penalty", "much", TypeError),
        ("presence_penalty", -2.1, ValueError),
        ("presence_penalty", float("nan"), ValueError),
        ("logit_bias", {3: 101}, ValueError),
        ("logit_bias", {-1: 1}, ValueError),
        ("logit_bias", {"3": 1}, TypeError),
        ("logit_bias", {3: "a"}, TypeError),
        ("logit_bias", [3], TypeError),
        ("bad_words", "word", TypeError),
        ("bad_words", [3], TypeError),
        ("bad_words", [["a"]], TypeError),
        ("bad_words", [[-1]], ValueError),
        ("bad_words", [""], ValueError),
        ("bad_words", [[]], ValueError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("prompt_logprobs", -1, ValueError),
        ("draft_tokens", 8, ValueError),
        ("draft_tokens", -1, ValueError),
        ("draft_tokens", 1.0, TypeError),
    ],
)
def test_sampling_params_name_what_is_wrong(
    name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: expected"):
        SamplingParams(**{name: value})


def test_stop_is_normalised() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_what_a_caller_keeps_hold_of_is_copied() -> None:
    bias, words = {3: 1.5}, ["x", [4, 5]]
    params = SamplingParams(logit_bias=bias, bad_words=words)
    bias[4] = 1
    words[1].append(6)
    assert params.logit_bias == {3: 1.5}
    assert params.bad_words == ("x", (4, 5))
    neutral = SamplingParams(logit_bias={}, bad_words=None, logprobs=None, draft_tokens=None)
    assert neutral == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("draft_tokens", -1, ValueError),
        ("draft_tokens", 8, ValueError),
        ("draft_tokens", 1.5, TypeError),
        ("dtype", "float8", ValueError),
        ("dtype", "int8", ValueError),
        ("state_dtype", "int4", ValueError),
        ("device", "tpu", ValueError),
        ("device", "cuda:x", ValueError),
        ("device", "cuda:", ValueError),
        ("device", "auto:0", ValueError),
        ("device", "cpu:1", ValueError),
        ("device", Path("cpu"), ValueError),
        ("mtp_from", "", ValueError),
        ("max_model_len", 1, ValueError),
        ("max_model_len", "long", TypeError),
        ("memory_fraction", 0, ValueError),
        ("memory_fraction", 1.5, ValueError),
        ("kv_layout", "rows", ValueError),
        ("attention_backend", "cuda", ValueError),
        ("threads", 0, ValueError),
        ("threads", 10**20, ValueError),
    ],
)
def test_engine_options_name_what_is_wrong(
    name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: expected"):
        EngineConfig(**{name: value})


def test_unknown_names_raise() -> None:
    with pytest.raises(TypeError, match="speed"):
        SamplingParams(speed=3)
    with pytest.raises(TypeError, match="speed"):
        EngineConfig(speed=3)
