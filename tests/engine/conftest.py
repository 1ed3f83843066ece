"""Tiny random checkpoints that the engine's tests share."""

from __future__ import annotations

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Two value heads per key head, K != V, no EOS."""
    folder = tmp_path_factory.mktemp("tiny")
    return build_tiny_checkpoint(folder, linear_value_head_dim=24, eos_token_id=None, seed=1)
