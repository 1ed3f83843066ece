"""What alloc returns, when it recycles and when it must not, and what the context leaves behind."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UnsupportedError
from hybridspec.runtime import tensor_cache
from hybridspec.runtime.tensor_cache import CacheStats, TensorCache, size_class

MODES = [torch.inference_mode, torch.no_grad, torch.enable_grad]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


@pytest.fixture
def cache():
    with TensorCache() as cache:
        yield cache


@pytest.fixture(params=MODES, ids=lambda mode: mode.__name__)
def in_mode(request):
    with request.param():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), [2, 5], torch.Size([1, 8, 1]), (0, 4), (7, 0)])
def test_it_equals_torch_empty(cache, in_mode, shape, dtype):
    expected = torch.empty(shape, dtype=dtype)
    for tensor in (cache.alloc(shape, dtype), cache.alloc(shape, dtype)):
        assert tensor.shape == expected.shape and tensor.stride() == expected.stride()
        assert tensor.dtype == dtype and tensor.device == expected.device
        assert tensor.is_contiguous() and tensor.storage_offset() == 0
        assert tensor.is_inference() == expected.is_inference()
        assert not tensor._is_view() and tensor.is_leaf and not tensor.requires_grad


def test_a_dropped_tensor_is_recycled(cache, in_mode):
    address = cache.alloc((8, 64)).data_ptr()
    assert all(cache.alloc((8, 64)).data_ptr() == address for _ in range(10))
    assert cache.stats() == CacheStats(
        num_hits=10, num_misses=1, num_bypassed=0, num_buffers=1, held_bytes=2048, idle_bytes=2048
    )
    assert cache.stats().hit_rate == 10 / 11


def test_shapes_and_types_of_one_size_class_share_buffers(cache):
    address = cache.alloc((8, 64)).data_ptr()
    for shape, dtype in [((512,), torch.int32), ((1024,), torch.bfloat16), ((500,), torch.float32)]:
        assert cache.alloc(shape, dtype).data_ptr() == address
    with torch.inference_mode():
        assert cache.alloc((8, 64)).data_ptr() == address
    assert cache.alloc((1, 64)).data_ptr() != address
    assert cache.stats().num_buffers == 2


USES = {
    "view": lambda x: x.view(64, 8),
    "reshape": lambda x: x.reshape(-1),
    "slice": lambda x: x[5:],
    "empty slice": lambda x: x[8:],
    "transpose": lambda x: x.transpose(0, 1),
    "view of view": lambda x: x[2:].t()[3:].unsqueeze(0),
    "detach": lambda x: x.detach(),
    "chunks": lambda x: x.chunk(2),
    "storage handle": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "numpy view": lambda x: x[4:].numpy()[1:],
    "memoryview": lambda x: memoryview(x.numpy()),
    "DLPack capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "DLPack tensor": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "closure": lambda x: lambda: x,
}


@pytest.mark.parametrize("name", USES)
def test_what_outlives_its_parent_keeps_the_buffer_and_returns_it_once(cache, in_mode, name):
    parent = cache.alloc((8, 64))
    address = parent.data_ptr()
    child = USES[name](parent)
    del parent
    others = [cache.alloc((8, 64)) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    del child
    after = [cache.alloc((8, 64)) for _ in range(3)]
    assert [tensor.data_ptr() for tensor in after].count(address) == 1
    assert len({tensor.data_ptr() for tensor in others + after}) == 6


def test_autograd_keeps_the_buffer(cache):
    weight = torch.ones(8, requires_grad=True)
    activation = cache.alloc((8,)).fill_(3.0)
    address = activation.data_ptr()
    loss = (weight * activation).sum()
    del activation
    assert cache.alloc((8,)).fill_(7.0).data_ptr() != address
    loss.backward()
    assert weight.grad.tolist() == [3.0] * 8
    del loss
    first, second = cache.alloc((8,)), cache.alloc((8,))
    assert address in (first.data_ptr(), second.data_ptr())


def test_a_reference_cycle_keeps_the_buffer_until_it_is_collected(cache):
    cycle = [cache.alloc((8,))]
    address = cycle[0].data_ptr()
    cycle.append(cycle)
    del cycle
    gc.disable()
    try:
        assert cache.alloc((8,)).data_ptr() != address
    finally:
        gc.enable()
    gc.collect()
    assert cache.alloc((8,)).data_ptr() == address


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.untyped_storage().resize_(0),
        lambda x: x.untyped_storage().resize_(1 << 16),
        lambda x: x.resize_(1 << 16),
        lambda x: x.share_memory_(),
    ],
    ids=["emptied", "grown", "tensor grown", "shared with other processes"],
)
def test_a_storage_that_moved_leaves_the_cache(cache, move):
    tensor = cache.alloc((8, 64))
    storage = tensor.untyped_storage()._cdata
    move(tensor)
    del tensor
    fresh = cache.alloc((8, 64)).fill_(1.0)
    assert fresh.untyped_storage()._cdata not in (storage, 0) and fresh.sum() == 512
    assert cache.stats().num_buffers == 1 and cache.stats().num_misses == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_idle_count_one_too_high_shares_memory_where_nothing_checks_it(monkeypatch, mode):
    """The fault itself: inference mode shows it; elsewhere a view also holds its base."""
    monkeypatch.setattr(TensorCache, "_is_counted", lambda self, buffer: True)
    with mode(), TensorCache() as cache:
        cache._bias = replace(cache._bias, uses=cache._bias.uses + 1)
        parent = cache.alloc((8, 64))
        child = parent[1:]
        del parent
        again = cache.alloc((8, 64))
        is_shared = again.untyped_storage()._cdata == child.untyped_storage()._cdata
    assert is_shared == (mode is torch.inference_mode)


@pytest.mark.parametrize("error", [-1, 1, 2])
@pytest.mark.parametrize("count", ["uses", "refs_with_templates", "uses_per_template"])
def test_a_wrong_idle_count_is_noticed_and_nothing_is_recycled(in_mode, count, error):
    with TensorCache() as cache:
        cache._bias = replace(cache._bias, **{count: getattr(cache._bias, count) + error})
        with pytest.warns(RuntimeWarning, match="recycles nothing") as caught:
            kept = [cache.alloc((8, 64)) for _ in range(5)]
            dropped = {cache.alloc((8, 64)).untyped_storage()._cdata for _ in range(5)}
        assert len(caught) == 1 and not cache.is_recycling
        assert len({tensor.data_ptr() for tensor in kept}) == 5 and len(dropped) >= 1
        assert cache.stats().num_hits == 0 and cache.stats().num_bypassed == 10
    with cache:
        assert cache.is_recycling


def test_a_count_below_idle_is_noticed(cache):
    tensor = cache.alloc((8, 64))
    buffer = cache._members[tensor.untyped_storage()._cdata]
    buffer.idle_uses += 2
    with pytest.warns(RuntimeWarning, match="less than idle"):
        assert cache.alloc((8, 64)).data_ptr() != tensor.data_ptr()
    assert not cache.is_recycling


def test_a_count_that_cannot_be_calibrated_gives_one_warning(monkeypatch):
    monkeypatch.setattr("hybridspec.runtime.use_count.count_uses", lambda cdata: 1)
    with pytest.warns(RuntimeWarning, match="recycles nothing") as caught, TensorCache() as cache:
        first, second = cache.alloc((8, 64)), cache.alloc((8, 64))
        assert first.data_ptr() != second.data_ptr() and not cache.is_recycling
    assert len(caught) == 1


def test_a_warning_made_an_error_leaves_the_cache_not_entered(monkeypatch):
    cache = TensorCache()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("hybridspec.runtime.use_count.count_uses", lambda cdata: 1)
        with pytest.raises(RuntimeWarning):
            cache.__enter__()
    with cache:
        assert cache.is_recycling
    assert not cache.is_recycling


def test_nothing_global_is_patched():
    watched = [torch, torch.Tensor, torch._C.TensorBase, torch.UntypedStorage, torch.cuda]
    before = [{name: id(value) for name, value in vars(owner).items()} for owner in watched]

    def assert_same():
        for owner, ids in zip(watched, before, strict=True):
            assert {name: id(vars(owner)[name]) for name in ids} == ids

    with TensorCache() as cache:
        cache.alloc((8, 64)).add_(1)
        assert_same()
    assert_same()
    with pytest.raises(KeyError), TensorCache() as cache:
        raise KeyError
    assert_same()


def test_an_exception_leaves_the_cache_empty_and_live_tensors_whole():
    cache = TensorCache()
    kept = []
    with pytest.raises(ZeroDivisionError), cache:
        kept.append(cache.alloc((8, 64)).fill_(5.0))
        cache.alloc((8, 64))
        kept.append(1 / 0)
    assert cache.stats().num_buffers == 0 and not cache.is_recycling
    with cache:
        assert cache.alloc((8, 64)).fill_(1.0).data_ptr() != kept[0].data_ptr()
    assert (kept[0] == 5.0).all()


def test_it_nests_and_the_outermost_exit_counts():
    with TensorCache() as cache:
        address = cache.alloc((8,)).data_ptr()
        with cache:
            assert cache.alloc((8,)).data_ptr() == address
        assert cache.is_recycling and cache.alloc((8,)).data_ptr() == address
    assert not cache.is_recycling
    outside = [cache.alloc((8,)) for _ in range(2)]
    assert outside[0].data_ptr() != outside[1].data_ptr() and cache.stats().num_bypassed == 2


def test_streams_and_captures_are_told_apart(cache, monkeypatch):
    """The bookkeeping of the CUDA path; the device itself is tested where there is one."""
    stream, is_capturing = 7, False
    for name, function in [
        ("_cuda_getCurrentRawStream", lambda index: stream),
        ("_cuda_isCurrentStreamCapturing", lambda: is_capturing),
    ]:
        monkeypatch.setattr(torch._C, name, function, raising=False)
    cache._is_cuda = True
    first = cache.alloc((8, 64)).data_ptr()
    stream = 8
    second = cache.alloc((8, 64)).data_ptr()
    assert second != first and cache.alloc((8, 64)).data_ptr() == second
    stream = 7
    assert cache.alloc((8, 64)).data_ptr() == first
    is_capturing = True
    cache.alloc((8, 64))
    assert cache.stats().num_bypassed == 1 and cache.stats().num_buffers == 2


def test_alloc_inside_alloc_leaves_the_buffers_alone(cache):
    """As a finalizer would that the garbage collector runs in the middle of an alloc."""
    address = cache.alloc((8, 64)).data_ptr()
    with cache._guard:
        inner = cache.alloc((8, 64))
    assert inner.data_ptr() != address and cache.stats().num_bypassed == 1
    assert cache.alloc((8, 64)).data_ptr() == address


def test_threads_never_share_a_buffer(cache):
    overwritten = []

    def work(stamp: int) -> None:
        live = []
        for step in range(400):
            live.append(cache.alloc((4, 16)).fill_(stamp)[1:])
            if not all((tensor == stamp).all() for tensor in live):
                overwritten.append(stamp)
            del live[: 3 if step % 7 == 0 else len(live) - 2]

    threads = [threading.Thread(target=work, args=(stamp,)) for stamp in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overwritten
    stats = cache.stats()
    assert stats.num_hits + stats.num_misses + stats.num_bypassed == 1600 and stats.num_hits > 400


def test_evict_drops_the_oldest_idle_buffers(cache):
    live = cache.alloc((128,))
    sizes = [1024, 2048, 4096]
    for size in sizes:
        cache.alloc((size,), torch.int8)
    assert cache.stats().idle_bytes == sum(sizes)
    assert cache.evict(4096) == 1024 + 2048 and cache.stats().idle_bytes == 4096
    assert cache.evict(4096) == 0
    assert cache.evict() == 4096 and cache.stats().num_buffers == 1
    assert live.fill_(1.0).sum() == 128 and cache.stats().held_bytes == 512


def test_max_bytes_evicts_idle_buffers_and_otherwise_bypasses():
    with TensorCache(max_bytes=4096) as cache:
        cache.alloc((2048,), torch.int8)
        live = cache.alloc((4096,), torch.int8)
        assert cache.stats().held_bytes == 4096 and cache.stats().num_buffers == 1
        assert cache.alloc((512,), torch.int8).numel() == 512
        assert cache.stats().num_bypassed == 1 and cache.stats().held_bytes == 4096
        del live
        cache.alloc((512,), torch.int8)
        assert cache.stats().held_bytes == 512


def test_forget_leaves_the_memory_to_torch(cache):
    tensor = cache.alloc((8, 64)).fill_(2.0)
    assert cache.forget(tensor[3:].t()) and not cache.forget(tensor)
    assert not cache.forget(torch.empty(3))
    assert cache.stats().num_buffers == 0 and cache.stats().held_bytes == 0
    assert cache.alloc((8, 64)).fill_(1.0).data_ptr() != tensor.data_ptr()
    assert (tensor == 2.0).all()


def test_ever_new_shapes_do_not_pile_up(cache, monkeypatch):
    monkeypatch.setattr(tensor_cache, "_MAX_TEMPLATES", 8)
    live = cache.alloc((4,)).fill_(9.0)
    for rows in range(1, 100):
        cache.alloc((rows,), torch.int8).fill_(1)
        assert cache._num_templates <= 8
    assert (live == 9.0).all() and cache.stats().num_buffers == 2
    assert cache.stats().num_misses == 2


def test_the_cache_works_with_out_arguments_and_in_compiled_functions(cache):
    x = torch.ones(8, 8)
    expected = torch.full((8, 8), 9.0)

    @torch.compile(backend="eager")
    def step(x):
        y = cache.alloc((8, 8))
        torch.mm(x, x, out=y)
        return y + 1

    for _ in range(3):
        torch.testing.assert_close(step(x), expected)
    assert cache.stats().num_misses == 1


def test_failing_calls_change_nothing(cache):
    for shape in [(-1, 4), (-2, -3), (2.0, 3.5)]:
        with pytest.raises((RuntimeError, TypeError)):
            cache.alloc(shape)
    with pytest.raises(TypeError, match="shape"):
        cache.alloc(5)
    assert cache.stats().num_buffers == 0
    assert cache.alloc((4,)).fill_(1.0).sum() == 4


def test_wrong_constructor_arguments():
    with pytest.raises(UnsupportedError, match="device: expected a cpu or cuda device, got meta"):
        TensorCache("meta")
    with pytest.raises(ValueError, match="max_bytes: expected None or at least 0, got -1"):
        TensorCache(max_bytes=-1)


def test_it_is_silent_where_the_count_can_be_trusted():
    with warnings.catch_warnings(), TensorCache() as cache:
        warnings.simplefilter("error")
        assert cache.alloc((8, 64)).shape == (8, 64)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_size_classes(first, second):
    assert first <= size_class(first) <= max(math.ceil(first * 1.125), first + 511)
    assert size_class(size_class(first)) == size_class(first)
    assert (first > second) <= (size_class(first) >= size_class(second))
    assert size_class(first) % 512 == 0
