"""Hardware and compiler are told apart, and nothing touches a GPU before a tensor lives there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from hybridspec.errors import UnsupportedError
from hybridspec.ops import _triton_support as support
from hybridspec.ops._backends import choose_backend


@pytest.mark.parametrize(
    ("capability", "version", "text"),
    [
        ((7, 5), "3.6.0", r"hardware sm_75 .* needs sm_80 or later"),
        ((7, 5), None, r"hardware sm_75"),
        ((9, 0), None, r"no compiler: Triton is not installed \(device is sm_90\)"),
        ((10, 7), "3.6.0", r"compiler: Triton 3\.6\.0 does not emit sm_107; needs 3\.9 or later"),
        ((12, 0), "3.5.1", r"compiler: Triton 3\.5\.1 does not emit sm_120; needs 3\.6 or later"),
        ((13, 0), "3.9.0", r"compiler: no Triton release is known to emit sm_130"),
    ],
)
def test_reasons(capability: tuple[int, int], version: str | None, text: str) -> None:
    assert re.match(text, support.explain_target(capability, version))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_what_is_served(capability: tuple[int, int]) -> None:
    for version in ("3.6.0", "3.9.0", "3.10.1"):
        assert support.explain_target(capability, version) is None


@pytest.mark.parametrize(
    ("capability", "version", "serves"),
    [
        ((7, 5), "3.9.0", False),
        ((10, 3), "3.6.0", True),
        ((10, 7), "3.6.0", False),
        ((10, 7), "3.9.0", True),
        ((12, 0), "3.6.0", True),
    ],
)
def test_auto_moves_on_and_an_explicit_choice_says_why(
    capability: tuple[int, int], version: str, serves: bool
) -> None:
    candidates = {
        "triton": lambda: support.explain_target(capability, version),
        "reference": lambda: None,
    }
    assert choose_backend("op", "auto", candidates) == ("triton" if serves else "reference")
    if serves:
        assert choose_backend("op", "triton", candidates) == "triton"
        return
    name = "sm_{}{}".format(*capability)
    with pytest.raises(UnsupportedError, match=name):
        choose_backend("op", "triton", candidates)


def test_tensors_on_a_cpu_are_for_the_interpreter_only() -> None:
    explanation = support.explain_tensors([("x", torch.zeros(1))])
    assert explanation == "the tensors are not on a CUDA device"


PROBE = """
import os, sys
import torch

def forbidden(*args, **kwargs):
    raise AssertionError("CUDA was asked for")

for name in ("_lazy_init", "get_device_capability", "device_count", "is_available"):
    setattr(torch.cuda, name, forbidden)
import hybridspec
from hybridspec.ops import causal_conv1d, gated_delta_rule, paged_attention, ring, verify_plan
from hybridspec.compat import flashinfer
if (child := os.fork()) == 0:
    slots = torch.zeros(1, dtype=torch.int32)
    ring.reset_slots([torch.ones(2, 3)], slots)
    ring.decide_folds(slots, slots, slots, slots.to(torch.int8), max_window=16)
    os._exit(int("triton" in sys.modules))
assert os.waitpid(child, 0)[1] == 0
assert "triton" not in sys.modules
"""


def test_nothing_touches_a_gpu_at_import_or_in_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
