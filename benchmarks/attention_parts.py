"""What surrounds attention in a verify step: FlashAttention-3 alone against the adapter around it,
and norm and rotation of query and key heads in one launch against plain PyTorch.

    python benchmarks/attention_parts.py --json benchmarks/results/attention_parts_h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from harness import Timing, Variant, environment, time_interleaved
from hybridspec.ops.norms import RmsNorm
from hybridspec.ops.paged_attention import Batch, Pages, Rows, cpu, fa3
from hybridspec.ops.paged_attention.append import append_rows
from hybridspec.ops.rotary import norm_and_rotate, rotate_

NUM_TOKENS = 4
# (requests, context, Hq, Hkv, D)
ATTENTION = [
    (1, 65536, 16, 2, 256),
    (8, 8192, 16, 2, 256),
    (32, 8192, 16, 2, 256),
    (64, 16384, 16, 2, 256),
    (32, 8192, 32, 8, 128),
]
# (rows, heads, D, rotated dimensions)
ROTATION = [
    (4, 18, 256, 64),
    (32, 18, 256, 64),
    (128, 18, 256, 64),
    (1024, 18, 256, 64),
    (4096, 20, 256, 64),
    (128, 40, 128, 32),
]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
INT = {"device": "cuda", "dtype": torch.int32}


def refuse_if_wrong(found: Tensor, right: Tensor, bound: float) -> None:
    """Raise SystemExit unless a result is right: what is wrong is not timed."""
    error = float((found.double() - right.double()).abs().max() / right.double().abs().max())
    if not error <= bound:
        raise SystemExit(f"wrong by {error:.1e}, allowed {bound:.1e}")


def attention(shape: tuple[int, int, int, int, int]) -> list[Variant]:
    """The library on lengths that are there already, the append, and the whole adapter."""
    num_requests, context, heads, kv_heads, head_dim = shape
    build = fa3.installed_build()
    if isinstance(build, str):
        raise SystemExit(f"FlashAttention-3: {build}")
    rows = torch.randn(num_requests * NUM_TOKENS, heads + 2 * kv_heads, head_dim, **BF16)
    q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
    pages = [torch.randn(num_requests, context, kv_heads, head_dim, **BF16) for _ in range(2)]
    slots = torch.arange(num_requests, **INT)
    seq_len = torch.full((num_requests,), context - NUM_TOKENS, **INT)
    cu_seqlens = torch.arange(num_requests + 1, **INT) * NUM_TOKENS
    memory = (Pages(*pages, slots[:, None], seq_len), Batch(cu_seqlens, slots, NUM_TOKENS))
    out, right = (torch.empty(q.shape, **BF16) for _ in range(2))
    scale = head_dim**-0.5
    call = (Rows(q, k, v, out, scale), *memory)
    fa3.verify(*call)
    cpu.verify(Rows(q, k, v, right, scale), *memory)
    refuse_if_wrong(out, right, 2e-2)
    stored = append_rows(*call)
    return [
        Variant(
            "library",
            lambda: build.library.flash_attn_with_kvcache(
                q,
                *pages,
                cache_seqlens=stored.kv_len,
                cache_batch_idx=stored.first_page,
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=NUM_TOKENS,
                softmax_scale=scale,
                causal=True,
            ),
        ),
        Variant("append", lambda: append_rows(*call)),
        Variant("adapter", lambda: fa3.verify(*call)),
    ]


def rotation(shape: tuple[int, int, int, int]) -> list[Variant]:
    """Heads that are a slice of a fused projection."""
    num_rows, heads, head_dim, rotary = shape
    fused = torch.randn(num_rows, heads * head_dim + 1024, **BF16)
    x = fused[:, : heads * head_dim].view(num_rows, heads, head_dim)
    weight = torch.randn(heads, head_dim, device="cuda")
    angles = torch.randn(num_rows, 1, rotary // 2, device="cuda")
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)

    norm = RmsNorm(weight, 1e-6)

    def plain() -> Tensor:
        """What layers do on a CPU."""
        wide = norm.forward(x.float())
        rotate_(wide, cos, sin)
        return wide.to(x.dtype)

    def fused() -> Tensor:
        return norm_and_rotate(x, weight, cos, sin, eps=1e-6, backend="triton")

    refuse_if_wrong(fused(), plain(), 4e-3)
    return [Variant("plain PyTorch", plain), Variant("one launch", fused)]


def row(op: str, shape: tuple[int, ...], timings: dict[str, Timing]) -> dict:
    """One row of the result; prints it."""
    shown = ", ".join(f"{name} {time.median:.1f}" for name, time in timings.items())
    print(f"{op} {shape}: {shown} us", flush=True)
    return {
        "op": op,
        "shape": shape,
        "us": {
            name: {"median": round(t.median, 2), "p20": round(t.p20, 2), "p80": round(t.p80, 2)}
            for name, t in timings.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--limit", type=int, help="only the first shapes of both")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for op, make, shapes in (
        ("attention", attention, ATTENTION),
        ("norm and rotation", rotation, ROTATION),
    ):
        for shape in shapes[: arguments.limit]:
            rows.append(row(op, shape, time_interleaved(make(shape), arguments.iterations)))
    document = {**environment(), "iterations": arguments.iterations, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
