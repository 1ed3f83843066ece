"""Decoding token by token: complete characters only, and in sum the text of all tokens."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as JsonTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hybridspec.errors import CheckpointError
from hybridspec.models.tokenizer import Tokenizer, load_tokenizer

SPECIAL = 256
ADDED = 257  # added, but not special: its text belongs to the output
UNKNOWN = 300

settings.register_profile("models", derandomize=True, deadline=None, max_examples=150)
PROFILE = settings.get_profile("models")


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, whose id is the byte; one special and one added token."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    backend = JsonTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eof>"])
    backend.add_tokens(["<a b>"])
    return Tokenizer(backend)


def word_tokenizer() -> Tokenizer:
    """Words with marked spaces and byte tokens: not a byte-level vocabulary."""
    words = ["▁the", "▁cat", "s", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = JsonTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


BYTES = byte_level_tokenizer()
WORDS = word_tokenizer()


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], *, skips: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@pytest.mark.parametrize("text", ["é", "→", "🎉", "a🎉b", "\ufffd"])
def test_character_appears_with_its_last_byte(text: str) -> None:
    tokens = BYTES.encode(text)
    assert tokens == list(text.encode())
    pieces = streamed(BYTES, [[token] for token in tokens])
    assert "".join(pieces) == text
    complete = [tokens[: i + 1] for i in range(len(tokens))]
    for i, seen in enumerate(complete):
        certain = bytes(seen).decode("utf-8", "ignore")
        assert "".join(pieces[: i + 1]) == certain


@given(
    st.lists(st.lists(st.one_of(st.integers(0, 257), st.just(UNKNOWN)), max_size=5), max_size=12),
    st.booleans(),
)
@settings(PROFILE)
def test_any_tokens_in_any_pieces_equal_decoding_at_once(
    pieces: list[list[int]], skips: bool
) -> None:
    tokens = [token for piece in pieces for token in piece]
    expected = BYTES.backend.decode(tokens, skip_special_tokens=skips)
    assert BYTES.decode(tokens, skip_special_tokens=skips) == expected
    assert "".join(streamed(BYTES, pieces, skips=skips)) == expected


@given(st.text(max_size=12), st.integers(1, 4))
@settings(PROFILE)
def test_text_survives_the_round_trip(text: str, size: int) -> None:
    tokens = BYTES.encode(text)
    pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    assert "".join(streamed(BYTES, pieces)) == text


def test_special_and_added_tokens() -> None:
    tokens = [65, SPECIAL, ADDED, 66]
    assert "".join(streamed(BYTES, [tokens])) == "A<a b>B"
    assert "".join(streamed(BYTES, [tokens], skips=False)) == "A<eof><a b>B"
    assert BYTES.token_id("<eof>") == SPECIAL
    assert BYTES.token_id("absent") is None
    assert BYTES.vocab_size == 258


def test_an_added_token_is_what_it_says() -> None:
    """Its letters are in the table of the vocabulary's bytes, but mean themselves."""
    backend = byte_level_tokenizer().backend
    backend.add_tokens(["café"])
    tokenizer = Tokenizer(backend)
    tokens = tokenizer.encode("a café é")
    assert tokenizer.token_id("café") in tokens
    assert tokenizer.decode(tokens) == "a café é"
    assert "".join(streamed(tokenizer, [[token] for token in tokens])) == "a café é"
    assert tokenizer.backend.decode(tokens) != "a café é"  # the fault that tokenizers has


def test_special_tokens_by_their_text() -> None:
    assert BYTES.special_id("<eof>") == SPECIAL
    assert BYTES.special_id("<a b>") is None and BYTES.special_id("absent") is None


@pytest.mark.parametrize("behind", ["", " " * 20_000], ids=["short", "long"])
def test_a_pattern_that_backtracks_for_ever_is_an_error(behind: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ValueError, match="^text: expected one that this tokenizer takes .*Onig"):
        tokenizer.encode("a" * 40 + "!" + behind)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """They stood still for a second for each megabyte: the thread that steps, and all streams."""
    turns, has_ended = [], threading.Event()

    def count() -> None:
        while not has_ended.wait(0.001):
            turns.append(1)

    other = threading.Thread(target=count)
    other.start()
    before = len(turns)
    ids = BYTES.encode("<eof>" + "é" * 200_000)
    num_turns = len(turns) - before
    has_ended.set()
    other.join()
    assert ids == [SPECIAL, *"é".encode() * 200_000]
    assert num_turns > 5


def test_an_interruption_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise KeyboardInterrupt

    tokenizer = byte_level_tokenizer()
    monkeypatch.setattr(tokenizer, "backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_finish_shows_what_stayed_incomplete_and_starts_anew() -> None:
    detokenizer = BYTES.detokenizer()
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push([0x41]) == "A"
    assert detokenizer.finish() == ""


@given(st.text("the cats é→🎉", max_size=14), st.integers(1, 3))
@settings(PROFILE)
def test_other_vocabularies_stream_the_same_text(text: str, size: int) -> None:
    ids = {"s": 2, "é": 3}
    tokens = [0, 1]
    for char in text:
        tokens += [ids[char]] if char in ids else [4 + byte for byte in char.encode()]
    pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    out = streamed(WORDS, pieces)
    assert "".join(out) == WORDS.decode(tokens) == "the cat" + text
    assert "\ufffd" not in "".join(out)


def test_other_vocabularies_never_stall_on_invalid_bytes() -> None:
    detokenizer = WORDS.detokenizer()
    text = "".join(detokenizer.push([4 + 0xFF]) for _ in range(40)) + detokenizer.push([1])
    assert text.endswith(" cat")
    assert text.startswith("\ufffd")


def test_teeth_decoding_each_piece_alone_breaks_characters() -> None:
    tokens = BYTES.encode("é")
    assert "".join(BYTES.decode([token]) for token in tokens) != "é"


def test_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_saved_tokenizer_loads(tmp_path: Path) -> None:
    BYTES.backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("→") == [0xE2, 0x86, 0x92]


def test_a_files_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    """As in transformers: they say how texts were cut for training."""
    backend = byte_level_tokenizer().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=40, pad_id=0)
    assert len(backend.encode("a text").ids) == 40
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("a text") == list(b"a text")


def test_texts_that_cannot_be_encoded() -> None:
    for text in ("a\udcff", "a" * 20_000 + "\udcff"):
        with pytest.raises(ValueError, match=r"^text: expected .* surrogate"):
            BYTES.encode(text)
    words = Tokenizer(JsonTokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    with pytest.raises(ValueError, match=r"^text: expected .*UNK"):
        words.encode("b")


def test_a_tokenizer_that_a_link_does_not_lead_to(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("lost")
    with pytest.raises(CheckpointError, match="tokenizer.json: not readable as a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path / 'tokenizer.json'}: not readable as a tokenizer"
    )
    assert "\n" not in str(error.value)
