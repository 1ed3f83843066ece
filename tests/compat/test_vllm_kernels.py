"""ReplaySSM's functions over the kernels: Triton's interpreted, the CUDA one lane by lane."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.vllm_checks import (
    check_commits,
    check_plain_tokens,
    check_resets,
    check_single_tokens,
)
from helpers.vllm_layers import PRECISIONS, Layer, Shape
from hybridspec.compat import vllm, vllm_decode
from hybridspec.ops.gated_delta_rule import api, blocks, launch_cuda, row_cursors

BF16, F32 = torch.bfloat16, torch.float32


def use(monkeypatch: pytest.MonkeyPatch, backend: str, *names: str) -> None:
    """Have the functions call the operators with a backend of their own."""
    for name in names:
        module = vllm if hasattr(vllm, name) else vllm_decode
        monkeypatch.setattr(module, name, partial(getattr(module, name), backend=backend))


def check_steps(shape: Shape, precision: str, rows: int, mode: str, ring: int) -> None:
    """Windows that wrap, folds with rows and without, padding."""
    layer = Layer(shape, PRECISIONS[precision], 6, ring, seed=rows)
    for block, start, history in ((5, ring - 3, 16 - rows), (2, 3, 1), (3, ring - 2, 7), (4, 0, 0)):
        layer.start(block)
        layer.fill(block, start, history)
        layer.is_flush[block] = block % 2
    layer.is_flush[4] = 1
    sizes = {"max_cache_len": 16, "max_spec_len": rows}
    layer.check([3, 0, 5, 2, 4], [0, 2, rows, rows, 1], tail=1, mode=mode, **sizes)
    layer.check([4, 2], [0, 0], tail=1, **sizes)


@pytest.mark.interpreted
class TestTriton:
    """Kernels in Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ("verify_blocks", "commit_blocks", "reset_blocks")
        use(monkeypatch, "triton", *names, "verify_rows", "materialize_rows", "decode")

    @pytest.mark.parametrize("mode", ["both", "verify", "flush"])
    @pytest.mark.parametrize("rows", [2, 5, 8])
    def test_steps(self, rows: int, mode: str) -> None:
        check_steps(Shape(1, 2, 32, 48), "s32_a32", rows, mode, 16)

    def test_rings_of_more_rows(self) -> None:
        check_steps(Shape(1, 2, 16, 32), "s32_a32", 3, "both", 64)

    def test_every_block_may_be_one(self) -> None:
        layer = Layer(Shape(1, 2, 16, 16), PRECISIONS["s32_a32"], 2, 16)
        layer.start(0, 1)
        layer.fill(0, 14, 6)
        layer.check([-1, 0, 1], [1, 3, 2], null=-1, max_cache_len=16, max_spec_len=4)

    @pytest.mark.parametrize("length", [2, 10, 16])
    def test_single_tokens(self, length: int) -> None:
        check_single_tokens(length, "s32_a32", "cpu")

    def test_plain_tokens(self) -> None:
        check_plain_tokens("s32_a32", "cpu")

    def test_commits(self) -> None:
        check_commits("cpu")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
    def test_resets(self, dtype: torch.dtype) -> None:
        check_resets(dtype, "cpu")


class TestCuda:
    """The CUDA kernel, compiled for the CPU and run lane by lane."""

    @pytest.fixture(autouse=True)
    def cuda_on_this_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch_cuda, "load_kernel", cuda_on_cpu.load_kernel)
        served = api.VERIFY_BACKENDS["cuda"]._replace(explain=launch_cuda.explain_tensors)
        monkeypatch.setitem(api.VERIFY_BACKENDS, "cuda", served)
        for op in (blocks._verify_blocks, row_cursors._verify_rows):
            monkeypatch.setattr(op, "_runs", {})
        use(monkeypatch, "cuda", "verify_blocks", "verify_rows")
        monkeypatch.setattr(Layer, "is_rounded", True)

    @pytest.mark.parametrize("mode", ["both", "verify", "flush"])
    @pytest.mark.parametrize("precision", ["s32_a16", "s16_a16"])
    @pytest.mark.parametrize("rows", [3, 8])
    def test_steps(self, rows: int, precision: str, mode: str) -> None:
        check_steps(Shape(1, 2, 128, 64), precision, rows, mode, 16)

    def test_rings_of_more_rows(self) -> None:
        check_steps(Shape(1, 1, 128, 64), "s16_a16", 4, "both", 32)

    @pytest.mark.parametrize("length", [2, 10, 16])
    def test_single_tokens(self, length: int) -> None:
        check_single_tokens(length, "s16_a16", "cpu", Shape(1, 2, 128, 64))

    def test_calls_without_rows_are_left_to_others(self) -> None:
        layer = Layer(Shape(1, 1, 128, 64), (BF16, BF16), 2, 16)
        layer.start(1)
        layer.fill(1, 3, 4)
        layer.is_flush[1] = 1
        with pytest.raises(NotImplementedError, match="there are no rows"):
            layer.check([1], [0], max_cache_len=16, max_spec_len=4)
