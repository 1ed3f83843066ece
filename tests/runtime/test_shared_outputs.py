"""Outputs of one name share memory; what does not fit or is not reserved is refused."""

from __future__ import annotations

import pytest
import torch

from hybridspec.errors import CapacityError
from hybridspec.runtime.shared_outputs import SharedOutputs


@pytest.fixture
def outputs():
    outputs = SharedOutputs()
    outputs.reserve("logits", 8 * 16 * 4)
    return outputs


def test_batch_sizes_of_one_name_share_memory_and_names_do_not(outputs):
    outputs.reserve("hidden", 64)
    large = outputs.tensor("logits", (8, 16)).fill_(1.0)
    small = outputs.tensor("logits", (3, 16))
    assert small.data_ptr() == large.data_ptr() and small.is_contiguous()
    small.fill_(2.0)
    assert large[:3].unique().tolist() == [2.0] and large[3:].unique().tolist() == [1.0]
    outputs.tensor("hidden", (16,)).fill_(3.0)
    assert (small == 2.0).all()
    assert outputs.tensor("logits", (8, 16), torch.bfloat16).dtype == torch.bfloat16


def test_the_memory_lives_as_long_as_its_tensors(outputs):
    tensor = outputs.tensor("logits", (8, 16)).fill_(4.0)
    outputs.release("logits")
    outputs.reserve("logits", 8 * 16 * 4)
    outputs.tensor("logits", (8, 16)).fill_(5.0)
    assert (tensor == 4.0).all()


def test_wrong_calls(outputs):
    with pytest.raises(CapacityError, match=r"'logits': \[9, 16\] needs 576 bytes, 512 are"):
        outputs.tensor("logits", (9, 16))
    with pytest.raises(ValueError, match=r"name: expected one of \['logits'\], got 'logit'"):
        outputs.tensor("logit", (1, 16))
    with pytest.raises(ValueError, match=r"name: expected one of \['logits'\], got 'logit'"):
        outputs.release("logit")
    with pytest.raises(ValueError, match="'logits' is reserved already"):
        outputs.reserve("logits", 4)
    with pytest.raises(ValueError, match="num_bytes: expected at least 1, got 0"):
        outputs.reserve("hidden", 0)
