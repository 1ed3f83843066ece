"""The tokens that a draft head chooses from: part of the vocabulary, since reading all takes time.

With a vocabulary of 248,320, three drafts read three times two gigabytes of the LM head. Drafting
never changes the output, so a head that knows only the most frequent tokens may miss some drafts
and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hybridspec.models import Tokenizer

__all__ = ["MOST_COUNTED", "draft_vocabulary"]

MOST_COUNTED = 32768  # words taken from a text


def draft_vocabulary(
    given: str | Sequence[int] | None, tokenizer: Tokenizer | None, vocab_size: int
) -> list[int] | None:
    """Return the ids that drafts may have, rising, or None for all.

    Args:
        given: the ids, or a file: a list of ids where its name ends in .json, else a text whose
            most frequent tokens are taken.
        tokenizer: for a text.
        vocab_size: words of the model.

    Raises:
        ValueError: if the file cannot be read or holds something else, or an id is no word.
    """
    if given is None:
        return None
    ids = _read(Path(given), tokenizer) if isinstance(given, str) else list(given)
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong or not ids:
        found = f"{wrong[0]}" if wrong else "none"
        raise ValueError(f"draft_vocab: expected ids in 0..{vocab_size - 1}, got {found}")
    return sorted(set(ids))


def _read(path: Path, tokenizer: Tokenizer | None) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also a name that no file can have
        raise ValueError(f"draft_vocab: {path} cannot be read: {error}") from error
    if path.suffix != ".json":
        if tokenizer is None:
            raise ValueError(f"draft_vocab: {path} is a text, and the model has no tokenizer")
        counts = Counter(tokenizer.encode(text, add_special_tokens=False))
        return [token for token, _ in counts.most_common(MOST_COUNTED)]
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"draft_vocab: {path} is no JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"draft_vocab: expected a JSON list of token ids in {path}")
    return ids
