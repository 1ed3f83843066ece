"""The calibration accepts counts that see every use, and names what a blind one misses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from hybridspec.runtime import use_count
from hybridspec.runtime.use_count import CountError, calibrate, make_template, read

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KEPT: list[object] = []


class Sample:
    """A storage as a cache holds it."""

    def __init__(self, num_bytes: int) -> None:
        self.storage = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
        self.cdata = self.storage._cdata


@pytest.mark.parametrize("device", DEVICES)
def test_calibration_is_the_same_in_every_mode_and_again(device):
    biases = {calibrate(torch.device(device)) for _ in range(3)}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            biases.add(calibrate(torch.device(device)))
    (bias,) = biases
    assert bias.uses >= 1 and bias.uses_per_template >= 1


def test_the_bias_predicts_what_another_storage_reads():
    bias = calibrate(torch.device("cpu"))
    sample = Sample(64)
    templates = []
    for count in range(6):
        assert read(sample) == bias.idle(count)
        templates.append(make_template(sample.storage, (2, 2), torch.float32))
    in_use = templates[0].data
    assert read(sample).uses == bias.idle(6).uses + 1
    del in_use
    assert read(sample) == bias.idle(6)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x: x.data_ptr(), "in use reads .*, the same as an idle storage"),
        (lambda x: x.clone(), "in use reads .*, the same as an idle storage"),
        (lambda x: KEPT.append(x[1:]) or x, "dropped: the counts read"),
    ],
    ids=["address", "copy", "leak"],
)
def test_a_use_that_does_not_count_or_does_not_end_is_named(monkeypatch, use, message):
    monkeypatch.setitem(use_count._USES, "the probe", use)
    try:
        with pytest.raises(CountError, match=f"the probe {message}"):
            calibrate(torch.device("cpu"))
    finally:
        KEPT.clear()


@pytest.mark.parametrize("first, step", [(0, 0), (3, 0), (0, 1)], ids=["zero", "three", "rising"])
def test_a_count_that_means_nothing_is_refused(monkeypatch, first, step):
    readings = itertools.count(first, step)
    monkeypatch.setattr(use_count, "count_uses", lambda cdata: next(readings))
    with pytest.raises(CountError):
        calibrate(torch.device("cpu"))


def test_a_bias_that_depends_on_the_mode_is_refused(monkeypatch):
    bias = use_count._measure(torch.device("cpu"))
    other = dataclasses.replace(bias, uses=bias.uses + 1)
    monkeypatch.setattr(
        use_count, "_measure", lambda device: other if torch.is_inference_mode_enabled() else bias
    )
    with pytest.raises(CountError, match="depends on the mode"):
        calibrate(torch.device("cpu"))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4), (3, 0, 2)])
def test_a_template_is_laid_out_like_torch_empty(shape):
    template = make_template(Sample(256).storage, shape, torch.float32)
    expected = torch.empty(shape)
    assert template.shape == expected.shape and template.stride() == expected.stride()
    assert not template._is_view()
