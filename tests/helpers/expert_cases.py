"""Rows with scores and experts as strided views, and what is right for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from helpers.norm_cases import surrounded
from helpers.tolerances import KERNEL_FACTOR, assert_close
from hybridspec.ops.experts import Matrices, mix, naive

__all__ = ["CASES", "Case", "MixCall", "check_mix"]


class Case(NamedTuple):
    """Sizes of a call, as in `api.mix`."""

    rows: int
    experts: int
    per_row: int
    size: int
    inner: int
    shared_inner: int
    is_normalized: bool = True


CASES = {
    "one row": Case(1, 12, 3, 32, 16, 16),
    "few rows, many experts": Case(3, 40, 4, 64, 32, 32),
    "odd sizes": Case(5, 7, 3, 40, 24, 56, is_normalized=False),
    "many rows of few experts": Case(37, 3, 2, 48, 40, 24),
    "all experts": Case(20, 4, 4, 32, 16, 16, is_normalized=False),
    "one expert": Case(18, 1, 1, 32, 16, 16),
    "no rows": Case(0, 4, 2, 32, 16, 16),
}


class MixCall:
    """The tensors of a call: rows and matrices lie in larger ones, with NaN around them."""

    def __init__(
        self, case: Case, dtype: torch.dtype, device: str = "cpu", *, has_columns: bool = False
    ) -> None:
        c = self.case = case
        shapes = (
            (c.experts, 2 * c.inner, c.size),
            (c.experts, c.size, c.inner),
            (2 * c.shared_inner, c.size),
            (c.size, c.shared_inner),
        )
        self.x = surrounded((c.rows, c.size), dtype, device, 0)
        self.scores = surrounded((c.rows, c.experts + 1), dtype, device, 1)
        self.out = surrounded((c.rows, c.size), dtype, device, 2)
        matrices = [surrounded(s, dtype, device, 3 + i) for i, s in enumerate(shapes)]
        for matrix in matrices:
            matrix.mul_(matrix.shape[-1] ** -0.5)
        if has_columns:  # as weights lie on a CPU
            matrices = [matrix.mT.contiguous().mT for matrix in matrices]
        self.matrices = Matrices(*matrices)

    def tensors(self) -> tuple[Tensor, Tensor, Matrices]:
        return self.x, self.scores, self.matrices

    def expected(self) -> Tensor:
        """The right output, by the definition, in fp64 on a CPU."""
        right = self.out.double().cpu()
        matrices = Matrices(*(matrix.cpu() for matrix in self.matrices))
        naive.mix(
            self.x.cpu(), self.scores.cpu(), matrices, right,
            self.case.per_row, self.case.is_normalized,
        )  # fmt: skip
        return right

    def run(self, backend: str, out: Tensor | None = None) -> Tensor:
        """Add to `out`, or to a copy of what the case has there."""
        return mix(
            *self.tensors(),
            self.out.clone() if out is None else out,
            experts_per_row=self.case.per_row,
            is_normalized=self.case.is_normalized,
            backend=backend,
        )


def check_mix(call: MixCall, backend: str) -> None:
    """Run a backend in place and compare with the definition; nothing else may change."""
    right, out = call.expected(), call.out
    kept = [tensor.clone() for tensor in (call.x, call.scores, *call.matrices)]
    assert call.run(backend, out) is out
    factor = KERNEL_FACTOR if out.dtype in (torch.bfloat16, torch.float16) else 1.0
    assert_close(out.cpu(), right, out.dtype, factor=factor)
    for tensor, copy in zip((call.x, call.scores, *call.matrices), kept, strict=True):
        assert torch.equal(tensor, copy)
    if len(out):
        assert out._base[:, :8].isnan().all() and out._base[:, -8:].isnan().all()
