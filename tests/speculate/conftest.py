"""A tiny random checkpoint that these tests share."""

from __future__ import annotations

import pytest

from helpers.ascii_tokenizer import write_ascii_tokenizer
from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A model with a draft head, whose text is noise of printable characters; no EOS."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = build_tiny_checkpoint(folder, eos_token_id=None, seed=2)
    write_ascii_tokenizer(folder)
    return checkpoint
