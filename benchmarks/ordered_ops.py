"""Operators whose sums have one order, beside the fast ones: equal bits first, then time.

Sizes are those of a 9B model: products, the gated delta rule of a verify step, paged attention.
Nothing is timed whose bits change with the rows beside a row.

    python benchmarks/ordered_ops.py --json benchmarks/results/ordered_ops_h200.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Variant, environment, time_interleaved
from hybridspec.ops import gated_delta_rule, paged_attention
from hybridspec.ops.products import explain_order, multiply
from hybridspec.ops.ring import RingView

SHAPES = {
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
    "into a recurrent layer": (12352, 4096),
    "out of a layer": (4096, 4096),
    "32,768 words": (32768, 4096),
}
H, HV, K, V = 16, 32, 128, 128
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 4, 256, 64
OPS = ("products", "delta rule", "attention")
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", choices=OPS, nargs="+", default=OPS)
    parser.add_argument("--delta-rule", choices=("ordered", "ordered_cuda"), default="ordered")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128, 1024])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=4, help="rows of a request")
    parser.add_argument(
        "--folding", type=float, nargs="+", default=[0.0, 0.11], help="shares of requests that fold"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path)
    return parser


def random_rows(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def products(rows: list[int], iterations: int) -> list[dict[str, Any]]:
    """Time a weight of each shape; the share of sums in which torch's result differs."""
    found = []
    for name, shape in SHAPES.items():
        weight = random_rows(*shape, scale=1 / 64)
        reason = explain_order(weight)
        if reason is not None:
            raise SystemExit(f"{name}: {reason}")
        for count in rows:
            x = random_rows(count, shape[1])
            times = time_interleaved(
                [
                    Variant("torch", lambda x=x, w=weight: F.linear(x, w)),
                    Variant("ordered", lambda x=x, w=weight: multiply(x, w)),
                ],
                iterations,
            )
            differing = (F.linear(x, weight) != multiply(x, weight)).float().mean().item()
            found.append(
                {"op": "product", "name": name, "shape": shape, "rows": count}
                | {f"{key}_us": time.median for key, time in times.items()}
                | {"differing": differing}
            )
    return found


def gdn_call(
    count: int, tokens: int, state_dtype: torch.dtype, window: int, folding: float
) -> dict[str, Any]:
    """Return a verify call of so many requests in the middle of their windows; some fold."""
    rows = count * tokens
    cursors = [torch.zeros(count, dtype=torch.int32, device="cuda") for _ in range(2)]
    ring = RingView(
        k=F.normalize(torch.randn(count, H, 32, K, device="cuda"), dim=-1).bfloat16(),
        u=random_rows(count, HV, 32, V),
        cum_log_decay=-torch.rand(count, HV, 32, device="cuda").cumsum(-1),
        ring_start=cursors[0], history_len=cursors[1], max_window=window,
    )  # fmt: skip
    is_fold = (torch.arange(count + 1, device="cuda") * folding).floor().diff().to(torch.int8)
    ring.history_len.fill_(12)
    ring.history_len[is_fold.bool()] = window
    return {
        "q": random_rows(rows, H, K), "k": random_rows(rows, H, K), "v": random_rows(rows, HV, V),
        "a": random_rows(rows, HV), "b": random_rows(rows, HV),
        "A_log": torch.zeros(HV, device="cuda"), "dt_bias": torch.zeros(HV, device="cuda"),
        "state": torch.randn(count, HV, V, K, device="cuda").to(state_dtype),
        "ring": ring,
        "cu_seqlens": torch.arange(0, rows + 1, tokens, dtype=torch.int32, device="cuda"),
        "slots": torch.arange(count, dtype=torch.int32, device="cuda"),
        "is_fold": is_fold, "max_verify_tokens": tokens,
    }  # fmt: skip


def delta_rule(
    requests: list[int], tokens: int, shares: list[float], backend: str, iterations: int
) -> list[dict[str, Any]]:
    """Time verify calls; before, that of each request alone has to give the same bits."""
    found = []
    for name, dtype in STATES.items():
        for count, folding in itertools.product(requests, shares):
            fast = gdn_call(count, tokens, dtype, 16, folding)
            call = gdn_call(count, tokens, dtype, 24, folding)
            no_fold = call | {"is_fold": None}
            no_fold["ring"].history_len.fill_(12)
            whole = gated_delta_rule.verify(**no_fold, backend=backend)
            for b in random.Random(0).sample(range(count), min(count, 3)):
                for t in range(tokens):
                    rows = slice(b * tokens, b * tokens + t + 1)
                    part = {key: no_fold[key][rows] for key in "qkvab"}
                    part["cu_seqlens"] = no_fold["cu_seqlens"][:2].clone()
                    part["cu_seqlens"][1] = t + 1
                    part["slots"] = no_fold["slots"][b : b + 1]
                    alone = gated_delta_rule.verify(**no_fold | part, backend=backend)
                    if not torch.equal(alone, whole[rows]):
                        raise SystemExit(f"request {b} of {count}: {t + 1} rows differ")
            no_fold["ring"].history_len[call["is_fold"].bool()] = 24
            times = time_interleaved(
                [
                    Variant("fast", lambda c=fast: gated_delta_rule.verify(**c)),
                    Variant(
                        "ordered", lambda c=call: gated_delta_rule.verify(**c, backend=backend)
                    ),
                ],
                iterations,
            )
            found.append(
                {"op": "delta rule", "name": f"{name}, {folding:.0%} fold", "requests": count}
                | {"backend": backend}
                | {f"{key}_us": time.median for key, time in times.items()}
            )
    return found


def attention(
    requests: list[int], tokens: int, context: int, iterations: int
) -> list[dict[str, Any]]:
    """Time verify calls; before, each row alone has to give the same bits."""
    found = []
    for count in requests:
        pages = -(-(context + tokens) // PAGE)
        rows = count * tokens
        call: dict[str, Any] = {
            "q": random_rows(rows, QUERY_HEADS, HEAD_DIM),
            "k": random_rows(rows, KV_HEADS, HEAD_DIM), "v": random_rows(rows, KV_HEADS, HEAD_DIM),
            "k_pages": random_rows(count * pages, PAGE, KV_HEADS, HEAD_DIM),
            "v_pages": random_rows(count * pages, PAGE, KV_HEADS, HEAD_DIM),
            "page_table": torch.randperm(count * pages).int().view(count, pages).cuda(),
            "seq_len": torch.full((count,), context, dtype=torch.int32, device="cuda"),
            "cu_seqlens": torch.arange(0, rows + 1, tokens, dtype=torch.int32, device="cuda"),
            "slots": torch.arange(count, dtype=torch.int32, device="cuda"),
            "max_verify_tokens": tokens,
        }  # fmt: skip
        whole = paged_attention.verify(**call, backend="pieces")
        for b in random.Random(0).sample(range(count), min(count, 3)):
            row = slice(b * tokens, b * tokens + 1)
            part = {key: call[key][row] for key in "qkv"}
            part |= {"cu_seqlens": call["cu_seqlens"].new_tensor([0, 1])}
            part |= {"slots": call["slots"][b : b + 1], "max_verify_tokens": 1}
            if not torch.equal(paged_attention.verify(**call | part, backend="pieces"), whole[row]):
                raise SystemExit(f"attention of request {b} of {count} differs")
        times = time_interleaved(
            [
                Variant("fast", lambda c=call: paged_attention.verify(**c, backend="triton")),
                Variant("ordered", lambda c=call: paged_attention.verify(**c, backend="pieces")),
            ],
            iterations,
        )
        found.append(
            {"op": "attention", "name": f"{context} positions", "requests": count}
            | {f"{key}_us": time.median for key, time in times.items()}
        )
    return found


def main() -> int:
    args = parser().parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    if "products" in args.ops:
        rows += products(args.rows, args.iterations)
    if "delta rule" in args.ops:
        rows += delta_rule(
            args.requests, args.tokens, args.folding, args.delta_rule, args.iterations
        )
    if "attention" in args.ops:
        rows += attention(args.requests, args.tokens, args.context, args.iterations)
    for row in rows:
        fast = row.get("torch_us", row.get("fast_us"))
        size = row.get("rows", row.get("requests"))
        print(
            f"{row['op']:10} {row['name']:24} {size:5}  fast {fast:8.1f} us  ordered "
            f"{row['ordered_us']:8.1f} us  {row['ordered_us'] / fast:.2f} x"
            + (f"  differing {row['differing']:.2%}" if "differing" in row else "")
        )
    report = json.dumps({"benchmark": "ordered_ops", **environment(), "rows": rows})
    if args.json:
        args.json.write_text(report + "\n")
    print(report)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
