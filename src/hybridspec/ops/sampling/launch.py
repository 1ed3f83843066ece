"""Launches of the kernels that choose tokens: how many programs share a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import triton_choose, triton_edit
from .mass import TILE
from .table import SamplingTable, SamplingUses

__all__ = ["LaunchConfig", "choose", "launch_config"]

# Products and sums must round as PyTorch does: no fused multiply-add.
_EXACT = {"enable_fp_fusion": False}
_PROGRAMS = 1024  # what keeps a device busy
_MOST_SPLITS = 16
_GROUP = 64  # entries of a bias, or bad words, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a row is shared out; the tokens do not depend on it.

    Attributes:
        tiles_per_program: tiles that a program reads in the first launch.
        num_splits: programs of a row in the second launch.
        num_warps: warps of a program.
    """

    tiles_per_program: int
    num_splits: int
    num_warps: int


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Choose the launches for so many rows."""
    num_tiles = -(-vocab_size // TILE)
    return LaunchConfig(
        tiles_per_program=max(1, min(num_tiles, num_rows * num_tiles // _PROGRAMS)),
        num_splits=max(1, min(_MOST_SPLITS, num_tiles, _PROGRAMS // (2 * num_rows))),
        num_warps=8 if vocab_size >= TILE else 4,
    )


def choose(
    logits: Tensor,
    slots: Tensor,
    offsets: Tensor,
    table: SamplingTable,
    seq_len: Tensor,
    drafts: Tensor,
    token_pages: Tensor,
    page_table: Tensor,
    mask: Tensor | None,
    uses: SamplingUses,
    out: Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write the token of each row; see choose.py."""
    if not logits.shape[0]:
        return
    num_rows, vocab = logits.shape
    config = config or launch_config(num_rows, vocab)
    block = TILE if vocab > TILE else max(16, triton.next_power_of_2(vocab))
    num_tiles, splits = triton.cdiv(vocab, block), config.num_splits
    has_filters = uses.has_noise and uses.has_filters
    grid = (num_rows, triton.cdiv(num_tiles, config.tiles_per_program))
    if uses.has_edits or mask is not None:
        with torch.cuda.device_of(logits):
            triton_edit.edit_kernel[grid](
                logits, slots, offsets, seq_len, drafts, token_pages, page_table,
                slots if mask is None else mask, table.repetition, table.frequency, table.presence,
                table.ends_from, table.end_bits, table.allowed_bits, table.count_row, table.counts,
                table.bias_start, table.bias_len, table.bias_tokens, table.bias_values,
                table.word_start, table.word_len, table.word_bounds, table.word_tokens, vocab,
                table.end_bits.shape[1], token_pages.shape[1], config.tiles_per_program,
                logits.stride(0), drafts.stride(0), token_pages.stride(0), page_table.stride(0),
                0 if mask is None else mask.stride(0), HAS_COUNTS=uses.has_counts,
                HAS_BIAS=uses.has_bias, HAS_WORDS=uses.has_words, HAS_MASKS=uses.has_masks,
                HAS_MASK=mask is not None, BLOCK=block, GROUP=_GROUP, num_warps=config.num_warps,
                **_EXACT,
            )  # fmt: skip
    # Fields of eight bytes, then of four.
    sizes = (num_rows * num_tiles,) * 2 + (num_rows * splits * 2,)
    wide = torch.empty(sum(sizes), dtype=torch.int64, device=logits.device)
    masses, scores, parts = wide.split(sizes)
    narrow = torch.empty(num_rows * (3 * num_tiles + 1), dtype=torch.int32, device=logits.device)
    peaks, winners, tokens, arrived = narrow.split((num_rows * num_tiles,) * 3 + (num_rows,))
    scores, peaks, winners = (
        scores.view(torch.float64), peaks.view(torch.float32), winners.view(torch.float32),
    )  # fmt: skip
    with torch.cuda.device_of(logits):
        triton_choose.scan_kernel[grid](
            logits, slots, offsets, seq_len, table.temperature, table.seed, peaks, masses, scores,
            tokens, winners, arrived, vocab, num_tiles, config.tiles_per_program, logits.stride(0),
            HAS_NOISE=uses.has_noise, HAS_FILTERS=has_filters, BLOCK=block,
            num_warps=config.num_warps, **_EXACT,
        )  # fmt: skip
        triton_choose.settle_kernel[(num_rows, splits if has_filters else 1)](
            logits, slots, offsets, seq_len, table.temperature, table.seed, table.top_k,
            table.top_p, table.min_p, peaks, masses, scores, tokens, winners, parts, arrived, out,
            vocab, num_tiles, logits.stride(0), HAS_NOISE=uses.has_noise,
            HAS_FILTERS=has_filters, TILES=triton.next_power_of_2(num_tiles),
            SPLITS=triton.next_power_of_2(splits), BLOCK=block, num_warps=config.num_warps,
            **_EXACT,
        )  # fmt: skip
