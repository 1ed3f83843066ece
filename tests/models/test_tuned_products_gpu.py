"""Algorithms of cuBLASLt by choice: right in every case, kept for the next process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridspec.models.products import BLAS
from hybridspec.models.tuned_products import TunedProducts
from hybridspec.ops._kernel_cache import FOLDER_VARIABLE
from hybridspec.ops.norms import RmsNorm
from hybridspec.ops.products import cublaslt, tune
from hybridspec.ops.products.cublaslt import Case, Product

pytestmark = pytest.mark.gpu

SHAPES = [(512, 1024), (4096, 512), (264, 136)]


def rows_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "add", "logits"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 32, 256])
def test_every_proposal_is_right(
    rows: int, shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    x, weight = rows_of(rows, shape[1], dtype=dtype), rows_of(*shape, dtype=dtype)
    out_dtype = torch.float32 if kind == "logits" else dtype
    before = rows_of(rows, shape[0], dtype=out_dtype)
    case = Case(rows, *shape, dtype, out_dtype, adds=kind == "add")
    expected = x.double() @ weight.double().t() + before.double() * case.adds
    workspace = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    found = cublaslt.candidates(case, 0)
    assert len(found) > 1 and len(set(found)) == len(found)
    bound = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}[out_dtype]
    for algorithm in found:
        out = before.clone()
        Product(case, algorithm, workspace).run(x, weight, out)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=20 * bound)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 256])
def test_every_proposal_for_parts_is_right(rows: int, parts: int) -> None:
    x, weight = rows_of(rows, 1024), rows_of(512, 1024)
    case = Case(rows, 512, 1024, torch.bfloat16, torch.float32, parts=parts)
    pairs = zip(x.double().chunk(parts, 1), weight.double().chunk(parts, 1), strict=True)
    expected = torch.stack([one @ other.t() for one, other in pairs])
    workspace = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for algorithm in cublaslt.candidates(case, 0):
        out = torch.full_like(expected, torch.nan, dtype=torch.float32)
        Product(case, algorithm, workspace).run(x, weight, out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-3)


def test_what_was_chosen_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    # Each is quicker than the one before it, and torch comes first where it takes part.
    monkeypatch.setattr(tune, "_times", lambda runs, *call: [1 / (1 + i) for i in range(len(runs))])
    weights = [("linear", rows_of(4096, 512)) for _ in range(3)] + [("logits", rows_of(512, 1024))]
    weights += [("linear", rows_of(257, 512)), ("add", rows_of(512, 4096))]
    weights.append(("add_and_norm", rows_of(512, 4096)))
    norm = RmsNorm(torch.rand(512, device="cuda"), 1e-6)
    first, again = TunedProducts(), TunedProducts()
    first.tune(weights, [4, 32])
    assert len(first.found) == 8
    monkeypatch.setattr(tune, "_quickest", None)  # nothing is measured again
    again.tune(weights, [4, 32])
    x, wide, residual = rows_of(32, 512), rows_of(32, 4096), rows_of(32, 512)
    hidden = rows_of(32, 1024)
    for ours, bound in (
        (lambda p: p.linear(x, weights[0][1]), 2e-2),
        (lambda p: p.add(residual.clone(), wide, weights[-2][1]), 2e-2),
        (lambda p: torch.cat(p.add_and_norm(residual.clone(), wide, weights[-1][1], norm)), 2e-2),
        (lambda p: p.logits(hidden, weights[3][1]), 1e-4),
        (lambda p: p.linear(x[:7], weights[0][1]), 2e-2),
        (lambda p: p.linear(x, weights[4][1]), 2e-2),
    ):
        assert torch.equal(ours(first), ours(again))
        torch.testing.assert_close(ours(first), ours(BLAS), rtol=bound, atol=20 * bound)
    noncontiguous = rows_of(512, 32).t()
    assert torch.equal(
        first.linear(noncontiguous, weights[0][1]), BLAS.linear(noncontiguous, weights[0][1])
    )
