"""What callers set is checked, and every message names the argument."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridspec.config import EngineConfig, SamplingParams

_SOME_VALUES = {"allowed_token_ids": [3], "truncate_prompt_tokens": 4}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temperature", -0.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("temperature", True, TypeError),
        ("temperature", 10**400, ValueError),
        pytest.param("temperature", 10**5000, ValueError, id="temperature-digits"),
        ("temperature", np.float32("inf"), ValueError),
        ("temperature", 1j, TypeError),
        ("top_k", -2, ValueError),
        pytest.param("max_tokens", 10**5000, ValueError, id="max_tokens-digits"),
        ("logprobs", 2**63, ValueError),
        ("stop_token_ids", [2**63], ValueError),
        ("stop_token_ids", np.array(3), TypeError),
        pytest.param("top_k", 10**5000, ValueError, id="top_k-digits"),
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
        ("stop", ["a", "\ud800"], ValueError),
        ("bad_words", ["\udcff"], ValueError),
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
        ("repetition_penalty", 1e-38, ValueError),  # a logit divided by it is infinite
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
        ("bad_words", [b"a"], TypeError),
        ("bad_words", [["a" * 5000]], TypeError),
        ("allowed_token_ids", [], ValueError),
        ("allowed_token_ids", [-1], ValueError),
        ("allowed_token_ids", 3, TypeError),
        ("allowed_token_ids", "3", TypeError),
        ("include_stop_str_in_output", 1, TypeError),
        ("detokenize", None, TypeError),
        ("skip_special_tokens", "no", TypeError),
        ("spaces_between_special_tokens", 0, TypeError),
        ("truncate_prompt_tokens", 0, ValueError),
        ("truncate_prompt_tokens", -2, ValueError),
        ("truncate_prompt_tokens", 1.5, TypeError),
        ("logprobs", -2, ValueError),
        ("logprobs", True, TypeError),
        ("prompt_logprobs", -2, ValueError),
        ("draft_tokens", 8, ValueError),
        ("draft_tokens", -1, ValueError),
        ("draft_tokens", 1.0, TypeError),
    ],
)
def test_sampling_params_name_what_is_wrong(
    name: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match=rf"^{name}: expected") as found:
        SamplingParams(**{name: value})
    assert len(str(found.value)) < 350


def test_top_k_of_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_numbers_of_numpy_become_plain_ones() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        seed=np.uint8(7),
        logit_bias={np.int64(3): np.float64(1.5)},
        bad_words=[np.array([4, 5])],
        stop_token_ids=np.array([1, 2]),
    )
    assert given == SamplingParams(
        temperature=0.5,
        top_k=5,
        seed=7,
        logit_bias={3: 1.5},
        bad_words=[[4, 5]],
        stop_token_ids=[1, 2],
    )
    [(token, bias)] = given.logit_bias.items()
    values = (given.temperature, given.top_k, given.seed, token, bias, given.stop_token_ids[0])
    assert [type(value) for value in values] == [float, int, int, int, float, int]
    config = EngineConfig(draft_tokens=np.int32(2), memory_fraction=np.float32(0.5))
    assert config == EngineConfig(draft_tokens=2, memory_fraction=0.5)
    assert type(config.draft_tokens) is int and type(config.memory_fraction) is float
    with pytest.raises(TypeError, match="^top_k: expected an integer"):
        SamplingParams(top_k=np.float32(5))
    with pytest.raises(TypeError, match="^top_k: expected an integer"):
        SamplingParams(top_k=np.bool_(True))


def test_equal_parameters_hash_equally() -> None:
    made = [SamplingParams(logit_bias={3: 1.0, 4: 2}, stop="x", bad_words=[[1]]) for _ in range(2)]
    assert len(set(made)) == 1 and hash(made[0]) == hash(made[1])
    assert len({*made, SamplingParams(logit_bias={3: 2.0, 4: 1}), SamplingParams()}) == 3


def test_a_clone_is_equal_and_apart() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, bad_words=["x", [4]], seed=5)
    clone = params.clone()
    assert clone == params and clone is not params
    clone.logit_bias[9] = 1.0
    assert params.logit_bias == {3: 1.0}


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
        ("max_num_seqs", 0, ValueError),
        ("max_num_seqs", 257, ValueError),
        ("max_num_batched_tokens", 0, ValueError),
        ("max_num_batched_tokens", 2.5, TypeError),
        ("enforce_eager", 1, TypeError),
        ("capture_prompts", "yes", TypeError),
        ("revision", "", ValueError),
        ("revision", 3, TypeError),
        ("tokenizer", Path("x"), TypeError),
        ("seed", -1, ValueError),
        ("dtype", "x" * 1000, ValueError),
        ("speculation", "maybe", ValueError),
        ("speculation", None, ValueError),
        ("drafter", np.array(["mtp", "none"]), ValueError),
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
