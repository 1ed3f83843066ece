"""Launches of the kernels that choose tokens: how many programs share a row.

The kernels are imported when they are launched, so this needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.ops._triton_support import capability, round_up_to_power_of_two
from hybridspec.ops.sampling.call import Rows, Text
from hybridspec.ops.sampling.mass import TILE
from hybridspec.ops.sampling.table import SamplingTable, SamplingUses

__all__ = ["LaunchConfig", "choose", "launch_config"]

# Products and sums must round as PyTorch does: no fused multiply-add.
_EXACT = {"enable_fp_fusion": False}
_PROGRAMS = 4096  # of a scan: several waves of them, so that the last one is a small part
_WEIGHERS = 3072  # programs that weigh: they look at each other's sums between tiles
_ALONE = 4  # that a program reads which settles a row alone
_LIST = 1024  # tokens that a top_k may keep before a row is settled slowly
_GROUP = 64  # entries of a bias, or bad words, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a row is shared out; the tokens do not depend on it.

    Attributes:
        tiles_per_program: tiles that a program reads one after the other, the first time.
        num_splits: programs of a row, the second time.
        num_warps: warps of a program that edits or scans.
        pick_warps, weigh_warps, settle_warps: warps of a program of these kernels.
    """

    tiles_per_program: int
    num_splits: int
    num_warps: int = 4
    pick_warps: int = 4
    weigh_warps: int = 4
    settle_warps: int = 8


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the launches leave for each other: of each tile, and of each row."""

    facts: Tensor
    sums: Tensor
    peaks: Tensor
    masses: Tensor
    ratios: Tensor
    tokens: Tensor
    chunks: Tensor
    modes: Tensor
    candidates: Tensor
    lists: Tensor

    @classmethod
    def of(cls, num_rows: int, num_tiles: int, has_filters: bool, device: torch.device) -> _Scratch:
        """Cut two allocations into pieces: fields of eight bytes, and of four."""
        from hybridspec.ops.sampling.triton_choose import CHUNKS, FACTS, PIVOTS

        num_all, num_some = num_rows * num_tiles, num_rows if has_filters else 0
        sizes = [num_some * FACTS.value, num_some * (PIVOTS.value + 1)]
        wide = torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        sizes = [num_all] * 4 + [num_all * CHUNKS.value * has_filters, num_some]
        sizes += [num_some * PIVOTS.value, num_some * _LIST]
        narrow = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        peaks, masses, ratios, tokens, chunks, modes, candidates, lists = narrow
        floats = torch.float32
        return cls(
            facts=wide[0].view(torch.float64),
            sums=wide[1],
            peaks=peaks.view(floats),
            masses=masses.view(floats),
            ratios=ratios.view(floats),
            tokens=tokens,
            chunks=chunks.view(floats),
            modes=modes,
            candidates=candidates,
            lists=lists,
        )


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Choose the launches for so many rows."""
    num_tiles = -(-vocab_size // TILE)
    return LaunchConfig(
        tiles_per_program=max(1, min(num_tiles, num_rows * num_tiles // _PROGRAMS)),
        num_splits=max(1, min(_WEIGHERS // num_rows, num_tiles)),
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
    from hybridspec.ops.sampling import triton_choose, triton_weigh

    if not logits.shape[0]:
        return
    num_rows, vocab = logits.shape
    config = config or launch_config(num_rows, vocab)
    block = TILE if vocab > TILE else max(16, round_up_to_power_of_two(vocab))
    num_tiles = -(-vocab // block)
    has_filters = uses.has_noise and uses.has_filters
    grid = (num_rows, -(-num_tiles // config.tiles_per_program))
    if uses.has_edits or rows.mask is not None:
        _edit(logits, rows, table, text, uses, grid, config, block)
    scratch = _Scratch.of(num_rows, num_tiles, has_filters, logits.device)
    columns = (logits, rows.slots, rows.offsets, text.seq_len, table.temperature, table.seed)
    filters = (table.top_k, table.top_p, table.min_p)
    tiles = (scratch.peaks, scratch.masses, scratch.ratios)
    open_rows = (scratch.modes, scratch.facts, scratch.candidates)
    sizes = {"vocab": vocab, "num_tiles": num_tiles, "row_stride": logits.stride(0)}
    switches = {"HAS_NOISE": uses.has_noise, "HAS_FILTERS": has_filters}
    is_overlapped = capability(logits) >= (9, 0)
    options = {"BLOCK": block, "IS_OVERLAPPED": is_overlapped, **_EXACT}
    # The scan is not launched early, so what ran before the call has ended when others begin.
    behind = {**options, **({"launch_pdl": True} if is_overlapped else {})}
    padded = round_up_to_power_of_two(num_tiles)
    with torch.cuda.device_of(logits):
        triton_choose.scan_kernel[grid](
            *columns, table.top_k, table.min_p, *tiles, scratch.tokens, scratch.chunks,
            tiles_per_program=config.tiles_per_program, **sizes, **switches, **options,
            num_warps=config.num_warps,
        )  # fmt: skip
        triton_choose.pick_kernel[(num_rows,)](
            *columns, *filters, *tiles, scratch.tokens, scratch.chunks, out, *open_rows,
            scratch.sums, **sizes, **switches, TILES=padded, **behind,
            num_warps=config.pick_warps,
        )  # fmt: skip
        if not has_filters:
            return
        behind |= {"LENGTH": _LIST}
        triton_weigh.weigh_kernel[(num_rows, config.num_splits)](
            logits, scratch.peaks, scratch.masses, scratch.modes, scratch.facts, scratch.sums,
            scratch.lists, **sizes, **behind, num_warps=config.weigh_warps,
            SHARE=round_up_to_power_of_two(-(-num_tiles // config.num_splits)),
        )  # fmt: skip
        triton_weigh.settle_kernel[(num_rows,)](
            *columns, *filters, *tiles, *open_rows, scratch.sums, scratch.lists, out,
            **sizes, **behind, num_warps=config.settle_warps, TILES=padded,
            GROUP=min(_ALONE, padded),
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
