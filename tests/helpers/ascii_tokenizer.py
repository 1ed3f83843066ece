"""A tokenizer of one printable character per token, for tiny checkpoints that need text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["END", "text_of", "write_ascii_tokenizer"]

END = 96  # the end token; 0..94 are the characters from space to tilde, 95 is a tab


def text_of(tokens: list[int]) -> str:
    """Return what tokens say, the end token left out."""
    return "".join("\t" if token == 95 else chr(32 + token) for token in tokens if token != END)


def write_ascii_tokenizer(folder: Path) -> None:
    """Write tokenizer.json for 96 characters and the end token."""
    characters = [chr(32 + i) for i in range(95)] + ["\t"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {byte_level.pre_tokenize_str(char)[0][0]: i for i, char in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
