"""Time a mixture of experts with its norm and router on a GPU, sizes of Qwen3.5-35B-A3B, bf16.

Chains of layers with weights of their own, replayed, so that no layer finds its experts in the
cache; the copy that puts the rows back is in each. "composed" is a norm, a product and the kernels
for few rows, "cuda" the one launch for a single row. Both are compared with the reference first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from floors import READ_RATE
from harness import (
    Variant,
    time_interleaved,
    write_rows,
)
from hybridspec.ops.experts import Matrices, norm_and_mix
from hybridspec.ops.experts.cpu import route
from hybridspec.ops.norms import rms_norm

SIZE, INNER, PER_ROW = 2048, 512, 8
EPS = 1e-6


class Layer:
    """A norm, a router and experts with random weights."""

    def __init__(self, num_experts: int) -> None:
        def matrix(*shape: int) -> Tensor:
            whole = torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
            return whole.mul_(shape[-1] ** -0.5)

        self.weight = torch.rand(SIZE, device="cuda") + 0.5
        self.router = matrix(num_experts + 1, SIZE)
        self.matrices = Matrices(
            matrix(num_experts, 2 * INNER, SIZE), matrix(num_experts, SIZE, INNER),
            matrix(2 * INNER, SIZE), matrix(SIZE, INNER),
        )  # fmt: skip
        self.meeting = torch.zeros(2, dtype=torch.int32, device="cuda")

    def run(self, x: Tensor, backend: str) -> None:
        """Change rows in place."""
        norm_and_mix(
            x, self.weight, EPS, self.router, self.matrices, meeting=self.meeting,
            experts_per_row=PER_ROW, backend=backend,
        )  # fmt: skip

    def read_bytes(self, x: Tensor) -> int:
        """Bytes of the weights that rows need."""
        scores = F.linear(rms_norm(x, self.weight, EPS), self.router)
        hit = len(route(scores[:, :-1], PER_ROW, True)[1].unique())
        gate_up, down, *shared = self.matrices
        dense = self.router.nbytes + sum(part.nbytes for part in shared)
        return dense + hit * (gate_up[0].nbytes + down[0].nbytes)


def check(layers: list[Layer], rows: Tensor, backend: str) -> float:
    """Return the share of rows that are not the reference's, because a score was rounded apart."""
    wrong = 0
    for layer in layers:
        out, right = rows.clone(), rows.clone()
        layer.run(out, backend)
        layer.run(right, "reference")
        errors = (out.float() - right.float()).norm(dim=-1) / (right - rows).float().norm(dim=-1)
        wrong += int((errors > 0.01).sum())
    return wrong / (len(layers) * len(rows))


def chain(layers: list[Layer], rows: Tensor, backend: str) -> Callable[[], None]:
    """Return what puts rows through all layers."""
    x = torch.empty_like(rows)

    def run() -> None:
        x.copy_(rows)
        for layer in layers:
            layer.run(x, backend)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers = [Layer(arguments.experts) for _ in range(arguments.layers)]
    found: list[dict[str, Any]] = []
    for count in arguments.rows:
        rows = torch.randn(count, SIZE, device="cuda").bfloat16()
        floor = sum(layer.read_bytes(rows) for layer in layers) / READ_RATE * 1e6 / len(layers)
        backends = ["composed", "cuda"] if count == 1 else ["composed"]
        differing = {backend: check(layers, rows, backend) for backend in backends}
        assert max(differing.values()) < 0.5, differing
        variants = [Variant(backend, chain(layers, rows, backend)) for backend in backends]
        for backend, timing in time_interleaved(variants, arguments.iterations).items():
            us = timing.median / len(layers)
            print(
                f"{count:4d} rows  {backend:9s} {us:7.1f} us a layer  {floor / us:.2f} of the bytes"
                f"  {differing[backend]:.3f} differ",
                flush=True,
            )
            found.append(
                {"rows": count, "backend": backend, "us": round(us, 2), "floor_us": round(floor, 2)}
                | {"share_of_bytes": round(floor / us, 3), "differing": differing[backend]}
            )
    write_rows(found, arguments.json, benchmark="experts", layers=arguments.layers)


if __name__ == "__main__":
    main()
