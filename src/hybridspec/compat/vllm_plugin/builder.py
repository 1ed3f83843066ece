"""The part of a metadata builder that tracks windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec.compat.vllm_plugin.cursors import PageCursors

__all__ = ["RingBuilder", "RingStep"]


class RingStep(NamedTuple):
    """What a layer needs in a step that verifies; the attribute `ring` of the step's metadata.

    Attributes:
        cursors: cursors of the group's blocks; captured graphs read them where they are.
        rest: vLLM's metadata of the rows that are not verified (prompts), or None without such.
    """

    cursors: PageCursors
    rest: Any | None


class RingBuilder:
    """Goes before vLLM's GDNAttentionMetadataBuilder; moves the cursors as a step begins."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        blocks = vllm_config.cache_config.num_gpu_blocks
        self.cursors = PageCursors(blocks, self.num_spec, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None, fast_build: bool = False,
    ) -> Any:  # fmt: skip
        """Build vLLM's metadata, then commit, reset, and add `ring` where rows are verified.

        A request has one block, so the block table is cut to its first column. Padding and runs
        without requests, a graph's capture included, name block 0, which moves nothing.
        """
        blocks = common_attn_metadata.block_table_tensor[:, :1]
        metadata = super().build(
            common_prefix_len,
            common_attn_metadata.replace(block_table_tensor=blocks),
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build,
        )
        in_prompt = metadata.non_spec_state_indices_tensor
        if in_prompt is not None:
            self.cursors.reset(in_prompt)
        count = metadata.num_spec_decodes
        if count == 0:
            return metadata
        self.cursors.begin_step(
            metadata.spec_state_indices_tensor[:count, 0],
            metadata.spec_query_start_loc[: count + 1].diff(),
            metadata.num_accepted_tokens[:count],
        )
        rest = _without_drafts(metadata) if metadata.num_prefills else None
        metadata.ring = RingStep(self.cursors, rest)
        return metadata


def _without_drafts(metadata: Any) -> Any:
    """Return the metadata of a batch that has only the rows which are not verified."""
    return replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_sequence_masks=None,
        spec_sequence_masks_cpu=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        num_accepted_tokens=None,
    )
