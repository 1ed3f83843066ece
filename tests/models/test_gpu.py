"""Loading onto a CUDA device, and the mixture of experts there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.models.test_mlp import make_moe

from hybridspec.bundled import bundled_model_path
from hybridspec.models import load_model

pytestmark = pytest.mark.gpu


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Copy an object with all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: moved(getattr(value, name), device, dtype) for name in names}
        )
    return value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_mixture_equals_the_cpu(dtype: torch.dtype, num_rows: int) -> None:
    # In 16 bits every expert takes part, since rounding may change which ones are the largest.
    moe = moved(make_moe(8, 8) if dtype is torch.bfloat16 else make_moe(16, 4), "cpu", dtype)
    x = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    expected = moved(moe, "cpu", torch.float64).forward(x.double())
    out = moved(moe, "cuda", dtype).forward(x.cuda()).cpu().double()
    assert (out - expected).norm() < (0.02 if dtype is torch.bfloat16 else 1e-5) * expected.norm()


def test_mixture_can_be_captured() -> None:
    """Nothing of it waits for the host."""
    moe = moved(make_moe(16, 4), "cuda", torch.bfloat16)
    x = torch.randn(4, 8, device="cuda").bfloat16()
    for _ in range(2):
        moe.forward(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.forward(x)
    x.copy_(torch.randn(4, 8, device="cuda"))
    graph.replay()
    torch.testing.assert_close(out, moe.forward(x))


def test_tensors_arrive_as_they_are_stored() -> None:
    on_cpu = load_model(bundled_model_path(), dtype=torch.float32)
    on_gpu = load_model(bundled_model_path(), device="cuda", dtype=torch.float32)
    assert on_gpu.num_parameters == on_cpu.num_parameters
    assert on_gpu.embedding.is_cuda and torch.equal(on_gpu.embedding.cpu(), on_cpu.embedding)
    for one, other in zip(on_gpu.layers, on_cpu.layers, strict=True):
        assert torch.equal(one.mixer.in_weight.cpu(), other.mixer.in_weight)
        assert torch.equal(one.mlp.down_weight.cpu(), other.mlp.down_weight)
        assert one.mixer.in_weight.is_contiguous()


def test_auto_dtype_is_the_files() -> None:
    assert load_model(bundled_model_path(), device="cuda").dtype is torch.bfloat16


def test_dummy_weights_are_made_on_the_device() -> None:
    model = load_model(bundled_model_path(), device="cuda", has_dummy_weights=True)
    assert model.head.is_cuda and model.head.isfinite().all()
