"""Which replica a request goes to: the one that has its prefix, unless that one is busy.

Rendezvous hashing with a bound on the load: every front that knows the same replicas ranks them
alike for a prefix, without talking to the others, and a replica that comes or goes moves only the
prefixes that rank it first. Nothing here knows what runs the replicas.

Source: Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit Rates (1998); Mirrokni,
Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads (2016).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

__all__ = ["Affinity", "Placement", "prefix_key"]

_FIRST_CHARACTERS = 512  # of a prompt: some pages of it
_FIRST_TOKENS = 128
_MOST_PREFIXES = 1 << 16


def prefix_key(path: str, body: bytes) -> str | None:
    """Return a name for the beginning of a request's prompt.

    Of a text that is its first 512 characters, of tokens the first 128. Of a conversation it is
    everything up to the first message of the user, so that its later turns go where the first one
    went, and others with the same instructions need not.

    Args:
        path: of the request.
        body: as it came; need not be valid.

    Returns:
        The name; None where nothing is continued.
    """
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    beginning = _beginning(fields) if isinstance(fields, dict) else None
    if beginning is None:
        return None
    return hashlib.blake2b(json.dumps(beginning).encode(), digest_size=16).hexdigest()


def _beginning(fields: dict[str, Any]) -> Any:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(messages, list):
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        return messages[: roles.index("user") + 1] if "user" in roles else messages
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts stay together
    if isinstance(prompt, str):
        return prompt[:_FIRST_CHARACTERS]
    return prompt[:_FIRST_TOKENS] if isinstance(prompt, list) else None


class Placement:
    """Ranks replicas for a request, and knows how many each has.

    Args:
        slack: a replica takes at most so many times the mean load, rounded up.
        free: requests that a replica takes whatever the others have.
    """

    def __init__(self, *, slack: float = 1.25, free: int = 4) -> None:
        self._slack = slack
        self._free = free
        self._loads: Counter[str] = Counter()

    def order(self, key: str | None, replicas: Sequence[str]) -> list[str]:
        """Return the replicas, the best one first.

        Args:
            key: name of the prefix; None goes to the one with the fewest requests.
            replicas: names of those that there are.
        """
        loads = {name: self._loads[name] for name in replicas}
        if key is None:
            return sorted(replicas, key=loads.__getitem__)
        most = math.ceil(self._slack * (sum(loads.values()) + 1) / max(len(replicas), 1))
        most = max(most, self._free)
        ranked = sorted(replicas, key=lambda name: _weight(key, name), reverse=True)
        is_busy = {name: loads[name] >= most for name in replicas}
        return sorted(ranked, key=lambda name: (is_busy[name], loads[name] * is_busy[name]))

    def begin(self, replica: str) -> None:
        """Note that a request goes to a replica."""
        self._loads[replica] += 1

    def end(self, replica: str) -> None:
        """Note that one of its requests is over, however it ended."""
        self._loads[replica] -= 1
        if self._loads[replica] <= 0:
            del self._loads[replica]


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()


class Affinity:
    """Counts how many requests found the replica that had their prefix last.

    Attributes:
        counts: "first" for prefixes that were new, "kept" and "moved" for the others.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(first=0, kept=0, moved=0)
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, key: str, replica: str) -> None:
        """Note where a request with this prefix went."""
        last = self._last.pop(key, None)
        self.counts["first" if last is None else "kept" if last == replica else "moved"] += 1
        self._last[key] = replica
        if len(self._last) > _MOST_PREFIXES:
            self._last.popitem(last=False)
