"""What callers set is checked, and every message names the argument."""

from __future__ import annotations

import pytest

from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.errors import UnsupportedError


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
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", ["a"], TypeError),
        ("ignore_eos", 1, TypeError),
    ],
)
def test_sampling_params_name_what_is_wrong(
    name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: expected"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("logit_bias", {3: 1.0}),
        ("logprobs", 1),
        ("prompt_logprobs", 1),
        ("bad_words", ["x"]),
    ],
)
def test_what_is_not_implemented_says_so(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name}: not implemented"):
        SamplingParams(**{name: value})


def test_neutral_values_of_what_is_not_implemented_are_accepted() -> None:
    params = SamplingParams(n=1, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={})
    assert params.temperature == 1.0


def test_stop_is_normalised() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("draft_tokens", -1, ValueError),
        ("draft_tokens", 8, ValueError),
        ("draft_tokens", 1.5, TypeError),
        ("dtype", "float8", ValueError),
        ("state_dtype", "int8", ValueError),
        ("device", "tpu", ValueError),
        ("device", "cuda:x", ValueError),
        ("max_model_len", 1, ValueError),
        ("max_model_len", "long", TypeError),
        ("memory_fraction", 0, ValueError),
        ("memory_fraction", 1.5, ValueError),
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
