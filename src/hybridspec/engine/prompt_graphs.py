"""The trunk over prompt rows as CUDA graphs, one for each size of a ladder.

Launched operator by operator, a forward of some hundred rows takes the host five times as long as
the device. What stands behind the trunk (first tokens, the draft head, cursors) is launched so:
it is little. Requests and rows that a batch does not fill are padding.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridspec.engine import capture
from hybridspec.engine.resolve import Resolved
from hybridspec.errors import UnsupportedError
from hybridspec.models.layers import PROMPT_ATTENTION, PROMPT_RULE
from hybridspec.ops.verify_plan import Step
from hybridspec.speculate import Decoder

__all__ = ["CAPTURED_CHUNK", "CHUNK_BESIDE", "PromptGraphs", "capture_prompts", "most_requests"]

_log = logging.getLogger("hybridspec")

# Most rows of one request: where nobody decodes, and beside those who wait for it. A row costs an
# H200 much the same in both (7 B: 15.6 and 9.7 ms a forward).
CAPTURED_CHUNK = 512
CHUNK_BESIDE = 256
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
_ROWS_PER_REQUEST = 32  # what the sizes are made for; each request costs the copy of its states


def most_requests(num_rows: int) -> int:
    """Return how many requests the graph of a size holds."""
    return max(num_rows // _ROWS_PER_REQUEST, 4)


def capture_prompts(decoder: Decoder, resolved: Resolved) -> PromptGraphs | None:
    """Capture forwards where that was asked for or nothing speaks against it, else return None.

    Raises:
        UnsupportedError: if it was asked for, and what prompts run through reads the batch on the
            host.
    """
    asked = resolved.config.capture_prompts
    if asked is None:
        asked = resolved.config.exact == "tokens" and not _reads_on_host(resolved)
    elif asked and (reason := _reads_on_host(resolved)):
        raise UnsupportedError(f"capture_prompts: {reason}")
    if not asked:
        return None
    rows = resolved.config.max_num_batched_tokens
    assert rows is not None  # resolved
    return PromptGraphs(decoder, max_rows=rows)


def _reads_on_host(resolved: Resolved) -> str:
    """Return which operator of prompts reads the batch on the host, if one does."""
    for op in (PROMPT_RULE, PROMPT_ATTENTION):
        name, reason = resolved.backends[op]
        if name not in ("fla", "triton"):
            return f"{op} runs through {name!r} here: {reason}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: capture.Replayed
    step: Step
    hidden: Tensor


class PromptGraphs:
    """Captured forwards over prompt rows.

    Args:
        decoder: whose trunk; its pools keep their addresses.
        max_rows: most rows of a forward; larger sizes are not captured.

    Attributes:
        nbytes: memory that the graphs hold.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int) -> None:
        self.decoder = decoder
        device = decoder.pools.device
        free, pool = capture.free_bytes(device), capture.memory_pool(device)
        sizes = [rows for rows in ROWS if rows <= max_rows]
        # The largest first: the smaller ones find room in what it has left.
        graphs = {size: self._capture(size, pool) for size in reversed(sizes)}
        self._graphs = [graphs[size] for size in sizes]
        self.nbytes = free - capture.free_bytes(device)
        _log.info("graphs of prompts: %d, %d MiB", len(sizes), self.nbytes >> 20)

    def forward(self, step: Step) -> Tensor | None:
        """Run the trunk over prompt rows.

        Args:
            step: layout of the rows, of the decoder's device.

        Returns:
            Hidden states [N, D], in memory that the next call overwrites; None if there are more
            rows or requests than the largest graph holds.
        """
        num_rows, num_requests = step.token_ids.shape[0], step.slots.shape[0]
        for captured in self._graphs:
            held = captured.step
            if num_rows <= held.token_ids.shape[0] and num_requests <= held.slots.shape[0]:
                _fill(held, step)
                captured.graph.replay()
                return captured.hidden[:num_rows]
        return None

    def _capture(self, num_rows: int, pool: Any) -> _Captured:
        decoder, device = self.decoder, self.decoder.pools.device
        step = replace(
            Step.create(
                max_requests=most_requests(num_rows),
                max_rows=num_rows,
                max_drafts=0,
                device=device,
            ),
            max_seqlen=min(num_rows, CAPTURED_CHUNK),
            is_prefill=True,
        )
        model = decoder.model
        hidden = torch.empty(num_rows, model.config.hidden_size, dtype=model.dtype, device=device)

        def run() -> None:
            hidden.copy_(decoder.forward(step))

        graph = capture.record(run, pool, device)
        return _Captured(graph=graph, step=step, hidden=hidden)


def _fill(held: Step, step: Step) -> None:
    """Copy a step into one that is larger; the rest of it becomes padding."""
    for name, padding in (
        ("cu_seqlens", step.token_ids.shape[0]),
        ("num_verify_tokens", 0),
        ("kv_len", 0),
        ("slots", -1),
        ("token_ids", 0),
        ("positions", 0),
        ("sources", -1),
    ):
        target, source = getattr(held, name), getattr(step, name)
        target[: source.shape[0]].copy_(source)
        target[source.shape[0] :].fill_(padding)
