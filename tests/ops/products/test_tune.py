"""The choice among algorithms of products, with a library that says what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridspec.models.products import BLAS, TunedProducts, products_of
from hybridspec.ops._kernel_cache import FOLDER_VARIABLE
from hybridspec.ops.products import cublaslt, tune
from hybridspec.ops.products.cublaslt import Case

SLOW, QUICK, WRONG, REFUSED = (name.ljust(64).encode() for name in ("slow", "quick", "wrong", "no"))
MS = {SLOW: 3.0, QUICK: 1.0, WRONG: 0.1}


class FakeProduct:
    """Multiplies in fp64; the algorithm says whether rightly."""

    takes = staticmethod(cublaslt.Product.takes)

    def __init__(self, case: Case, algorithm: bytes, workspace: Tensor) -> None:
        if algorithm == REFUSED:
            raise RuntimeError("not supported")
        self.case, self.algorithm, self.calls = case, algorithm, 0

    def run(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.calls += 1
        right = x.double() @ weight.double().t() + out.double() * self.case.adds
        out.copy_(right + (1 if self.algorithm == WRONG else 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Case]:
    """What the library was asked for; torch takes `torch_ms`, the algorithms MS."""
    asked: list[Case] = []

    def candidates(case: Case, device: int | None) -> list[bytes]:
        asked.append(case)
        return [SLOW, WRONG, REFUSED, QUICK]

    def times(runs, x, weights, out) -> list[float]:
        names = [getattr(getattr(run, "__self__", None), "algorithm", b"") for run in runs]
        return [MS.get(name, 1.02 if x.shape[0] == 2 else 2.0) for name in names]

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cublaslt, "explain", lambda: None)
    monkeypatch.setattr(cublaslt, "library_version", lambda: 130200)
    monkeypatch.setattr(cublaslt, "candidates", candidates)
    monkeypatch.setattr(tune, "Product", FakeProduct)
    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(
        "hybridspec.models.products._TORCH",
        {
            "linear": lambda x, weight, out: out.copy_(BLAS.linear(x, weight)),
            "add": lambda x, weight, out: out.addmm_(x, weight.t()),
            "logits": lambda x, weight, out: out.copy_(BLAS.linear(x, weight)),
        },
    )
    return asked


def aligned(*shape: int) -> Tensor:
    """Rows at a multiple of 256 bytes, as a device's allocator places them."""
    room = torch.randn(shape[0] * shape[1] + 128).to(torch.bfloat16)
    first = -room.data_ptr() % 256 // 2
    return room[first : first + shape[0] * shape[1]].view(shape)


def test_the_quickest_right_one_is_taken_where_it_is_quicker_than_torch(asked: list[Case]) -> None:
    weights = [("linear", aligned(16, 32)), ("linear", aligned(16, 32)), ("add", aligned(32, 16))]
    weights += [("linear", aligned(17, 32)), ("linear", aligned(32, 16).t())]
    products = TunedProducts()
    products.tune(weights, [2, 4, 4])
    assert [(case.rows, case.columns, case.adds) for case in asked] == [
        (2, 16, False), (4, 16, False), (2, 32, True), (4, 32, True),
    ]  # fmt: skip
    assert {(case.rows, case.adds) for case in products.found} == {(4, False), (4, True)}
    assert {one.algorithm for one in products.found.values()} == {QUICK}

    again = TunedProducts()
    again.tune(weights, [4, 2])
    assert len(asked) == 4 and again.found.keys() == products.found.keys()
    again.tune(weights, [4])  # other sizes are another entry
    assert len(asked) == 6


def test_products_of_other_sizes_and_places_are_torchs(asked: list[Case]) -> None:
    weight, back, head = aligned(16, 32), aligned(32, 16), aligned(64, 32)
    products = TunedProducts()
    products.tune([("linear", weight), ("add", back), ("logits", head)], [4])
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "linear": lambda x, y: products.linear(x, weight),
        "add": lambda x, y: products.add(x.clone(), y, back),
        "logits": lambda x, y: products.logits(x, head),
    }
    x, y = aligned(5, 32), aligned(5, 16)
    rights = {
        "linear": BLAS.linear(x, weight),
        "add": BLAS.add(x.clone(), y, back),
        "logits": BLAS.logits(x, head),
    }
    found = {
        case.out_dtype if not case.adds else "add": one for case, one in products.found.items()
    }
    kinds = {"linear": torch.bfloat16, "add": "add", "logits": torch.float32}
    for kind, call in calls.items():
        for rows, is_own in ((slice(0, 4), True), (slice(1, 5), False), (slice(0, 3), False)):
            before = found[kinds[kind]].calls
            made = call(x[rows], y[rows])
            torch.testing.assert_close(
                made.float(), rights[kind][rows].float(), rtol=0.02, atol=0.1
            )
            if kind != "add" or not is_own:
                assert found[kinds[kind]].calls == before + is_own
            assert made.dtype is (torch.float32 if kind == "logits" else torch.bfloat16)


def test_nothing_is_looked_for_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (cublaslt.explain() is None) == (torch.version.cuda is not None)
    monkeypatch.setattr(cublaslt, "explain", lambda: "no library")
    products = products_of("tuned")
    assert isinstance(products, TunedProducts)
    products.tune([("linear", aligned(16, 32))], [4])
    assert not products.found
