"""What rings are compared with: a verify step that writes the state after every token.

Engines that keep snapshots read one state of a request and head, and write one after each of its T
rows, so that a rejection takes the one before it. The kernel here does that in one launch, for what
`engine_throughput.py` needs: L2-normed keys and queries, gates in fp32, any float dtype of states.
Checked against a loop before it is timed. In the setting of `gdn_verify.py` (16 key and 64 value
heads, T = 4, bf16, 256 requests) it has to take at most 952 us, or it would be a straw man.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from harness import BEST_READ_RATE, Variant, environment, time_interleaved

__all__ = ["Snapshots"]

DIM = 128
TILES = ((32, 4), (16, 4), (16, 2), (8, 1))  # value rows of a program, warps


@triton.jit
def snapshot_kernel(
    # inputs: q, k [B T, H, K]; v [B T, HV, V]; a, b [B T, HV]; A_log, dt_bias [HV]
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    # in-out states [S, T + 1, HV, V, K]: place 0 is read, places 1..T are written
    states_ptr,
    # output [B T, HV, V]
    out_ptr,
    scale,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v_offs = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    k_offs = tl.arange(0, K)
    tile = v_offs[:, None] * K + k_offs[None, :]

    states_ptr += (request * (T + 1) * HV + head) * V * K
    state = tl.load(states_ptr + tile).to(tl.float32)
    rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    for t in tl.static_range(T):
        row = request * T + t
        key_row = (row * H + head // (HV // H)) * K + k_offs
        q = tl.load(q_ptr + key_row).to(tl.float32)
        k = tl.load(k_ptr + key_row).to(tl.float32)
        v = tl.load(v_ptr + (row * HV + head) * V + v_offs).to(tl.float32)
        x = tl.load(a_ptr + row * HV + head).to(tl.float32) + bias
        beta = tl.sigmoid(tl.load(b_ptr + row * HV + head).to(tl.float32))
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        state *= tl.exp(rate * tl.where(x > 20, x, tl.log(1 + tl.exp(x))))
        u = beta * (v - tl.sum(state * k[None, :], axis=1))
        state += u[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], axis=1)
        tl.store(out_ptr + (row * HV + head) * V + v_offs, y.to(out_ptr.dtype.element_ty))
        place = states_ptr + (t + 1) * HV * V * K
        tl.store(place + tile, state.to(states_ptr.dtype.element_ty))


class Snapshots:
    """A step of B requests with T rows each, random tensors included.

    Args:
        batch: B.
        rows: T.
        heads, value_heads: H, HV.
        state_dtype: of the states.
        device: where.
    """

    def __init__(
        self,
        batch: int,
        rows: int,
        heads: int,
        value_heads: int,
        state_dtype: torch.dtype,
        device: str = "cuda",
    ) -> None:
        self.sizes = batch, rows, heads, value_heads
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        count = batch * rows
        self.q, self.k = (normal(count, heads, DIM).bfloat16() for _ in range(2))
        self.v = normal(count, value_heads, DIM).bfloat16()
        self.a, self.b = (normal(count, value_heads).bfloat16() for _ in range(2))
        self.A_log, self.dt_bias = normal(value_heads) * 0.3, normal(value_heads) * 0.3
        shape = (batch, rows + 1, value_heads, DIM, DIM)
        self.states = torch.empty(shape, dtype=state_dtype, device=device)
        self.states[:, 0] = normal(value_heads, DIM, DIM)
        self.out = torch.empty_like(self.v)

    @property
    def nbytes(self) -> int:
        """Bytes of states that a step reads and writes."""
        return self.states.nbytes

    def run(self, block_v: int = 32, num_warps: int = 4) -> None:
        """Launch the step."""
        batch, rows, heads, value_heads = self.sizes
        snapshot_kernel[(DIM // block_v, value_heads, batch)](
            self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, self.states,
            self.out, DIM**-0.5,
            T=rows, H=heads, HV=value_heads, K=DIM, V=DIM, BLOCK_V=block_v,
            num_warps=num_warps,
            enable_fp_fusion=True,
        )  # fmt: skip

    def time(self, iterations: int) -> tuple[float, str]:
        """Time the launches of several tiles; microseconds of the fastest, and which it was."""
        variants = [
            Variant(f"{rows} rows, {warps} warps", functools.partial(self.run, rows, warps))
            for rows, warps in TILES
        ]
        times = time_interleaved(variants, iterations)
        best = min(times, key=lambda name: times[name].median)
        return times[best].median, best

    def check(self) -> None:
        """Compare outputs and snapshots of the last request with a loop in fp64."""
        batch, rows, heads, value_heads = self.sizes
        state = self.states[-1, 0].double()
        self.run()
        repeat = value_heads // heads
        for t in range(rows):
            row = (batch - 1) * rows + t
            q, k = (
                F.normalize(x[row].double(), dim=-1).repeat_interleave(repeat, 0)
                for x in (self.q, self.k)
            )
            decay = -self.A_log.double().exp() * F.softplus(self.a[row].double() + self.dt_bias)
            beta = self.b[row].double().sigmoid()
            state = state * decay.exp()[:, None, None]
            u = beta[:, None] * (self.v[row].double() - (state @ k[..., None])[..., 0])
            state = state + u[..., None] * k[:, None]
            y = (state @ q[..., None])[..., 0] * DIM**-0.5
            for mine, right in ((self.out[row], y), (self.states[-1, t + 1], state)):
                scale = float(right.abs().max())
                torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-2 * scale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--value-heads", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype, rows = getattr(torch, args.dtype), []
    for count in args.requests:
        step = Snapshots(count, 4, 16, args.value_heads, dtype)
        step.check()
        us, tile = step.time(args.iterations)
        share = step.nbytes / BEST_READ_RATE / us * 1e6
        rows.append({"requests": count, "us": us, "share_of_bytes": share, "tile": tile})
        print(f"{count:4d} requests: {us:8.1f} us, {share:.2f} of the bytes of its states, {tile}")
    text = json.dumps(
        {
            "benchmark": "state_snapshots",
            **{name: value for name, value in vars(args).items() if name != "json"},
            "bar_us_at_256": 952,
            "rows": rows,
            **environment(),
        }
    )
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
