"""Checks of ReplaySSM's functions on one token and on cursors, for any backend."""

from __future__ import annotations

import torch

from helpers.gdn_oracle import recurrence
from helpers.tolerances import KERNEL_FACTOR, assert_close
from helpers.vllm_layers import PRECISIONS, Layer, Shape
from hybridspec.compat import vllm

__all__ = ["check_commits", "check_plain_tokens", "check_resets", "check_single_tokens"]

F32 = torch.float32
NARROW = Shape(1, 2, 32, 16)


def check_single_tokens(length: int, precision: str, device: str, shape: Shape = NARROW) -> None:
    """Windows of all lengths; the one that fills the cache goes into the state with its token."""
    layer = Layer(shape, PRECISIONS[precision], 7, length, device=device)
    requests = {4: length - 1, 0: 1, 6: 0, 2: length // 2, -1: length - 1}
    for block, history in requests.items():
        if block > 0:
            layer.start(block)
            layer.fill(block, 0, history)
    rows, before = layer.draw(5), layer.page.clone()
    states = [layer.state_after_window(block) for block in requests]
    out = torch.full((5, 1, 2, shape.value_dim), 7.0, dtype=layer.act, device=device)
    found = vllm.fused_recurrent_gated_delta_rule_replayssm(
        *rows, layer.A_log, layer.dt_bias, shape.key_dim**-0.5, layer.state, **layer.caches,
        out=out, ssm_state_indices=layer.column(list(requests)),
        write_pos=layer.ints(*requests.values()),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert found[0] is out and found[1] is layer.state
    assert not out[[1, 4]].any()
    live = []
    for i, (block, history) in enumerate(requests.items()):
        if block > 0:
            tokens, is_full = layer.tokens(rows).rows(i, i + 1), history == length - 1
            layer.check_request(block, i, 1, tokens, states[i], out[:, 0], 0)
            live.append((block, 1, is_full))
            if is_full:
                state = recurrence(tokens, states[i])[2][-1]
                assert_close(
                    layer.state[block].cpu(),
                    state,
                    layer.state_dtype,
                    layer.act,
                    factor=KERNEL_FACTOR,
                )
    layer.assert_kept(before, live)


def check_plain_tokens(precision: str, device: str) -> None:
    """Two requests and padding, blocks in a column of a table."""
    layer = Layer(Shape(2, 6, 48, 32), PRECISIONS[precision], 6, 16, device=device)
    layer.start(5, 3)
    rows, before, blocks = layer.draw(4), layer.page.clone(), [3, -1, 5, 0]
    states = {block: layer.state[block].cpu().clone() for block in (3, 5)}
    out = torch.full((4, 1, 6, 32), 7.0, dtype=layer.act, device=device)
    found = vllm.fused_recurrent_gated_delta_rule_packed_decode(
        *rows, layer.A_log, layer.dt_bias, 48**-0.5, layer.state, out, layer.column(blocks), True
    )
    assert found[0] is out and found[1] is layer.state
    assert not out[[1, 3]].any()
    for row in (0, 2):
        block, tokens = blocks[row], layer.tokens(rows).rows(row, row + 1)
        y, _, after = recurrence(tokens, states[block])
        assert_close(out[row].cpu(), y, layer.act, F32)
        assert_close(layer.state[block].cpu(), after[-1], layer.state_dtype, F32)
    layer.assert_kept(before, [(3, 0, 1), (5, 0, 1)])


def check_commits(device: str) -> None:
    """Marked, unmarked, padding, nothing accepted; blocks that are not named keep theirs."""
    layer = Layer(Shape(1, 1, 16, 16), PRECISIONS["s32_a32"], 9, 32, device=device)
    write_pos, cache_base, is_flush = layer.cursors
    write_pos.copy_(layer.ints(3, 9, 16, 17, 5, 20, 7, 18, 1))
    cache_base.copy_(layer.ints(5, 30, 20, 3, 9, 31, 2, 4, 6))
    is_flush.copy_(layer.ints(1, 0, 1, 1, 0, 1, 0, 0, 0))
    blocks, accepted = layer.column([2, 0, 4, 3, -1, 8, 1]), layer.ints(3, 4, 0, 0, 4, 2, 4)
    wide = torch.stack((accepted, accepted + 50), 1).long()
    vllm.commit_gdn_replayssm_spec(*layer.cursors, wide[:, 0], blocks, 20, 4)
    assert write_pos.tolist() == [3, 13, 3, 0, 5, 20, 7, 18, 3]
    assert cache_base.tolist() == [5, 30, 4, 3, 9, 31, 2, 4, 6]
    assert is_flush.tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 0]

    write_pos[1], cache_base[1], is_flush[1] = 13, 30, 1
    vllm.commit_gdn_replayssm_spec(*layer.cursors, layer.ints(2), layer.ints(1), 20, 4, 64)
    assert (write_pos[1], cache_base[1], is_flush[1]) == (2, 43, 0)
    vllm.commit_gdn_replayssm_spec(*layer.cursors, layer.ints(1), layer.ints(0), 20, 4, None, -1)
    assert (write_pos[0], cache_base[0], is_flush[0]) == (1, 8, 0)


def check_resets(dtype: torch.dtype, device: str) -> None:
    layer = Layer(Shape(1, 1, 16, 16), PRECISIONS["s32_a32"], 6, 16, device=device)
    for length, mark in ((16, 0), (8, 0), (7, 1)):
        for part in layer.cursors:
            part.fill_(5)
        do_reset = layer.ints(1, 1, 0, 1, dtype=dtype)
        blocks = layer.column([4, 0, 3, 2])
        vllm.reset_gdn_replayssm_spec_cursors(*layer.cursors, do_reset, blocks, length, 4)
        for part, value in zip(layer.cursors, (0, 0, mark), strict=True):
            assert part.tolist() == [5, 5, value, 5, value, 5]
