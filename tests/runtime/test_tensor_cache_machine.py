"""Under any interleaving of uses, no two live tensors of a cache share memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from torch import Tensor, UntypedStorage

from hybridspec.runtime import tensor_cache
from hybridspec.runtime.tensor_cache import TensorCache

MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# All but the last two are of one size class, so that shapes and types trade buffers.
SHAPES = [(2, 3), (3, 2), (4, 4), (1, 5), (2, 2, 4), (16, 32), (48, 16)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
INDEX = st.integers(0, 63)
DERIVE = {
    "view": lambda x: x.view(x.numel()) if x.is_contiguous() else x.view(x.shape),
    "reshape": lambda x: x.reshape(-1),
    "slice": lambda x: x[1:],
    "transpose": lambda x: x.transpose(0, -1),
    "storage handle": lambda x: x.untyped_storage(),
}


@dataclass
class Held:
    """A tensor or a storage handle, which allocation it stems from, and what is written there."""

    owner: int
    stamp: int
    value: Tensor | UntypedStorage

    def extent(self) -> tuple[int, int]:
        if isinstance(self.value, UntypedStorage):
            return self.value.data_ptr(), self.value.data_ptr() + self.value.nbytes()
        steps = zip(self.value.shape, self.value.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        start = self.value.data_ptr()
        return start, start + (last + 1) * self.value.itemsize


class CacheMachine(RuleBasedStateMachine):
    """Allocates, derives views and drops, in every order that hypothesis thinks of."""

    def __init__(self, cache: TensorCache, mode: type, max_templates: int = 5) -> None:
        super().__init__()
        self.mode = mode()
        self.patch = mock.patch.object(tensor_cache, "_MAX_TEMPLATES", max_templates)
        self.mode.__enter__()
        self.patch.start()
        self.cache = cache.__enter__()
        self.held: list[Held] = []
        self.num_owners = 0

    def teardown(self) -> None:
        self.held.clear()
        self.cache.__exit__(None, None, None)
        self.patch.stop()
        self.mode.__exit__(None, None, None)

    def hold(self, value: Tensor | UntypedStorage, stamp: int, owner: int | None = None) -> None:
        if owner is None:
            owner = self.num_owners
            self.num_owners += 1
        self.held.append(Held(owner, stamp, value))

    def tensor(self, index: int) -> Held:
        tensors = [held for held in self.held if isinstance(held.value, Tensor)]
        return tensors[index % len(tensors)]

    def has_tensor(self) -> bool:
        return any(isinstance(held.value, Tensor) for held in self.held)

    @rule(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES), count=st.integers(1, 3))
    def alloc(self, shape, dtype, count):
        for _ in range(count):
            stamp = 1 + self.num_owners % 100
            self.hold(self.cache.alloc(shape, dtype).fill_(stamp), stamp)

    @precondition(has_tensor)
    @rule(index=INDEX, name=st.sampled_from(list(DERIVE)))
    def derive(self, index, name):
        held = self.tensor(index)
        value = DERIVE[name](held.value)
        is_copy = value.data_ptr() and value.data_ptr() != held.value.data_ptr()
        if is_copy and name == "reshape":
            self.hold(value, held.stamp)
        else:
            self.hold(value, held.stamp, held.owner)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def drop(self, index):
        del self.held[index % len(self.held)]

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def drop_one_allocation(self, index):
        owner = self.held[index % len(self.held)].owner
        self.held = [held for held in self.held if held.owner != owner]

    @precondition(has_tensor)
    @rule()
    def drop_parents(self):
        """Leave only the newest use of each allocation alive."""
        self.held = list({held.owner: held for held in self.held}.values())

    @precondition(has_tensor)
    @rule(index=INDEX, max_idle_bytes=st.sampled_from([None, 0, 512, 2048]))
    def forget_or_evict(self, index, max_idle_bytes):
        if max_idle_bytes is None:
            self.cache.forget(self.tensor(index).value)
        else:
            self.cache.evict(max_idle_bytes)

    @invariant()
    def no_two_share_memory(self):
        extents = [
            (*held.extent(), held.owner)
            for held in self.held
            if isinstance(held.value, UntypedStorage) or held.value.numel()
        ]
        extents.sort()
        end, owner = 0, -1
        for start, stop, who in extents:
            assert start >= end or who == owner, f"allocations {owner} and {who} share memory"
            if stop > end:
                end, owner = stop, who

    @invariant()
    def values_stay(self):
        for held in self.held:
            if isinstance(held.value, Tensor):
                assert (held.value == held.stamp).all(), f"allocation {held.owner} was overwritten"

    @invariant()
    def each_buffer_is_listed_once(self):
        listed = [buffer.cdata for pool in self.cache._pools.values() for buffer in pool]
        assert sorted(listed) == sorted(self.cache._members)
        assert self.cache._num_templates == sum(map(len, self.cache._forms.values()))


class TooHigh(TensorCache):
    """A cache whose idle count is one too high, and that does not check the first use."""

    def __enter__(self) -> TooHigh:
        super().__enter__()
        self._bias = replace(self._bias, uses=self._bias.uses + 1)
        return self

    def _is_counted(self, buffer) -> bool:
        return True


def machine_settings(**options) -> settings:
    return settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_no_two_live_tensors_overlap(device, mode):
    hits = []

    class Machine(CacheMachine):
        def teardown(self):
            hits.append(self.cache.stats().num_hits)
            assert self.cache.is_recycling
            super().teardown()

    run_machine(lambda: Machine(TensorCache(device), mode), settings=machine_settings())
    assert sum(hits) > 400


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:the tensor cache recycles nothing")
def test_the_machine_finds_an_idle_count_that_is_one_too_high(device, mode):
    quick = machine_settings(phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError, match="share memory"):
        run_machine(lambda: CacheMachine(TooHigh(device), mode), settings=quick)
