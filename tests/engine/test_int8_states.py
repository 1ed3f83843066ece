"""States in 8 bits: off unless asked for, refused where unknown, and what they do to the model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers.direct_runner import DirectRunner
from helpers.tiny_checkpoints import build_tiny_checkpoint
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import bundled_model_path, held_out_prompts
from hybridspec.errors import UnsupportedError
from hybridspec.models import load_model
from hybridspec.runtime import GdnMemory


def test_off_by_default_and_counted_where_asked_for() -> None:
    wide = LLM(bundled_model_path(), device="cpu").describe()
    narrow = LLM(bundled_model_path(), device="cpu", state_dtype="int8").describe()
    assert (wide.config.state_dtype, narrow.config.state_dtype) == ("float32", "int8")
    gdn, layers = wide.model_config.gdn, 6
    elements = layers * gdn.num_value_heads * gdn.value_dim * gdn.key_dim
    assert wide.request_bytes["GDN state"] == 4 * elements
    assert narrow.request_bytes["GDN state"] == elements + elements // 32 * 2


@pytest.mark.parametrize("key_dim", [16, 32, 96])
def test_refused_for_head_sizes_that_were_not_measured(tmp_path: Path, key_dim: int) -> None:
    build_tiny_checkpoint(tmp_path, linear_key_head_dim=key_dim)
    match = rf"state_dtype: int8 was validated for key heads of 64 and 128 .* have {key_dim}; use"
    with pytest.raises(UnsupportedError, match=match):
        LLM(tmp_path, device="cpu", state_dtype="int8")
    (tmp_path / "model.safetensors").write_bytes(b"")  # refused before weights are looked at
    with pytest.raises(UnsupportedError, match=match):
        LLM(tmp_path, device="cpu", state_dtype="int8")


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_used_slot_is_as_good_as_a_fresh_one(draft_tokens: int) -> None:
    llm = LLM(bundled_model_path(), device="cpu", state_dtype="int8", draft_tokens=draft_tokens)
    one, other = (prompt.text[-60:] for prompt in held_out_prompts("code")[:2])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first, between, again = (
        llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in (one, other, one)
    )
    assert first == again != between
    assert llm._engine.pools.of_kind(GdnMemory)[0].state.dtype == torch.int8


def test_held_out_bits_per_byte_stay() -> None:
    """Six texts through verify steps; `benchmarks/gdn_8bit_model.py` does this on whole files."""
    model = load_model(bundled_model_path())
    texts = [list(prompt.text.encode()) for prompt in held_out_prompts("code")[:6]]
    assert {len(text) for text in texts} == {512}
    losses = []
    for dtype in (torch.float32, torch.int8):
        runner = DirectRunner(model, num_slots=6, max_tokens=512, state_dtype=dtype)
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, 508, 4):
            rows = {slot: text[first : first + 4] for slot, text in enumerate(texts)}
            logits = runner.logits(runner.verify(rows, [4] * 6))
            targets = torch.tensor([text[first + 1 : first + 5] for text in texts]).flatten()
            total += F.cross_entropy(logits.double(), targets, reduction="sum")
        assert int(runner.pools.ring_start.sum()) > 0
        losses.append(total.item() / (6 * 508) / math.log(2))
    assert 0.5 < losses[0] < 2.0
    assert 0.0 < abs(losses[1] - losses[0]) < 0.002
