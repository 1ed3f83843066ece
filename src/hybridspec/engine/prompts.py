"""The forms in which callers give prompts and their parameters, brought into one list each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from hybridspec.config import SamplingParams
from hybridspec.errors import UnsupportedError

__all__ = ["params_list", "prompt_list"]


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """Return sampling parameters, one for each of so many prompts.

    Args:
        params: one for all prompts, or one per prompt.
        count: how many prompts there are.

    Raises:
        ValueError, TypeError: if there is another number of them, or one is something else.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    is_one = isinstance(params, Mapping | str) or not isinstance(params, Iterable)
    each = [params] if is_one else list(params)
    if not is_one and len(each) != count:
        raise ValueError(
            f"sampling_params: expected one or {count} (one per prompt), got {len(each)}"
        )
    for one in each:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(one).__name__}")
    return each


def prompt_list(prompts: Any, prompt_token_ids: Any) -> list[str | list[Any]]:
    """Return texts and token lists, one for each prompt.

    Args:
        prompts: a text, a dict with "prompt" or "prompt_token_ids", or a list of these; or None.
        prompt_token_ids: one list of tokens, or a list of lists; or None.

    Raises:
        ValueError, TypeError: if neither or both are given, or one is of another form.
        UnsupportedError: if a dict asks for more than text.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise ValueError("prompts: give either prompts or prompt_token_ids, and not both")
    if prompts is not None:
        is_one = isinstance(prompts, str | Mapping)
        each = [prompts] if is_one else _listed("prompts", prompts, "texts")
        return [_prompt(one) for one in each]
    lists = _listed("prompt_token_ids", prompt_token_ids, "token ids")
    if lists and not any(_is_list(item) for item in lists):
        return [lists]
    return [_listed("prompt_token_ids", item, "token ids") for item in lists]


def _prompt(given: Any) -> str | list[Any]:
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"prompts: expected a text or a list of texts, got {type(given).__name__}; "
            f"give token ids as prompt_token_ids"
        )
    found = {key: value for key, value in given.items() if value is not None}
    others = sorted(str(key) for key in found.keys() - {"prompt", "prompt_token_ids"})
    if others:
        raise UnsupportedError(f"prompts: only text is supported, got {', '.join(others)} in one")
    if "prompt_token_ids" in found:  # the text beside them only says what they mean
        return _listed("prompt_token_ids", found["prompt_token_ids"], "token ids")
    text = found.get("prompt")
    if not isinstance(text, str):
        raise TypeError(f"prompts: expected a text as prompt of a dict, got {type(text).__name__}")
    return text


def _is_list(value: Any) -> bool:
    is_sized = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0
    return is_sized and not isinstance(value, str | bytes | Mapping | Set)


def _listed(name: str, value: Any, what: str) -> list[Any]:
    if not _is_list(value):
        raise TypeError(f"{name}: expected a list of {what}, got {type(value).__name__}")
    return list(value)
