"""The choice among algorithms of products, with a library that says what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridspec.models import tuned_products
from hybridspec.models.products import BLAS
from hybridspec.models.tuned_products import TunedProducts
from hybridspec.ops._kernel_cache import FOLDER_VARIABLE
from hybridspec.ops.norms import RmsNorm
from hybridspec.ops.products import cublaslt, tune
from hybridspec.ops.products.cublaslt import Case

SLOW, QUICK, WRONG, REFUSED = (name.ljust(64).encode() for name in ("slow", "quick", "wrong", "no"))


class FakeProduct:
    """Multiplies in fp64; the algorithm says whether rightly."""

    takes = staticmethod(cublaslt.Product.takes)

    def __init__(self, case: Case, algorithm: bytes, workspace: Tensor) -> None:
        if algorithm == REFUSED:
            raise RuntimeError("not supported")
        self.case, self.algorithm, self.calls = case, algorithm, 0

    def run(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.calls += 1
        made = out if out.ndim == 3 else out[None]
        assert made.shape[0] == self.case.parts and out.dtype is self.case.out_dtype
        cuts = (tensor.chunk(self.case.parts, 1) for tensor in (x, weight))
        for part, some_x, some_weight in zip(made, *cuts, strict=True):
            right = some_x.double() @ some_weight.double().t()
            if self.case.adds:  # what is there before may be anything
                right += part.double()
            part.copy_(right + (100 if self.algorithm == WRONG else 0))


class Asked(list[Case]):
    """Cases that the library was asked for; `ms` says how long a product takes, torch takes 2."""

    ms: Callable[[FakeProduct], float] = staticmethod(lambda product: 1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    asked, made = Asked(), []

    def candidates(case: Case, device: int | None) -> list[bytes]:
        asked.append(case)
        return [SLOW, WRONG, REFUSED, QUICK]

    def product(*arguments: Any) -> FakeProduct:
        made.append(FakeProduct(*arguments))
        return made[-1]

    def times(runs: list[Any], x: Tensor, weights: Any, out: Tensor, rounds: int) -> list[float]:
        found = []
        for run in runs if rounds == 1 else runs[1:]:  # torch is there in the last rounds only
            before = [one.calls for one in made]
            run(x, weights[0], out)
            (one,) = (one for one, old in zip(made, before, strict=True) if one.calls > old)
            found.append(3.0 if one.algorithm == SLOW else asked.ms(one))
        return found if rounds == 1 else [2.0, *found]

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cublaslt, "explain", lambda: None)
    monkeypatch.setattr(cublaslt, "library_version", lambda: 130200)
    monkeypatch.setattr(cublaslt, "candidates", candidates)
    monkeypatch.setattr(tune, "Product", product)
    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setitem(
        tuned_products._TORCH,
        "linear",
        lambda x, weight, out: out.copy_(BLAS.linear(x, weight)),
    )
    monkeypatch.setitem(
        tuned_products._TORCH,
        "logits",
        lambda x, weight, out: out.copy_(BLAS.linear(x, weight)),
    )
    return asked


def aligned(*shape: int) -> Tensor:
    """Rows at a multiple of 256 bytes, as a device's allocator places them."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    room = torch.randn(shape[0] * shape[1] + 128, generator=generator).to(torch.bfloat16)
    first = -room.data_ptr() % 256 // 2
    return room[first : first + shape[0] * shape[1]].view(shape)


def test_the_quickest_right_one_is_taken_where_it_is_quicker_than_torch(asked: Asked) -> None:
    asked.ms = lambda product: 1.97 if product.case.rows == 2 else 1.9
    weights = [("linear", aligned(16, 32)), ("linear", aligned(16, 32)), ("add", aligned(32, 16))]
    weights += [("linear", aligned(17, 32)), ("linear", aligned(32, 16).t())]
    products = TunedProducts()
    products.tune(weights, [2, 4, 4])
    assert [(case.rows, case.columns, case.adds) for case in asked] == [
        (2, 16, False), (4, 16, False), (2, 32, True), (4, 32, True),
    ]  # fmt: skip
    assert products.found.keys() == {("linear", 4, 16, 32), ("add", 4, 32, 16)}
    assert {one.algorithm for one in products.found.values()} == {QUICK}

    again = TunedProducts()
    again.tune(weights, [4, 2])
    assert len(asked) == 4 and again.found.keys() == products.found.keys()
    again.tune(weights, [4])  # other sizes are another entry
    assert len(asked) == 6


@pytest.mark.parametrize(("quickest", "parts"), [(1, 1), (2, 2), (4, 4)])
def test_a_sum_in_front_of_a_norm_may_stay_in_parts(
    asked: Asked, quickest: int, parts: int
) -> None:
    asked.ms = lambda product: 1.0 + abs(product.case.parts - quickest) + product.case.adds
    weight, products = aligned(32, 4096), TunedProducts()
    products.tune([("add_and_norm", weight)], [4])
    assert [(case.adds, case.parts) for case in asked] == [
        (True, 1), (False, 1), (False, 2), (False, 4),
    ]  # fmt: skip
    (product,) = products.found.values()
    assert product.case.parts == parts
    x, residual = aligned(4, 4096), aligned(4, 32)
    norm = RmsNorm(torch.rand(32), 1e-6)
    before, right = product.calls, BLAS.add_and_norm(residual.clone(), x, weight, norm)
    added, normed = products.add_and_norm(residual, x, weight, norm)
    assert product.calls == before + 1
    torch.testing.assert_close(added, right[0], rtol=0.01, atol=0.5)
    torch.testing.assert_close(normed, right[1], rtol=0.02, atol=0.01)


def test_products_of_other_sizes_and_places_are_torchs(asked: Asked) -> None:
    weight, head, products = aligned(16, 32), aligned(64, 32), TunedProducts()
    products.tune([("linear", weight), ("logits", head)], [4])
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: products.linear(x, weight),
        "logits": lambda x: products.logits(x, head),
    }
    x = aligned(5, 32)
    rights = {"linear": BLAS.linear(x, weight), "logits": BLAS.logits(x, head)}
    found = {use: product for (use, *_), product in products.found.items()}
    for use, call in calls.items():
        for rows, is_own in ((slice(0, 4), True), (slice(1, 5), False), (slice(0, 3), False)):
            before = found[use].calls
            made = call(x[rows])
            right = rights[use][rows].float()
            torch.testing.assert_close(made.float(), right, rtol=0.02, atol=0.1)
            assert found[use].calls == before + is_own
            assert made.dtype is (torch.float32 if use == "logits" else torch.bfloat16)


def test_nothing_is_looked_for_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cublaslt.explain() is None) == (torch.version.cuda is not None)
    monkeypatch.setattr(cublaslt, "explain", lambda: "no library")
    products = TunedProducts()
    products.tune([("linear", aligned(16, 32))], [4])
    assert not products.found
