"""Requests that a vLLM layer with a ring serves step by step, against the definition.

A step is what vLLM's runner does of it: metadata from the builder, then the layer in a forward
context. The layer and the builder come from the released wheel or from `fake_vllm.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from helpers.gdn_oracle import Tokens, recurrence
from helpers.vllm_kernels import convolve

__all__ = ["Request", "Session", "run_session"]


@dataclass
class Request:
    """A request.

    Attributes:
        block: its block.
        prompt: rows of its prompt that are still to come.
        rows: rows that stand, each mixed_qkv, b and a.
        judged: rows of the last step, of which some are accepted before the next.
        accepted: how many of these.
    """

    block: int
    prompt: int
    rows: list[Tensor] = field(default_factory=list)
    judged: list[Tensor] = field(default_factory=list)
    accepted: int = 1


class Session:
    """A layer whose cache is NaN where nothing has been written, and its builder.

    Args:
        layer: a layer with a ring, without cache.
        builder: a builder of metadata for it.
        blocks: number of blocks.
        make_common: makes vLLM's CommonAttentionMetadata from its fields.
        run: runs layer._forward_core with metadata and four tensors.
    """

    def __init__(
        self, layer: Any, builder: Any, blocks: int, make_common: Any, run: Any, seed: int
    ) -> None:
        self.layer, self.builder, self.make_common, self.run = layer, builder, make_common, run
        self.generator = torch.Generator().manual_seed(seed)
        heads, width = layer.num_v_heads, layer.conv_dim
        self.sizes = (width, heads, heads)
        page = torch.full((blocks, self.page_bytes() + 64), 255, dtype=torch.uint8)
        layer.bind_kv_cache(page[:, None, None, : self.page_bytes()].view(torch.int8))

    def page_bytes(self) -> int:
        """Return the bytes of the states of a block."""
        parts = zip(self.layer.get_state_shape(), self.layer.get_state_dtype(), strict=True)
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts)

    def step(self, batch: list[tuple[Request, int]], padding: int = 0) -> Any:
        """Run rows of some requests and compare all outputs.

        Args:
            batch: requests and their rows, prompt rows as long as a request has them.
            padding: padding requests behind them.
        """
        for request, _ in batch:
            request.rows += request.judged[: request.accepted]
        new = [
            [torch.randn(sum(self.sizes), generator=self.generator) for _ in range(n)]
            for _, n in batch
        ]
        metadata = self.metadata(batch, padding)
        mixed, b, a = torch.stack(sum(new, [])).split(self.sizes, 1)
        out = torch.zeros(mixed.shape[0], self.layer.num_v_heads, self.layer.head_v_dim)
        self.run(self.layer, metadata, mixed, b, a, out)
        first = 0
        for (request, n), rows in zip(batch, new, strict=True):
            expected = self.expected(request.rows, rows)
            torch.testing.assert_close(out[first : first + n].double(), expected, **self.bounds())
            first += n
            if request.prompt:
                request.prompt -= n
                request.rows += rows
                request.judged = []
                request.accepted = 1
            else:
                request.judged = rows
        for ring in self.layer.kv_cache[2:]:  # vLLM itself writes states into padding
            assert ring[0].isnan().all()
        return metadata

    def bounds(self) -> dict[str, float]:
        """Return tolerances: fp32 here, and the order of sums differs."""
        return {"rtol": 2e-4, "atol": 2e-5}

    def metadata(self, batch: list[tuple[Request, int]], padding: int) -> Any:
        """Build the metadata of a batch as vLLM's runner does."""
        lengths = [n for _, n in batch] + [0] * padding
        blocks = [request.block for request, _ in batch] + [0] * padding
        accepted = [request.accepted for request, _ in batch] + [1] * padding
        drafts = [-1 if request.prompt else n - 1 for request, n in batch] + [-1] * padding
        done = [len(request.rows) for request, _ in batch] + [0] * padding
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor(done, dtype=torch.int32) + bounds.diff()
        table = torch.tensor(blocks, dtype=torch.int32)[:, None]
        common = self.make_common(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens,
            num_reqs=len(lengths),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.zeros(int(bounds[-1]), dtype=torch.int64),
            is_prefilling=torch.tensor([d < 0 for d in drafts]),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        return self.builder.build(
            0,
            common,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            num_decode_draft_tokens_cpu=torch.tensor(drafts, dtype=torch.int32),
        )

    def expected(self, stood: list[Tensor], rows: list[Tensor]) -> Tensor:
        """Return what the definition says of rows behind those that stand, fp64 [T, HV, V]."""
        layer = self.layer
        weight = layer.conv1d.weight.squeeze(1)
        mixed, b, a = torch.stack(stood + rows).split(self.sizes, 1)
        before = mixed.new_zeros(weight.shape[1] - 1, mixed.shape[1])
        mixed = convolve(before, mixed, weight)
        keys = layer.num_k_heads * layer.head_k_dim
        q, k, v = mixed.split((keys, keys, mixed.shape[1] - 2 * keys), 1)
        q, k = (part.unflatten(1, (layer.num_k_heads, layer.head_k_dim)) for part in (q, k))
        v = v.unflatten(1, (layer.num_v_heads, layer.head_v_dim))
        tokens = Tokens(q, k, v, a, b, layer.A_log, layer.dt_bias)
        state = torch.zeros(layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
        return recurrence(tokens, state)[0][len(stood) :]


def run_session(session: Session, drafts: int, steps: int) -> None:
    """Serve four requests in batches of any kind: chunks of prompts, drafts, both, and a reuse.

    Args:
        session: what serves them, with at least 8 blocks.
        drafts: most drafts of a step.
        steps: number of steps.
    """
    chance = random.Random(drafts)
    requests = [Request(block, 5 + block) for block in (3, 5, 1, 6)]
    session.step([(requests[0], 8)])  # a prompt alone
    session.step([(requests[0], drafts + 1), (requests[1], 4)])
    kinds = {(True,)}
    for step in range(steps):
        if step == steps // 2:  # a block that had a window gets another request
            requests[0] = Request(requests[0].block, 6)
            session.step([(requests[0], 3)])
        batch = []
        for request in chance.sample(requests, chance.randint(1, 4)):
            most = request.prompt or drafts + 1
            batch.append((request, chance.randint(1, most)))
            if request.judged:
                request.accepted = chance.randint(1, len(request.judged))
        in_prompt = {bool(request.prompt) for request, _ in batch}
        kinds.add(tuple(sorted(in_prompt)))
        # A batch without drafts has its requests with one row in front.
        if in_prompt == {True}:
            batch.sort(key=lambda entry: entry[1] > 1)
        session.step(batch, padding=step % 3)
    assert kinds == {(False,), (True,), (False, True)}
