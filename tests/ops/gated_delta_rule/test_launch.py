"""The choice of tile sizes and operand types, and the count of bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridspec.ops.gated_delta_rule import launch
from hybridspec.ops.ring import RingView

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("state", [BF16, F32])
def test_tiles_divide_every_head(tokens: int, state: torch.dtype) -> None:
    operands = launch.Operands(act=BF16, state=state, ring=BF16, precision="tf32")
    for key_dim, value_dim in itertools.product(range(16, 257, 16), repeat=2):
        for heads in (1, 64, 10**5):
            config = launch.choose_verify_launch(
                (9, 0), "3.6.0", heads, key_dim, value_dim, tokens, operands
            )
            assert key_dim % config.block_k == 0
            assert value_dim % (config.block_v * config.splits) == 0
            prefetched = config.prefetch_lines * 128 * config.splits
            assert prefetched <= key_dim * value_dim * state.itemsize
            assert config.prefetch_lines & (config.prefetch_lines - 1) == 0


def test_only_what_was_tuned_is_capped() -> None:
    operands = launch.Operands(act=BF16, state=BF16, ring=BF16, precision="tf32")
    caps = [
        launch.choose_verify_launch(target, compiler, 10**4, 128, 128, 8, operands).max_registers
        for target, compiler in (((9, 0), "3.6.0"), ((9, 0), "3.9.0"), ((8, 0), "3.6.0"))
    ]
    assert caps == [168, None, None]


def test_fp32_activations_and_the_interpreter_multiply_in_full() -> None:
    for dtype in (F32, BF16):
        rows = torch.zeros(1, dtype=dtype)
        ring = RingView(k=rows, u=rows, cum_log_decay=rows, ring_start=rows, history_len=rows)
        assert launch.choose_operands(rows, rows, ring) is launch.EXACT


def test_bytes_of_a_step() -> None:
    """B = 256, T = 4, bf16, history 12, nothing folds: counted by hand."""
    sizes = {"num_heads": 16, "num_value_heads": 64, "key_dim": 128, "value_dim": 128}
    dtypes = {"act": BF16, "state": BF16, "ring": BF16}
    batch = 256

    def count(folds: int) -> int:
        marks = [i < folds for i in range(batch)]
        return launch.verify_bytes([12] * batch, [4] * batch, marks, **sizes, **dtypes)

    state = 256 * 64 * 128 * 128 * 2
    live = 256 * 12 * ((16 + 64) * 128 * 2 + 64 * 4)
    new = 256 * 4 * ((2 * 16 + 2 * 64) * 128 * 2 + 2 * 64 * 2 + (16 + 64) * 128 * 2 + 64 * 4)
    assert count(0) == state + live + new
    assert 655e6 < count(0) < 675e6
    assert count(256) - count(0) == state
