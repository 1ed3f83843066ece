"""Bodies as long as a request may be, and wrong from one end to the other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hybridspec.serve.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

MANY = 1000
MESSAGES = [{"role": "user", "content": "a"}]
WRONG: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "prompts": (CompletionBody, {"prompt": [1.5] * MANY}),
    "a prompt's tokens": (CompletionBody, {"prompt": [[1.5] * MANY]}),
    "every prompt's tokens": (CompletionBody, {"prompt": [[1.5]] * MANY}),
    "stop": (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
    "stop_token_ids": (CompletionBody, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
    "bad_words": (CompletionBody, {"prompt": "a", "bad_words": [1] * MANY}),
    "allowed_token_ids": (CompletionBody, {"prompt": "a", "allowed_token_ids": [0.5] * MANY}),
    "messages": (ChatBody, {"messages": [1] * MANY}),
    "tools": (ChatBody, {"messages": MESSAGES, "tools": [1] * MANY}),
    "messages to count": (TokenizeBody, {"messages": [1] * MANY}),
    "tools to count": (TokenizeBody, {"messages": MESSAGES, "tools": [1] * MANY}),
    "tokens": (DetokenizeBody, {"tokens": [1.5] * MANY}),
}


@pytest.mark.parametrize("case", WRONG)
def test_only_the_first_wrong_entry_is_told(case: str) -> None:
    """An error for each of two million made one request stop the server for 46 seconds."""
    kind, body = WRONG[case]
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(body)
    assert wrong.value.error_count() <= 4  # one for each type that a prompt may have


def test_a_wrong_bias_is_one_error() -> None:
    body = {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}
    assert CompletionBody.model_validate(body).logit_bias == body["logit_bias"]
