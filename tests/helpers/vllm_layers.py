"""One layer as vLLM's cache holds it, ReplaySSM's calls on it, and what they must do.

A page of a block has the checkpoint and the three caches one after another; all that a call must
not read is NaN, and all that it must not write is compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.gdn_cases import assert_same_bits, offsets
from helpers.gdn_oracle import Tokens, gates, prepared, recurrence, window_state
from helpers.tolerances import KERNEL_FACTOR, assert_close
from hybridspec.compat import vllm

__all__ = ["PRECISIONS", "Layer", "Shape", "one_token_steps", "ring_rows"]

F32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = {"s32_a32": (F32, F32), "s32_a16": (F32, BF16), "s16_a16": (BF16, BF16)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: key heads, value heads, K, V."""

    heads: int = 2
    value_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64

    @property
    def width(self) -> int:
        """Columns of q, k and v together."""
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


class Layer:
    """Pages of some blocks full of NaN, cursors of zero, and parameters.

    Args:
        shape: sizes.
        precision: dtypes of the checkpoint, and of rows and caches.
        blocks: number of pages.
        rows: ring rows (R), or rows of the linear cache (L).
        seed: of parameters and rows.

    Attributes:
        is_rounded: whether coefficients of products are rounded to the dtype of rows, as kernels
            on a device do.
    """

    is_rounded = False

    def __init__(
        self,
        shape: Shape,
        precision: tuple[torch.dtype, torch.dtype],
        blocks: int,
        rows: int,
        *,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.shape, self.device, self.rows = shape, device, rows
        self.state_dtype, self.act = precision
        self.generator = torch.Generator().manual_seed(seed)
        s = shape
        parts = {
            "state": (self.state_dtype, (s.value_heads, s.value_dim, s.key_dim)),
            "d": (self.act, (s.value_heads, rows, s.value_dim)),
            "k": (self.act, (s.heads, rows, s.key_dim)),
            "g": (F32, (s.value_heads, rows)),
        }
        sizes = [dtype.itemsize * torch.Size(sizes).numel() for dtype, sizes in parts.values()]
        self.page = torch.zeros(blocks, sum(sizes) + 64, dtype=torch.uint8, device=device)
        pools, first = {}, 32
        for (name, (dtype, part)), size in zip(parts.items(), sizes, strict=True):
            pools[name] = self.page[:, first : first + size].view(dtype).unflatten(1, part)
            pools[name].fill_(torch.nan)
            first += size
        self.state, self.d, self.k, self.g = pools.values()
        self.write_pos, self.cache_base = (
            torch.zeros(blocks, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.is_flush = torch.zeros(blocks, dtype=torch.int8, device=device)
        self.A_log, self.dt_bias = (self.normal(s.value_heads, dtype=F32) for _ in range(2))

    @property
    def caches(self) -> dict[str, Tensor]:
        """The caches by their names as arguments."""
        return {"d_cache": self.d, "k_cache": self.k, "g_cache": self.g}

    @property
    def cursors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cursors and marks, in the order of arguments."""
        return self.write_pos, self.cache_base, self.is_flush

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random numbers, by default in the dtype of rows."""
        return torch.randn(sizes, generator=self.generator).to(self.device, dtype or self.act)

    def start(self, *blocks: int) -> None:
        """Give blocks a random checkpoint."""
        for block in blocks:
            self.state[block] = 0.1 * self.normal(*self.state.shape[1:], dtype=self.state_dtype)

    def fill(self, block: int, start: int, history: int) -> None:
        """Give a block a window of random rows."""
        self.cache_base[block], self.write_pos[block] = start % self.rows, history
        at, s = ring_rows(self, block, 0, history), self.shape
        keys = self.normal(s.heads, history, s.key_dim)
        self.k[block][:, at] = torch.nn.functional.normalize(keys, dim=-1)
        self.d[block][:, at] = self.normal(s.value_heads, history, s.value_dim)
        self.g[block][:, at] = -self.normal(s.value_heads, history, dtype=F32).abs()

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return mixed_qkv, a and b of some rows, slices of wider ones."""
        heads, wide = self.shape.value_heads, self.normal(count, self.shape.width + 24)
        pair = self.normal(count, 2 * heads + 8)
        return wide[:, 8:-16], pair[:, 8 : 8 + heads], pair[:, 8 + heads :]

    def tokens(self, rows: tuple[Tensor, Tensor, Tensor]) -> Tokens:
        """Return rows as the oracle takes them, on the CPU."""
        s, (mixed, a, b) = self.shape, (part.cpu() for part in rows)
        keys = s.heads * s.key_dim
        q, k, v = mixed.split((keys, keys, s.value_heads * s.value_dim), 1)
        sizes = (s.heads, s.key_dim)
        return Tokens(
            q.unflatten(1, sizes), k.unflatten(1, sizes),
            v.unflatten(1, (s.value_heads, s.value_dim)), a, b, self.A_log.cpu(),
            self.dt_bias.cpu(),
        )  # fmt: skip

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers where the layer is."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def column(self, blocks: list[int]) -> Tensor:
        """Return a column of a block table."""
        table = torch.full((len(blocks), 3), 1, dtype=torch.int32, device=self.device)
        table[:, 0] = self.ints(*blocks)
        return table[:, 0]

    def state_after_window(self, block: int) -> Tensor:
        """Return the exact state [HV, V, K] behind the live rows of a block."""
        at = ring_rows(self, block, 0, int(self.write_pos[block]))
        k, d, g = (pool[block][:, at].transpose(0, 1).cpu() for pool in (self.k, self.d, self.g))
        return window_state(self.state[block].cpu(), k, d, g.double().cumsum(0))

    def poison(self, blocks: list[int]) -> None:
        """Make every ring row outside the windows of some blocks NaN."""
        for block in blocks:
            dead = torch.ones(self.rows, dtype=torch.bool, device=self.device)
            dead[ring_rows(self, block, 0, int(self.write_pos[block]))] = False
            for pool in (self.k, self.d, self.g):
                pool[block][:, dead] = torch.nan

    def verify(
        self, rows: tuple[Tensor, Tensor, Tensor], bounds: Tensor, blocks: Tensor, out: Tensor,
        **options: object,
    ) -> Tensor:  # fmt: skip
        """Call gdn_replayssm_spec_decode."""
        return vllm.gdn_replayssm_spec_decode(
            *rows, self.A_log, self.dt_bias, self.state, **self.caches, out=out,
            query_start_loc=bounds, ssm_state_indices=blocks, write_pos=self.write_pos,
            cache_base=self.cache_base, is_flush=self.is_flush, **options,
        )  # fmt: skip

    def check(
        self, blocks: list[int], lengths: list[int], *, tail: int = 0, null: int = 0,
        mode: str = "both", **options: object,
    ) -> Tensor:  # fmt: skip
        """Verify random rows and compare outputs, appended rows, checkpoints and all other bits."""
        rows, sizes = self.draw(sum(lengths) + tail), (self.shape.value_heads, self.shape.value_dim)
        out = torch.full((len(rows[0]), *sizes), 7.0, dtype=self.act, device=self.device)
        bounds, before = offsets(lengths, self.device), self.page.clone()
        cursors = [part.clone() for part in self.cursors]
        marks, untouched = self.is_flush.tolist(), torch.full_like(out, 7.0)
        expected = []
        for i, (block, n) in enumerate(zip(blocks, lengths, strict=True)):
            if block > null and mode in ("both", ("verify", "flush")[marks[block]]):
                state, first = self.state_after_window(block), int(bounds[i])
                tokens = self.tokens(rows).rows(first, first + n)
                expected.append((block, first, n, tokens, state))
        found = self.verify(
            rows, bounds, self.column(blocks), out, null_block_id=null, launch_mode=mode, **options
        )
        assert found is out
        for part, old in zip(self.cursors, cursors, strict=True):
            assert_same_bits(part, old)
        for block, first, n, tokens, state in expected:
            self.check_request(block, first, n, tokens, state, out, marks[block])
            untouched[first : first + n] = out[first : first + n]
        for i, block in enumerate(blocks):
            if block <= null and mode in ("both", "verify"):
                untouched[bounds[i] : bounds[i + 1]] = 0.0
        if mode == "both":
            untouched[sum(lengths) :] = 0.0
        assert_same_bits(out, untouched)
        requests = [(block, n, marks[block]) for block, _, n, *_ in expected]
        self.assert_kept(before, requests)
        return out

    def check_request(
        self, block: int, first: int, n: int, tokens: Tokens, state: Tensor, out: Tensor, mark: int
    ) -> None:
        """Compare what a request of `tokens` did with the exact state before them.

        Args:
            block: its block, with the cursors of before the call.
            first: its first row of `out`.
            n: its rows.
            tokens: the same rows.
            state: state behind its window.
            out: outputs, [N, HV, V].
            mark: whether the window was folded.
        """
        is_rounded = self.is_rounded or self.device != "cpu"
        factor = KERNEL_FACTOR if is_rounded else 1.0
        dtypes = (self.act, F32)
        y, u, _ = recurrence(tokens, state)
        at = ring_rows(self, block, int(self.write_pos[block]), n)
        assert_close(out[first : first + n].cpu(), y, *dtypes, factor=factor)
        found = [pool[block][:, at].transpose(0, 1).cpu() for pool in (self.k, self.d, self.g)]
        assert_close(found[0], prepared(tokens.k), *dtypes)
        assert_close(found[1], u, *dtypes, factor=factor)
        assert_close(found[2], gates(tokens)[0], F32)
        if mark:
            inner = dtypes if is_rounded else (F32,)
            assert_close(self.state[block].cpu(), state, self.state_dtype, *inner, factor=factor)

    def assert_kept(self, before: Tensor, requests: list[tuple[int, int, int]]) -> None:
        """Compare pages bit for bit, but for the rows appended and the checkpoints folded.

        Args:
            before: pages before the call.
            requests: block, rows and whether it folded.
        """
        now = self.page.clone()
        pools = (self.state, self.d, self.k, self.g)
        written = [pool.clone() for pool in pools]
        self.page.copy_(before)
        for block, n, mark in requests:
            at = ring_rows(self, block, int(self.write_pos[block]), n)
            for pool, new in zip(pools[1:], written[1:], strict=True):
                pool[block][:, at] = new[block][:, at]
            if mark:
                self.state[block] = written[0][block]
        assert_same_bits(self.page, now)
        self.page.copy_(now)


def ring_rows(layer: Layer, block: int, first: int, count: int) -> Tensor:
    """Return the ring rows of window rows first..first+count-1 of a block."""
    rows = int(layer.cache_base[block]) + first + torch.arange(count, device=layer.device)
    return rows % layer.rows


def one_token_steps(
    layer: Layer, rows: tuple[Tensor, Tensor, Tensor], block: int, first: int
) -> Tensor:
    """Run rows one after another through fused_recurrent_gated_delta_rule_replayssm.

    The first one goes into row `first` of the linear cache. Returns the outputs [T, HV, V].
    """
    outputs = [rows[0].new_empty(0, *layer.state.shape[1:3])]
    for t in range(rows[0].shape[0]):
        out = torch.full(
            (1, 1, *layer.state.shape[1:3]), torch.nan, dtype=layer.act, device=layer.device
        )
        vllm.fused_recurrent_gated_delta_rule_replayssm(
            *(part[t : t + 1] for part in rows), layer.A_log, layer.dt_bias,
            layer.shape.key_dim**-0.5, layer.state, **layer.caches, out=out,
            ssm_state_indices=layer.ints(block), write_pos=layer.ints(first + t),
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        outputs.append(out[0])
    return torch.cat(outputs)
