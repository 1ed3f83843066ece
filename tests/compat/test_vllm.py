"""ReplaySSM's names, argument names, order, defaults and meaning."""

from __future__ import annotations

import inspect
import random

import pytest
import torch

from helpers.gdn_cases import assert_same_bits
from helpers.no_sync import no_sync
from helpers.tolerances import KERNEL_FACTOR, assert_close
from helpers.vllm_checks import (
    check_commits,
    check_plain_tokens,
    check_resets,
    check_single_tokens,
)
from helpers.vllm_layers import PRECISIONS, Layer, Shape, one_token_steps, ring_rows
from hybridspec.compat import vllm

F32, BF16 = torch.float32, torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL, QWEN_32, QWEN_64 = Shape(), Shape(16, 32, 128, 128), Shape(16, 64, 128, 128)
PAIRS = pytest.mark.parametrize("precision", PRECISIONS)
ON_DEVICES = pytest.mark.parametrize("device", DEVICES)

ROWS = "mixed_qkv, a, b, A_log, dt_bias, "
SIGNATURES = {
    "gdn_replayssm_spec_decode": ROWS
    + "checkpoint_state, d_cache, k_cache, g_cache, out, query_start_loc, ssm_state_indices, "
    "write_pos, cache_base, is_flush, max_cache_len, max_spec_len, scale=None, "
    "use_qk_l2norm_in_kernel=True, null_block_id=0, launch_mode='both'",
    "commit_gdn_replayssm_spec": "write_pos, cache_base, is_flush, num_accepted, "
    "state_batch_indices, max_cache_len, max_spec_len, cache_buf_len=None, null_block_id=0",
    "reset_gdn_replayssm_spec_cursors": "write_pos, cache_base, is_flush, do_reset, "
    "state_batch_indices, max_cache_len, max_spec_len, null_block_id=0",
    "fused_recurrent_gated_delta_rule_replayssm": ROWS
    + "scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices, write_pos, "
    "use_qk_l2norm_in_kernel=False, block_v=None, num_warps=None, num_stages=None, nk=None",
    "fused_recurrent_gated_delta_rule_packed_decode": ROWS
    + "scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(written) == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def single_step(
    shape: Shape, precision: str, length: int, rows: int, history: int, device: str,
    *, is_spoilt: bool = False,
) -> None:  # fmt: skip
    """Verify rows behind a history that the function for one token built, and compare with it."""
    layer = Layer(shape, PRECISIONS[precision], 2, length, device=device, seed=history + rows)
    layer.start(1)
    state = layer.state.clone()
    one_token_steps(layer, layer.draw(history), 1, 0)
    assert_same_bits(layer.state[1], state[1])
    tokens, pages = layer.draw(rows), layer.page.clone()
    expected = one_token_steps(layer, tokens, 1, history)
    layer.page.copy_(pages)
    if is_spoilt:
        layer.k[1, 0, history - 1, 0] += 5.0
    layer.write_pos[1] = history
    out = torch.full_like(expected, torch.nan)
    layer.verify(
        tokens, layer.ints(0, rows), layer.ints(1), out, max_cache_len=length, max_spec_len=rows
    )
    # Both sides round, and one of them reads corrections that it has rounded.
    factor = 2.0 if device == "cpu" else 2.0 * KERNEL_FACTOR
    assert_close(out, expected.double(), layer.act, F32, factor=factor)
    assert_same_bits(layer.state[1], state[1])


STEPS = [(SMALL, length, rows) for length in (16, 32) for rows in (2, 4, 6, 8)]
STEPS += [(shape, 16, rows) for shape in (QWEN_32, QWEN_64) for rows in (2, 8)]


@ON_DEVICES
@PAIRS
@pytest.mark.parametrize(
    ("shape", "length", "rows"), STEPS, ids=lambda v: f"{v.value_heads}" if v in STEPS else None
)
def test_a_step_equals_single_tokens(
    shape: Shape, length: int, rows: int, precision: str, device: str
) -> None:
    for history in sorted({0, (length - rows) // 2, length - rows}):
        single_step(shape, precision, length, rows, history, device)


@ON_DEVICES
def test_a_spoilt_history_is_noticed(device: str) -> None:
    single_step(SMALL, "s32_a32", 16, 4, 5, device)
    with pytest.raises(AssertionError):
        single_step(SMALL, "s32_a32", 16, 4, 5, device, is_spoilt=True)


@ON_DEVICES
@PAIRS
@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_rollbacks(precision: str, length: int, rows: int, device: str) -> None:
    """40 steps with random acceptance leave what plain decoding of the accepted tokens does."""
    layer = Layer(SMALL, PRECISIONS[precision], 2, length, device=device, seed=rows)
    layer.start(1)
    sizes = {"max_cache_len": length, "max_spec_len": rows}
    block, plain = layer.ints(1), layer.state.clone()
    vllm.reset_gdn_replayssm_spec_cursors(*layer.cursors, layer.ints(1), block, *sizes.values())
    chance, folded, snapshots = random.Random(rows), 0, [plain[1].clone()]
    for _ in range(40):
        tokens, out = layer.draw(rows), torch.empty(rows, 4, 64, dtype=layer.act, device=device)
        folded += int(layer.write_pos[1]) if layer.is_flush[1] else 0
        layer.verify(tokens, layer.ints(0, rows), block, out, **sizes)
        accepted = chance.randint(0 if chance.random() < 0.1 else 1, rows)
        for t in range(accepted):
            expected = torch.empty(1, 1, 4, 64, dtype=layer.act, device=device)
            vllm.fused_recurrent_gated_delta_rule_packed_decode(
                *(part[t : t + 1] for part in tokens), layer.A_log, layer.dt_bias, 64**-0.5,
                plain, expected, block, True,
            )  # fmt: skip
            snapshots.append(plain[1].clone())
            # As ReplaySSM's own test: roundings of 40 steps, in the state and in the ring.
            bound = (5e-3, 2e-3) if layer.act == F32 else (4e-2, 1e-2)
            torch.testing.assert_close(out[t], expected[0, 0], rtol=bound[0], atol=bound[1])
        vllm.commit_gdn_replayssm_spec(*layer.cursors, layer.ints(accepted), block, *sizes.values())
        bound = (5e-3, 3e-3) if layer.act == F32 else (4e-2, 2e-2)
        torch.testing.assert_close(layer.state[1], snapshots[folded], rtol=bound[0], atol=bound[1])
        layer.poison([1])
    assert folded > 16


@ON_DEVICES
@PAIRS
@pytest.mark.parametrize("is_marked", [False, True], ids=["verify", "mixed"])
def test_batches_of_sparse_blocks(precision: str, is_marked: bool, device: str) -> None:
    layer = Layer(SMALL, PRECISIONS[precision], 13, 16, device=device)
    blocks, lengths = [11, -1, 3, 7, 0, 5, -1], [4, 2, 1, 0, 3, 4, 4]
    for i, block in enumerate((11, 3, 7, 5)):
        layer.start(block)
        layer.fill(block, start=5 * i, history=(12, 7, 3, 0)[i])
        layer.is_flush[block] = is_marked and i % 2 == 0
    layer.is_flush[0] = 1
    layer.check(blocks, lengths, tail=2, max_cache_len=16, max_spec_len=4)


@ON_DEVICES
@PAIRS
@pytest.mark.parametrize("mode", ["both", "verify", "flush"])
@pytest.mark.parametrize("rows", range(1, 9))
def test_a_step_against_fp64(rows: int, mode: str, precision: str, device: str) -> None:
    layer = Layer(Shape(1, 2, 32, 48), PRECISIONS[precision], 6, 32, device=device, seed=rows)
    for block, start, history in ((5, 29, 24 - rows), (2, 3, 1), (3, 30, 7), (4, 0, 0)):
        layer.start(block)
        layer.fill(block, start, history)
        layer.is_flush[block] = block % 2
    sizes = {"max_cache_len": 24, "max_spec_len": rows}
    layer.check([3, 0, 5, 2, 4], [1, 2, rows, rows, 0], tail=1, mode=mode, **sizes)


@ON_DEVICES
def test_every_block_may_be_one(device: str) -> None:
    layer = Layer(Shape(1, 2, 16, 16), PRECISIONS["s32_a32"], 2, 16, device=device)
    layer.start(0, 1)
    layer.fill(0, 14, 6)
    sizes = {"max_cache_len": 16, "max_spec_len": 4}
    layer.check([-1, 0, 1], [1, 3, 2], null=-1, **sizes)
    for blocks, mode in (([-1, 0], "flush"), ([], "verify")):
        layer.check(blocks, [1] * len(blocks), tail=1, null=-1, mode=mode, **sizes)


@ON_DEVICES
def test_a_marked_window_is_folded_without_rows(device: str) -> None:
    """The commit that follows empties it."""
    layer = Layer(Shape(1, 2, 128, 64), (BF16, BF16), 4, 16, device=device)
    for block in (1, 2, 3):
        layer.start(block)
        layer.fill(block, 13, 9)
    layer.is_flush[1:3] = 1
    layer.check([2, 1, 3], [0, 2, 0], max_cache_len=16, max_spec_len=4)
    layer.check([2, 3], [0, 0], tail=1, max_cache_len=16, max_spec_len=4)


@ON_DEVICES
@pytest.mark.parametrize("shape", [SMALL, Shape(1, 2, 128, 64)], ids=str)
def test_an_fp32_checkpoint_stays_fp32(shape: Shape, device: str) -> None:
    """A fold of rows without corrections multiplies the state with its decay, in fp32."""
    layer = Layer(shape, (F32, BF16), 2, 16, device=device)
    layer.start(1)
    layer.fill(1, 12, 11)
    layer.d[1][:, ring_rows(layer, 1, 0, 11)] = 0.0
    layer.g[1] *= 0.05
    layer.is_flush[1] = 1
    expected, out = layer.state_after_window(1), torch.empty(1, *layer.state.shape[1:3])
    layer.verify(
        layer.draw(1), layer.ints(0, 1), layer.ints(1), out.to(device, BF16),
        max_cache_len=16, max_spec_len=4,
    )  # fmt: skip
    assert_close(layer.state[1].cpu(), expected, F32)


@ON_DEVICES
@PAIRS
@pytest.mark.parametrize("length", [2, 10, 16])
def test_single_tokens_against_fp64(length: int, precision: str, device: str) -> None:
    check_single_tokens(length, precision, device)


@ON_DEVICES
@PAIRS
def test_plain_tokens_against_fp64(precision: str, device: str) -> None:
    check_plain_tokens(precision, device)


@ON_DEVICES
def test_cursors(device: str) -> None:
    check_commits(device)


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int64], ids=str)
def test_resets(dtype: torch.dtype, device: str) -> None:
    check_resets(dtype, device)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    device = "cuda"
    layer = Layer(Shape(1, 2, 128, 64), (BF16, BF16), 4, 16, device=device)
    layer.start(1, 2)
    rows, out = layer.draw(4), torch.empty(4, 2, 64, dtype=BF16, device=device)
    bounds, blocks, one = layer.ints(0, 2, 4), layer.ints(1, 2), layer.ints(1, 1)
    sizes, plain = {"max_cache_len": 16, "max_spec_len": 4}, torch.empty_like(out[:, None])
    indices = layer.ints(1, 2, 0, -1)

    def step() -> None:
        vllm.reset_gdn_replayssm_spec_cursors(*layer.cursors, one, blocks, 16, 4)
        for mode in ("both", "verify", "flush"):
            layer.verify(rows, bounds, blocks, out, launch_mode=mode, **sizes)
        vllm.commit_gdn_replayssm_spec(*layer.cursors, one, blocks, 16, 4)
        vllm.fused_recurrent_gated_delta_rule_replayssm(
            *rows, layer.A_log, layer.dt_bias, 0.1, layer.state, **layer.caches, out=plain,
            ssm_state_indices=indices, write_pos=indices.clamp(min=0),
        )  # fmt: skip
        vllm.fused_recurrent_gated_delta_rule_packed_decode(
            *rows, layer.A_log, layer.dt_bias, 0.1, layer.state, plain, indices
        )

    step()
    with no_sync():
        step()


WRONG = {
    "mode": ({"launch_mode": "all"}, "launch_mode: expected one of"),
    "width": ({"mixed_qkv": torch.zeros(3, 95)}, "mixed_qkv: expected 2HK . HV V columns"),
    "rank": ({"mixed_qkv": torch.zeros(3, 1, 96)}, "mixed_qkv: expected a tensor of 2 dimensions"),
    "state": ({"checkpoint_state": None}, "checkpoint_state: expected a tensor of 4 dimensions"),
    "rows of the ring": ({"d_cache": None}, "d_cache: expected a tensor .blocks, HV, R, V."),
    "heads": ({"d_cache": torch.zeros(2, 1, 16, 16)}, "d_cache: expected shape"),
    "decays": ({"g_cache": torch.zeros(2, 2, 16).half()}, "g_cache: expected dtype float32"),
    "cursor": ({"write_pos": torch.zeros(3).int()}, "write_pos: expected shape"),
    "marks": ({"is_flush": torch.zeros(3).int()}, "is_flush: expected shape"),
    "ring": (
        {"max_cache_len": 32},
        "max_cache_len: windows of 28 rows and 4 more need 32 ring rows, got 16",
    ),
    "null": ({"null_block_id": -2}, "null_block_id: expected at least -1"),
    "blocks": ({"ssm_state_indices": torch.zeros(3).int()}, "query_start_loc: expected shape"),
    "rows": ({"query_start_loc": torch.tensor([0, 9])}, "query_start_loc: expected bounds"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_call(changes: dict, message: str) -> None:
    call = {
        "mixed_qkv": torch.zeros(3, 96), "a": torch.zeros(3, 2), "b": torch.zeros(3, 2),
        "A_log": torch.zeros(2), "dt_bias": torch.zeros(2),
        "checkpoint_state": torch.zeros(2, 2, 16, 32), "d_cache": torch.zeros(2, 2, 16, 16),
        "k_cache": torch.zeros(2, 1, 16, 32), "g_cache": torch.zeros(2, 2, 16),
        "out": torch.zeros(3, 2, 16), "query_start_loc": torch.tensor([0, 3]),
        "ssm_state_indices": torch.tensor([1]), "write_pos": torch.zeros(2).int(),
        "cache_base": torch.zeros(2).int(), "is_flush": torch.zeros(2, dtype=torch.int8),
        "max_cache_len": 16, "max_spec_len": 4,
    }  # fmt: skip
    vllm.gdn_replayssm_spec_decode(**call)
    with pytest.raises(vllm.CallerError, match=message):
        vllm.gdn_replayssm_spec_decode(**call | changes)
