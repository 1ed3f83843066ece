"""Loading onto a CUDA device."""

from __future__ import annotations

import pytest
import torch

from hybridspec.bundled import bundled_model_path
from hybridspec.models import load_model

pytestmark = pytest.mark.gpu


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
