"""Products of few rows with the weights of a 9B model: by torch, and by the algorithms chosen.

Every result is compared with torch's before anything is timed; a product runs with weights of its
own one after the other, as in a model, so that none is in the L2 cache. Where a model norms the
sum, the norm is timed too.

    python benchmarks/products.py --json benchmarks/results/products_h200.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from harness import Variant, need_gpu, time_interleaved, write_rows
from hybridspec.models.products import BLAS, Products
from hybridspec.models.tuned_products import TunedProducts
from hybridspec.ops.norms import RmsNorm

SHAPES = {
    "gate and up": ("linear", 24576, 4096),
    "down": ("add_and_norm", 4096, 12288),
    "into a recurrent layer": ("linear", 12352, 4096),
    "into attention": ("linear", 10240, 4096),
    "out of a layer": ("add_and_norm", 4096, 4096),
    "32,768 words": ("logits", 32768, 4096),
}
WEIGHTS = 6
READ_RATE, PRODUCT_RATE = 4.13e12, 793e12
BFLOAT16 = torch.bfloat16


class Call:
    """One product with several weights, by either way."""

    def __init__(self, use: str, weights: list[torch.Tensor], rows: int) -> None:
        columns, terms = weights[0].shape
        self.use, self.weights = use, weights
        self.x = torch.randn(rows, terms, device="cuda").to(BFLOAT16)
        self.y = torch.randn(rows, columns, device="cuda").to(BFLOAT16)
        self.norm = RmsNorm(torch.ones(columns, device="cuda"), 1e-6)

    def once(self, products: Products, weight: torch.Tensor) -> torch.Tensor:
        if self.use == "add_and_norm":
            return products.add_and_norm(self.y, self.x, weight, self.norm)[1]
        return getattr(products, self.use)(self.x, weight)

    def all(self, products: Products) -> None:
        for weight in self.weights:
            self.once(products, weight)

    def check(self, tuned: TunedProducts) -> float:
        """Return the largest difference, relative to the largest element."""
        before = self.y.clone()
        expected = self.once(BLAS, self.weights[0]).float()
        self.y.copy_(before)
        found = self.once(tuned, self.weights[0]).float()
        self.y.copy_(before)
        return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--shrink", type=int, default=1, help="divides the sizes")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    tuned, weights = TunedProducts(), {}
    for name, (_, columns, terms) in SHAPES.items():
        shape = (columns // options.shrink, terms // options.shrink)
        weights[name] = [
            torch.randn(shape, device="cuda").mul_(0.02).to(BFLOAT16) for _ in range(WEIGHTS)
        ]
    uses = [(SHAPES[name][0], weight) for name, some in weights.items() for weight in some]
    tuned.tune(uses, options.rows)
    rows = []
    for name, (use, _, _) in SHAPES.items():
        for count in options.rows:
            call = Call(use, weights[name], count)
            error = call.check(tuned)
            assert error < 0.02, f"{name}, {count} rows: differs by {error}"
            times = time_interleaved(
                [
                    Variant("torch", lambda call=call: call.all(BLAS)),
                    Variant("chosen", lambda call=call: call.all(tuned)),
                ],
                options.iterations,
            )
            us = {way: times[way].median / WEIGHTS for way in times}
            size, shape = weights[name][0].numel(), weights[name][0].shape
            floor = 1e6 * max(2 * size / READ_RATE, 2 * size * count / PRODUCT_RATE)
            own = tuned.found.get((use, count, *shape))
            rows.append(
                {"name": name, "rows": count, **us, "floor": floor, "parts": own and own.case.parts}
            )
            way = "torch" if own is None else f"parts: {own.case.parts}"
            print(
                f"{name:24} {count:4} rows  torch {us['torch']:6.1f} us  chosen "
                f"{us['chosen']:6.1f}  floor {floor:6.1f}  {way}",
                flush=True,
            )
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
