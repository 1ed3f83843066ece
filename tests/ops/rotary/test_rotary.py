"""Norm and rotation: the reference against a loop, the contract, the kernel in the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from helpers.rotary_cases import CASES, EPS, expected, make_heads
from helpers.tolerances import assert_same
from helpers.triton_process import CAPABILITIES, run_with_compiler
from hybridspec.errors import UnsupportedError
from hybridspec.ops.rotary import norm_and_rotate, rotate_

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    heads = make_heads(CASES[name], F64, wide=F64)
    out = norm_and_rotate(*heads, eps=EPS)
    torch.testing.assert_close(out, expected(*heads), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-6), (BF16, 4e-3), (F16, 5e-4)], ids=str)
def test_rounds_once(dtype: torch.dtype, bound: float) -> None:
    heads = make_heads(CASES["odd sizes"], dtype)
    kept = heads[0].clone()
    out, right = norm_and_rotate(*heads, eps=EPS), expected(*heads)
    assert out.dtype == dtype and torch.equal(heads[0], kept)
    scale = float(right.abs().max())
    torch.testing.assert_close(out.double(), right, rtol=0, atol=bound * scale)


def test_rotation_is_that_of_transformers() -> None:
    """Its heads lie in front of the rows, its halves of the angles are equal."""
    x, _, cos, sin = make_heads((5, 7, 96, 24), F64, wide=F64)
    plain_sin = sin[..., 12:].repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[:, 0][None], plain_sin[:, 0][None]
    )
    rotated = x.clone()
    rotate_(rotated, cos, sin)
    torch.testing.assert_close(rotated, theirs[0].transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_a_head_of_zeros_and_a_huge_one() -> None:
    x, weight, cos, sin = make_heads(CASES["odd sizes"], F32)
    x[0] = 0
    x[1] = 1e18
    out = norm_and_rotate(x, weight, cos, sin, eps=EPS)
    assert out[0].eq(0).all() and out.isfinite().all()


def test_output_buffer_is_used() -> None:
    heads = make_heads(CASES["odd sizes"], F32)
    out = torch.empty_like(heads[0])
    assert norm_and_rotate(*heads, eps=EPS, out=out).data_ptr() == out.data_ptr()
    assert_same(out, norm_and_rotate(*heads, eps=EPS))


ZERO = torch.zeros


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": ZERO(5, 96)}, ValueError, r"x: expected shape \[N, heads, D\].*got \[5, 96\]"),
        ({"weight": ZERO(7, 32)}, ValueError, r"weight: .*\[7, 96\], got \[7, 32\]"),
        ({"cos": ZERO(4, 1, 24)}, ValueError, r"cos: .*\[5, 1, R\], got \[4, 1, 24\]"),
        ({"sin": ZERO(5, 1, 22)}, ValueError, r"sin: .*\[5, 1, 24\], got \[5, 1, 22\]"),
        (
            {"cos": ZERO(5, 1, 7), "sin": ZERO(5, 1, 7)},
            UnsupportedError,
            "cos: expected an even number of dimensions up to 96, got 7",
        ),
        (
            {"cos": ZERO(5, 1, 98), "sin": ZERO(5, 1, 98)},
            UnsupportedError,
            "cos: expected an even number of dimensions up to 96, got 98",
        ),
        ({"cos": ZERO(4, 1, 24), "sin": ZERO(4, 1, 24)}, ValueError, r"cos: .*got \[4, 1, 24\]"),
        ({"x": ZERO(5, 96, 7).mT}, ValueError, "x: expected a last stride of 1"),
        ({"cos": ZERO(5, 1, 48)[..., ::2]}, ValueError, "cos: expected a last stride of 1"),
        ({"sin": ZERO(5, 1, 48)[..., ::2]}, ValueError, "sin: expected a last stride of 1"),
        ({"out": ZERO(5, 96, 7).mT}, ValueError, "out: expected a last stride of 1"),
        ({"x": ZERO(5, 7, 96).int()}, TypeError, "x: expected dtype"),
        ({"weight": ZERO(7, 96).bfloat16()}, TypeError, "weight: expected dtype float32, float64"),
        ({"sin": ZERO(5, 1, 24).double()}, TypeError, "sin: expected dtype float32"),
        ({"out": ZERO(5, 7, 95)}, ValueError, r"out: .*\[5, 7, 96\], got \[5, 7, 95\]"),
        ({"out": ZERO(5, 7, 96).half()}, TypeError, "out: expected dtype float32"),
        ({"backend": "fast"}, ValueError, "backend: expected one of 'auto'"),
        ({"backend": "triton"}, UnsupportedError, "not on a CUDA device|not installed"),
    ],
    ids=str,
)
def test_errors(changes: dict[str, Tensor], error: type[Exception], text: str) -> None:
    call = dict(zip(("x", "weight", "cos", "sin"), make_heads((5, 7, 96, 24), F32), strict=True))
    with pytest.raises(error, match=text):
        norm_and_rotate(**(call | {"eps": EPS} | changes))


def test_opcheck() -> None:
    heads = make_heads(CASES["odd sizes"], F32)
    x = heads[0].clone()
    op = torch.ops.hybridspec.rotary_norm_and_rotate.default
    torch.library.opcheck(op, (x, *heads[1:], torch.empty_like(x), EPS, "auto"))


def test_compile() -> None:
    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        return norm_and_rotate(x * 2, *rest, eps=EPS) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 4):
        heads = make_heads((rows, 4, 32, 8), F64, wide=F64)
        out = compiled(*heads)
        right = expected(heads[0] * 2, *heads[1:]) + 1
        torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_spill_nothing(capability: str) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    reports = json.loads(run_with_compiler(script, capability))
    assert len(reports) == 2
    assert all(report["stack_bytes"] == 0 and report["registers"] <= 128 for report in reports)


def test_the_oracle_has_teeth() -> None:
    """Sines with the other sign turn the other way."""
    x, weight, cos, sin = make_heads(CASES["qwen"], F64, wide=F64)
    out = norm_and_rotate(x, weight, cos, -sin, eps=EPS)
    assert not torch.allclose(out, expected(x, weight, cos, sin), atol=1e-3)
