"""Which replica a request goes to, as a pure object."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.serve import placement
from hybridspec.serve.placement import Affinity, Placement, prefix_key

REPLICAS = ["a", "b", "c"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def key_of(path: str, **fields: Any) -> str | None:
    return prefix_key(path, json.dumps(fields).encode())


def test_requests_of_one_beginning_have_one_key() -> None:
    long = "x" * 600
    assert key_of(COMPLETIONS, prompt=long) == key_of(COMPLETIONS, prompt=long + "y", seed=3)
    assert key_of(COMPLETIONS, prompt=long) != key_of(COMPLETIONS, prompt="y" + long)
    tokens = list(range(200))
    assert key_of(COMPLETIONS, prompt=tokens) == key_of(COMPLETIONS, prompt=[*tokens, 1])
    assert key_of(COMPLETIONS, prompt=tokens) != key_of(COMPLETIONS, prompt=tokens[1:])
    assert key_of(COMPLETIONS, prompt=[long, "b"]) == key_of(COMPLETIONS, prompt=long)
    assert key_of(COMPLETIONS, prompt=[tokens]) == key_of(COMPLETIONS, prompt=tokens)


def test_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first, other = ({"role": "user", "content": text} for text in ("Who?", "Where?"))
    turns = [system, first, {"role": "assistant", "content": "I."}, other]
    assert key_of(CHATS, messages=turns) == key_of(CHATS, messages=turns[:2])
    assert key_of(CHATS, messages=turns) != key_of(CHATS, messages=[system, other])
    assert key_of(CHATS, messages=[system]) is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "a"}'),
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b"[1]"),
        (COMPLETIONS, b"{}"),
        (COMPLETIONS, b'{"prompt": 3}'),
        (COMPLETIONS, b"[" * 100_000),
        (COMPLETIONS, b"\xff"),
    ],
)
def test_what_has_no_prefix_has_no_key(path: str, body: bytes) -> None:
    assert prefix_key(path, body) is None


@pytest.mark.parametrize("body", [b'{"prompt": []}', b'{"messages": [3, null]}',
                                  b'{"prompt": "\\ud800"}'])  # fmt: skip
def test_what_a_replica_will_refuse_has_a_key_or_none(body: bytes) -> None:
    assert isinstance(prefix_key(CHATS, body), str | None)


@given(st.text(), st.permutations(REPLICAS))
def test_a_prefix_ranks_replicas_alike_wherever_it_is_asked(key: str, names: list[str]) -> None:
    order = Placement().order(key, names)
    assert order == Placement().order(key, REPLICAS) and sorted(order) == REPLICAS
    # One that goes takes nothing else along.
    rest = [name for name in order if name != order[0]]
    assert Placement().order(key, rest) == rest


def test_prefixes_spread() -> None:
    first = Counter(Placement().order(str(i), REPLICAS)[0] for i in range(3000))
    assert min(first.values()) > 800


def test_a_busy_replica_is_passed_over() -> None:
    policy = Placement(slack=1.25, free=2)
    order = policy.order("key", REPLICAS)
    placed = []
    for _ in range(12):
        placed.append(policy.order("key", REPLICAS)[0])
        policy.begin(placed[-1])
    counts = Counter(placed)
    assert placed[:2] == [order[0]] * 2  # what is free is taken
    # The bound for 12 requests on 3 replicas is 5.
    assert max(counts.values()) == counts[order[0]] == 5 and set(counts) == set(REPLICAS)
    for name in placed:
        policy.end(name)
    assert policy.order("key", REPLICAS) == order


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 5))
def test_no_replica_gets_more_than_the_bound(keys: list[int], count: int) -> None:
    policy, names, loads = Placement(slack=1.25, free=1), list(map(str, range(count))), Counter()
    for number, key in enumerate(keys):
        name = policy.order(str(key), names)[0]
        assert loads[name] + 1 <= 1.25 * (number + 1) / count + 1
        policy.begin(name)
        loads[name] += 1


def test_without_a_prefix_the_fewest_requests_count() -> None:
    policy = Placement()
    for name in ("a", "a", "b"):
        policy.begin(name)
    assert policy.order(None, REPLICAS) == ["c", "b", "a"]
    policy.end("a")
    policy.end("a")
    policy.end("a")  # one that was never noted
    assert policy.order(None, REPLICAS)[-1] == "b"


def test_all_busy_goes_to_the_least_busy() -> None:
    policy = Placement(slack=0.1, free=1)
    for name in ("a", "a", "b", "c", "c", "c"):
        policy.begin(name)
    assert policy.order("key", REPLICAS) == ["b", "a", "c"]


def test_affinity_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MOST_PREFIXES", 2)
    affinity = Affinity()
    for key, name in [("p", "a"), ("p", "a"), ("q", "b"), ("q", "a"), ("r", "a"), ("p", "a")]:
        affinity.note(key, name)
    # The last one was forgotten, since two more recent ones are remembered.
    assert affinity.counts == {"first": 4, "kept": 1, "moved": 1}
