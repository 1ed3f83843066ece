"""The model against transformers, over checkpoints of different shapes and layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.direct_runner import DirectRunner
from tests.helpers.tiny_checkpoints import TinyCheckpoint, build_tiny_checkpoint

from hybridspec.models.hybrid import load_model
from hybridspec.runtime import GdnMemory

VARIANTS: dict[str, dict[str, Any]] = {
    "ratio1": {"linear_num_value_heads": 2},
    "ratio2-untied-k<v": {"linear_value_head_dim": 32},
    "ratio3-tied-k>v": {
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "language_model-names-sharded": {"layout": "language_model", "num_shards": 3},
    "composite-no-mtp": {"layout": "composite", "has_mtp": False},
    "composite-tied-sharded": {
        "layout": "composite",
        "tie_word_embeddings": True,
        "num_shards": 2,
    },
    "two-kv-layers-conv3": {
        "layer_types": ["full_attention", "linear_attention"] * 2 + ["full_attention"],
        "num_hidden_layers": 5,
        "linear_conv_kernel_dim": 3,
    },
    "all-rotary": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
        }
    },
    "moe": {"family": "qwen3_5_moe"},
    "moe-one-of-two-ratio3": {
        "family": "qwen3_5_moe",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "linear_num_value_heads": 6,
    },
    "next-ratio2": {"family": "qwen3_next"},
    "next-ratio3-k<v-not-normalized": {
        "family": "qwen3_next",
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 32,
        "norm_topk_prob": False,
    },
    "next-some-layers-dense": {
        "family": "qwen3_next",
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "next-all-layers-dense": {"family": "qwen3_next", "num_experts": 0},
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, tmp_path_factory: Any) -> TinyCheckpoint:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> TinyCheckpoint:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (count,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(checkpoint: TinyCheckpoint, tokens: list[int]) -> torch.Tensor:
    return checkpoint.model(torch.tensor([tokens])).logits[0]


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare up to fp32 rounding: transformers is itself up to 1.4e-4 off an fp64 run here."""
    scale = max(1.0, expected.std().item())
    torch.testing.assert_close(actual, expected, atol=2e-4 * scale, rtol=1e-5)


def test_prefill_logits_and_states_equal_transformers(variant: TinyCheckpoint) -> None:
    tokens = random_tokens(70)
    with torch.inference_mode():
        expected = variant.model(torch.tensor([tokens]), use_cache=True)
    runner = DirectRunner(load_model(variant.folder))
    hidden = runner.prefill({1: tokens})
    assert_logits_close(runner.logits(hidden), expected.logits[0])
    linear = [c for c in expected.past_key_values.layers if hasattr(c, "recurrent_states")]
    assert len(linear) == len(runner.pools.of_kind(GdnMemory))
    for pool, cache in zip(runner.pools.of_kind(GdnMemory), linear, strict=True):
        torch.testing.assert_close(
            pool.state[1], cache.recurrent_states[0][0].mT, atol=2e-5, rtol=1e-5
        )


def test_verify_steps_with_rejects_equal_transformers(variant: TinyCheckpoint) -> None:
    tokens = random_tokens(90)
    expected = expected_logits(variant, tokens)
    runner = DirectRunner(load_model(variant.folder))
    hidden = [runner.prefill({2: tokens[:19]})]
    position, turn = 19, 0
    while position < len(tokens):
        num_rows = turn % 8 + 1
        num_kept = min(turn * 5 % num_rows + 1, len(tokens) - position)
        kept = tokens[position : position + num_kept]
        rejected = random_tokens(num_rows - num_kept, seed=100 + turn)
        rows = runner.verify({2: kept + rejected}, [num_kept])
        hidden.append(rows[:num_kept])
        position += num_kept
        turn += 1
    assert turn > 8, "expected every length from 1 to 8"
    assert_logits_close(runner.logits(torch.cat(hidden)), expected)


def test_final_state_after_verify_steps_equals_the_cache(checkpoint: TinyCheckpoint) -> None:
    tokens = random_tokens(40)
    with torch.inference_mode():
        expected = checkpoint.model(torch.tensor([tokens]), use_cache=True).past_key_values
    runner = DirectRunner(load_model(checkpoint.folder))
    runner.prefill({0: tokens[:10]})
    for start in range(10, 40, 3):
        runner.verify({0: [*tokens[start : start + 3], 5, 6]}, [3])
    assert int(runner.pools.history_len[0]) > 0
    runner.fold_all(0)
    linear = [c for c in expected.layers if hasattr(c, "recurrent_states")]
    for pool, cache in zip(runner.pools.of_kind(GdnMemory), linear, strict=True):
        torch.testing.assert_close(
            pool.state[0], cache.recurrent_states[0][0].mT, atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("chunk", [1, 7, 33, 64])
def test_prefill_in_chunks_equals_prefill_at_once(checkpoint: TinyCheckpoint, chunk: int) -> None:
    tokens = random_tokens(80)
    model = load_model(checkpoint.folder)
    at_once, chunked = DirectRunner(model), DirectRunner(model)
    expected = at_once.prefill({0: tokens})
    parts = [chunked.prefill({0: tokens[i : i + chunk]}) for i in range(0, len(tokens), chunk)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=5e-5, rtol=1e-5)
    memories = (runner.pools.of_kind(GdnMemory) for runner in (at_once, chunked))
    for one, other in zip(*memories, strict=True):
        torch.testing.assert_close(one.state, other.state, atol=1e-5, rtol=1e-5)


def test_ragged_batch_equals_each_request_alone(checkpoint: TinyCheckpoint) -> None:
    prompts = {2: random_tokens(20, 2), 0: random_tokens(3, 3), 1: random_tokens(35, 4)}
    runner = DirectRunner(load_model(checkpoint.folder))
    hidden = runner.prefill(prompts)
    rows = {1: random_tokens(4, 5), 2: random_tokens(1, 6), 0: random_tokens(6, 7)}
    verified = runner.verify(rows, [4, 1, 6])
    sequences = {slot: prompts[slot] + rows[slot] for slot in prompts}
    expected = {slot: expected_logits(checkpoint, tokens) for slot, tokens in sequences.items()}
    of_prompts = torch.cat([expected[slot][: len(prompts[slot])] for slot in prompts])
    of_rows = torch.cat([expected[slot][len(prompts[slot]) :] for slot in rows])
    assert_logits_close(runner.logits(hidden), of_prompts)
    assert_logits_close(runner.logits(verified), of_rows)


def test_padding_rows_leave_other_slots_alone(checkpoint: TinyCheckpoint) -> None:
    tokens = random_tokens(12)
    runner = DirectRunner(load_model(checkpoint.folder))
    runner.prefill({0: tokens, 1: tokens})
    before = [tensor.clone() for tensor in runner.pools.slot_tensors()]
    runner.verify({-1: [1, 2], 1: [3]}, [0, 1])
    for old, new in zip(before, runner.pools.slot_tensors(), strict=True):
        assert torch.equal(old[0], new[0])
        assert torch.equal(old[2], new[2])


def split_logits(checkpoint: TinyCheckpoint, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    """Logits of a model in `dtype` over a prompt and two verify steps."""
    runner = DirectRunner(load_model(checkpoint.folder, dtype=dtype))
    hidden = [runner.prefill({0: tokens[:20]})]
    hidden.append(runner.verify({0: tokens[20:25]}, [5]))
    hidden.append(runner.verify({0: tokens[25:]}, [len(tokens) - 25]))
    assert hidden[0].dtype is dtype
    return runner.logits(torch.cat(hidden))


def test_bf16_errs_no_more_than_transformers_in_bf16(checkpoint: TinyCheckpoint) -> None:
    tokens = random_tokens(30)
    expected = expected_logits(checkpoint, tokens)
    with torch.inference_mode():
        narrow = copy.deepcopy(checkpoint.model).to(torch.bfloat16)
        theirs = narrow(torch.tensor([tokens])).logits[0].float()
    logits = split_logits(checkpoint, torch.bfloat16, tokens)
    assert logits.dtype is torch.float32
    error = (logits - expected).square().mean().sqrt()
    assert 0 < error <= 1.2 * (theirs - expected).square().mean().sqrt()


def test_fp64_runs_through_and_agrees_with_itself(checkpoint: TinyCheckpoint) -> None:
    tokens = random_tokens(30)
    logits = split_logits(checkpoint, torch.float64, tokens)
    assert logits.dtype is torch.float64
    assert_logits_close(logits.float(), expected_logits(checkpoint, tokens))
    runner = DirectRunner(load_model(checkpoint.folder, dtype=torch.float64))
    parts = [runner.prefill({0: tokens[:13]}), runner.prefill({0: tokens[13:]})]
    again = DirectRunner(runner.model).prefill({0: tokens})
    torch.testing.assert_close(torch.cat(parts), again, atol=1e-12, rtol=0)


def test_auto_dtype_widens_on_cpu_and_gates_are_never_rounded(tmp_path: Path) -> None:
    stored = build_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    wide, narrow = load_model(tmp_path), load_model(tmp_path, dtype=torch.bfloat16)
    assert wide.dtype is torch.float32
    a_log = stored.model.model.layers[0].linear_attn.A_log
    for model in (wide, narrow):
        assert torch.equal(model.layers[0].mixer.A_log, a_log)
        assert model.layers[0].mixer.dt_bias.dtype is torch.float32
        assert model.layers[0].mixer.norm.weight.dtype is torch.float32
    tokens = random_tokens(20)
    runner = DirectRunner(wide)
    logits = runner.logits(runner.prefill({0: tokens}))
    assert_logits_close(logits, expected_logits(stored, tokens))


def test_tied_head_shares_its_memory(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    model = load_model(tmp_path)
    assert model.head is model.embedding


PERTURBATIONS = {
    "A_log": lambda model: model.layers[0].mixer.A_log.add_(0.01),
    "dt_bias": lambda model: model.layers[0].mixer.dt_bias.add_(0.01),
    "gated norm": lambda model: model.layers[0].mixer.norm.scaled_weight[0].add_(0.05),
    "conv tap": lambda model: model.layers[0].mixer.conv_weight[3, 0].add_(0.05),
    "q norm": lambda model: model.layers[3].mixer.qk_norm.scaled_weight[0, 0].add_(0.05),
    "k norm": lambda model: model.layers[3].mixer.qk_norm.scaled_weight[-1, 0].add_(0.05),
    "block norm": lambda model: model.layers[1].mlp_norm.scaled_weight[0].add_(0.01),
    "final norm": lambda model: model.norm.scaled_weight[0].add_(0.01),
    "rotary": lambda model: model.rotary.signed_frequencies.mul_(0.99),
}


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_teeth_each_small_part_shows_in_the_logits(checkpoint: TinyCheckpoint, name: str) -> None:
    tokens = random_tokens(70)
    model = load_model(checkpoint.folder)
    PERTURBATIONS[name](model)
    runner = DirectRunner(model)
    logits = runner.logits(runner.prefill({0: tokens}))
    with pytest.raises(AssertionError, match="not close"):
        assert_logits_close(logits, expected_logits(checkpoint, tokens))


def test_teeth_rejected_rows_would_show_if_they_were_kept(checkpoint: TinyCheckpoint) -> None:
    tokens = random_tokens(30)
    runner = DirectRunner(load_model(checkpoint.folder))
    runner.prefill({0: tokens[:20]})
    runner.verify({0: [*tokens[20:22], 1, 2]}, [3])
    logits = runner.logits(runner.verify({0: tokens[22:26]}, [4]))
    with pytest.raises(AssertionError, match="not close"):
        assert_logits_close(logits, expected_logits(checkpoint, tokens)[22:26])
