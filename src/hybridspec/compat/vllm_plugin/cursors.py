"""The window of each block, and how a step moves it."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.compat.vllm import (
    commit_gdn_replayssm_spec,
    reset_gdn_replayssm_spec_cursors,
)
from hybridspec.compat.vllm_plugin.pages import ring_rows

__all__ = ["PageCursors"]

_LONGEST_WINDOW = 16  # of the CUDA kernel


class PageCursors:
    """Cursors of the blocks of a KV cache group, moved when the metadata of a step are built.

    vLLM tells how many rows of a request were accepted one step later, and says 1 after a prompt.
    Hence the rows that are still to be judged: after a prompt there are none, so nothing is
    committed.

    Args:
        num_blocks: blocks of the cache; block 0 is padding.
        drafts: most drafts of a step.
        device: where the cache lies.

    Attributes:
        write_pos: rows of each window, [num_blocks], int32.
        cache_base: first ring row of each window, [num_blocks], int32.
        is_flush: whether the step folds the window, [num_blocks], int8.
        num_pending: rows that the last step of a block verified, [num_blocks], int32.
        max_spec_len: most rows of a step.
        max_cache_len: most rows of a window and a step together.
    """

    def __init__(self, num_blocks: int, drafts: int, device: torch.device) -> None:
        self.write_pos, self.cache_base, self.num_pending = (
            torch.zeros(num_blocks, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.is_flush = torch.zeros(num_blocks, dtype=torch.int8, device=device)
        self.max_spec_len = drafts + 1
        self.max_cache_len = min(ring_rows(drafts), _LONGEST_WINDOW + drafts + 1)

    def begin_step(self, blocks: Tensor, num_rows: Tensor, num_accepted: Tensor) -> None:
        """Commit what the last step had accepted, and note the rows of this one.

        Args:
            blocks: block of each request, [B], int32; any stride.
            num_rows: rows of this step, [B], int32.
            num_accepted: accepted rows of the last step, the bonus token's included, [B], int32.
        """
        accepted = torch.minimum(num_accepted, self.num_pending[blocks])
        commit_gdn_replayssm_spec(
            self.write_pos, self.cache_base, self.is_flush, accepted, blocks,
            self.max_cache_len, self.max_spec_len,
        )  # fmt: skip
        self.num_pending[blocks] = num_rows

    def reset(self, blocks: Tensor) -> None:
        """Empty the windows of requests that are in their prompt.

        Args:
            blocks: block of each request, [B], int32; any stride.
        """
        reset_gdn_replayssm_spec_cursors(
            self.write_pos, self.cache_base, self.is_flush, torch.ones_like(blocks), blocks,
            self.max_cache_len, self.max_spec_len,
        )  # fmt: skip
        self.num_pending[blocks] = 0
