"""Launches of the kernels that choose tokens: how many programs share a row.

The kernels are imported when they are launched, so this needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._triton_support import round_up_to_power_of_two
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.mass import TILE
from hybridspec.ops.sampling.table import SamplingTable, SamplingUses

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
        num_splits: programs of a row that weigh tokens for top_p.
        num_warps: warps of a program.
    """

    tiles_per_program: int
    num_splits: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the launches leave for each other: of each tile, of each row, of each program."""

    masses: Tensor
    limits: Tensor
    parts: Tensor
    peaks: Tensor
    ratios: Tensor
    tokens: Tensor
    pair: Tensor
    pivots: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, num_rows: int, num_tiles: int, splits: int, device: torch.device) -> _Scratch:
        """Cut two allocations into pieces: fields of eight bytes, and of four."""
        num_all = num_rows * num_tiles
        sizes = (num_all, num_rows, num_rows * splits * 2)
        wide = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        sizes = (num_all, num_all, num_all, num_rows, num_rows * 2, num_rows)
        narrow = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        peaks, ratios, tokens, pair, pivots, arrived = narrow
        floats = (tensor.view(torch.float32) for tensor in (peaks, ratios, pivots))
        peaks, ratios, pivots = floats
        limits = wide[1].view(torch.float64)
        return cls(wide[0], limits, wide[2], peaks, ratios, tokens, pair, pivots, arrived)


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Choose the launches for so many rows."""
    num_tiles = -(-vocab_size // TILE)
    return LaunchConfig(
        tiles_per_program=max(1, min(num_tiles, num_rows * num_tiles // _PROGRAMS)),
        num_splits=max(1, min(_MOST_SPLITS, num_tiles, _PROGRAMS // num_rows)),
        num_warps=8 if vocab_size >= 1024 else 4,
    )


def choose(
    logits: Tensor,
    rows: Rows,
    table: SamplingTable,
    text: Text,
    uses: SamplingUses,
    out: Tensor,
    config: LaunchConfig | None = None,
) -> None:
    """Write the token of each row; see choose.py."""
    from hybridspec.ops.sampling import triton_choose

    if not logits.shape[0]:
        return
    num_rows, vocab = logits.shape
    config = config or launch_config(num_rows, vocab)
    block = TILE if vocab > TILE else max(16, round_up_to_power_of_two(vocab))
    num_tiles = -(-vocab // block)
    splits = min(config.num_splits, num_tiles)
    has_filters = uses.has_noise and uses.has_filters
    grid = (num_rows, -(-num_tiles // config.tiles_per_program))
    if uses.has_edits or rows.mask is not None:
        _edit(logits, rows, table, text, uses, grid, config, block)
    scratch = _Scratch.of(num_rows, num_tiles, splits, logits.device)
    columns = (logits, rows.slots, rows.offsets, text.seq_len, table.temperature, table.seed)
    sizes = {"vocab": vocab, "num_tiles": num_tiles, "row_stride": logits.stride(0)}
    switches = {"HAS_NOISE": uses.has_noise, "HAS_FILTERS": has_filters}
    options = {"BLOCK": block, "num_warps": config.num_warps, **_EXACT}
    tiles = round_up_to_power_of_two(num_tiles)
    with torch.cuda.device_of(logits):
        triton_choose.scan_kernel[grid](
            *columns, table.top_p, scratch.peaks, scratch.masses, scratch.ratios, scratch.tokens,
            tiles_per_program=config.tiles_per_program, **sizes, **switches, **options,
        )  # fmt: skip
        triton_choose.pick_kernel[(num_rows,)](
            *columns, table.top_k, table.top_p, table.min_p, scratch.peaks, scratch.masses,
            scratch.ratios, scratch.tokens, out, scratch.pair, scratch.pivots, scratch.limits,
            scratch.arrived, **sizes, **switches, TILES=tiles, **options,
        )  # fmt: skip
        if has_filters:
            triton_choose.weigh_kernel[(num_rows, splits)](
                *columns, table.min_p, scratch.peaks, scratch.ratios, scratch.pair, scratch.pivots,
                scratch.limits, scratch.parts, scratch.arrived, out,
                tiles_per_program=-(-num_tiles // splits), **sizes, TILES=tiles,
                SPLITS=round_up_to_power_of_two(splits), **options,
            )  # fmt: skip


def _edit(
    logits: Tensor,
    rows: Rows,
    table: SamplingTable,
    text: Text,
    uses: SamplingUses,
    grid: tuple[int, int],
    config: LaunchConfig,
    block: int,
) -> None:
    """Apply the options that change logits, in place."""
    from hybridspec.ops.sampling.triton_edit import edit_kernel

    (slots, offsets, mask), (seq_len, drafts, token_pages, page_table) = rows, text
    with torch.cuda.device_of(logits):
        edit_kernel[grid](
            logits, slots, offsets, seq_len, drafts, token_pages, page_table,
            slots if mask is None else mask, table.repetition, table.frequency, table.presence,
            table.ends_from, table.end_bits, table.allowed_bits, table.count_row, table.counts,
            table.bias_start, table.bias_len, table.bias_tokens, table.bias_values,
            table.word_start, table.word_len, table.word_bounds, table.word_tokens,
            logits.shape[1], table.end_bits.shape[1], token_pages.shape[1],
            config.tiles_per_program, logits.stride(0), drafts.stride(0), token_pages.stride(0),
            page_table.stride(0), 0 if mask is None else mask.stride(0),
            HAS_COUNTS=uses.has_counts, HAS_BIAS=uses.has_bias, HAS_WORDS=uses.has_words,
            HAS_MASKS=uses.has_masks, HAS_MASK=mask is not None, BLOCK=block, GROUP=_GROUP,
            num_warps=config.num_warps, **_EXACT,
        )  # fmt: skip
