"""Text to tokens and back, from a folder's `tokenizer.json`.

Streaming needs care: a character can be spread over several tokens, so text is handed out only once
its bytes are complete, and never taken back.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as JsonTokenizer

from hybridspec.errors import CheckpointError
from hybridspec.models.fields import check_plain, is_there

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]

_REPLACEMENT = "\ufffd"
_LONG = 10_000  # characters, about 10 ms
_MAX_HELD = 3  # an incomplete character has at most 3 bytes, so at most 3 tokens


class Tokenizer:
    """Encodes and decodes text.

    Args:
        backend: the tokenizer as the `tokenizers` package loaded it.
    """

    def __init__(self, backend: JsonTokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, one in added.items() if one.special)
        self._added_bytes = {token: one.content.encode() for token, one in added.items()}
        decoder = json.loads(backend.to_str())["decoder"] or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}  # of the tokens that were asked for

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; raises ValueError for what has none."""
        try:
            if len(text) < _LONG:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            # One text stops all threads, a second for a megabyte; a list of texts does not.
            [found] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return found.ids
        except BaseException as error:
            _raise_if_not_of_the_package(error)
            reason = str(error)
            if any("\ud800" <= char <= "\udfff" for char in text):
                reason = "half a surrogate pair in it; bytes that are not UTF-8 become such"
            raise ValueError(f"text: expected one that this tokenizer takes ({reason})") from None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; bytes that are no valid UTF-8 become U+FFFD."""
        if self._is_byte_level:
            pieces = (
                self.token_bytes(token, skip_special_tokens=skip_special_tokens)
                for token in token_ids
            )
            return b"".join(piece for piece in pieces if piece).decode("utf-8", "replace")
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given by its text, or None."""
        return self.backend.token_to_id(token)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written like this, or None."""
        token = self.backend.token_to_id(text)
        return token if token in self._special_ids else None

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        """Return the bytes that a token stands for.

        Returns:
            Its bytes, or None where this tokenizer's tokens are not byte strings.
        """
        if not self._is_byte_level:
            return None
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_bytes:  # written out, not in the characters of the vocabulary
            return self._added_bytes[token_id]
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new incremental decoder."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Turns tokens that arrive a few at a time into text, complete characters only.

    For byte-level tokenizers the pieces joined equal `decode` of all tokens. With others, invalid
    bytes may come out as more or fewer U+FFFD than `decode` gives.

    Args:
        tokenizer: decodes the tokens.
        skip_special_tokens: whether special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # For decoders that look back: the tokens handed out last, then those held back.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the text that became certain."""
        pieces = [
            self._tokenizer.token_bytes(token, skip_special_tokens=self._skips_special)
            for token in token_ids
        ]
        if None not in pieces:
            return self._utf8.decode(b"".join(piece for piece in pieces if piece))
        return "".join(self._push_one(token) for token in token_ids)

    def finish(self) -> str:
        """Return what was held back, as U+FFFD where it stayed incomplete, and start anew."""
        text = self._utf8.decode(b"", final=True) + self._held_text()
        self._utf8.reset()
        self._context, self._held = [], []
        return text

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._held_text()
        if text.endswith(_REPLACEMENT) and len(self._held) <= _MAX_HELD:
            return ""
        if text:
            self._context = self._held
        self._held = []
        return text

    def _held_text(self) -> str:
        if not self._held:
            return ""
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


def load_tokenizer(path: str | Path, *, is_required: bool = False) -> Tokenizer | None:
    """Read `tokenizer.json` of a folder.

    Args:
        path: the folder.
        is_required: whether there has to be one.

    Returns:
        The tokenizer, or None where the folder has none.

    Raises:
        CheckpointError: if the file is broken, or required and not there.
    """
    file = Path(path) / "tokenizer.json"
    if not is_there(file):
        if is_required:
            raise CheckpointError(f"{path}: expected tokenizer.json, found none")
        return None
    try:
        check_plain(file)
        backend = JsonTokenizer.from_file(str(file))
        # Files may hold what their last training cut texts to; nothing is cut here.
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(backend)
    except BaseException as error:
        _raise_if_not_of_the_package(error)
        raise CheckpointError(f"{file}: not readable as a tokenizer ({error})") from None


def _raise_if_not_of_the_package(error: BaseException) -> None:
    """Raise what `tokenizers` did not: it has plain Exception and, for a panic, a type of its own.

    A pattern that backtracks for too long is such a panic, which is no Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are written with
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
