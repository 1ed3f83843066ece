"""Streams, captured graphs and a full device: what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from hybridspec.runtime.shared_outputs import SharedOutputs
from hybridspec.runtime.tensor_cache import TensorCache

pytestmark = pytest.mark.gpu
BATCHES = [8, 3]


@pytest.fixture
def cache():
    with TensorCache("cuda") as cache:
        yield cache


def capture(function) -> torch.cuda.CUDAGraph:
    """Warm a function up on a side stream, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_recycles_and_equals_torch_empty(cache, mode):
    with mode():
        tensor = cache.alloc((8, 64), torch.bfloat16)
        expected = torch.empty((8, 64), dtype=torch.bfloat16, device="cuda")
        assert tensor.device == expected.device == cache.device
        assert tensor.is_inference() == expected.is_inference()
        address, child = tensor.data_ptr(), tensor.t()[3:]
        del tensor
        assert cache.alloc((8, 64), torch.bfloat16).data_ptr() != address
        del child
        assert cache.alloc((8, 64), torch.bfloat16).data_ptr() == address


def test_queued_kernels_read_the_old_values(cache):
    tensor = cache.alloc((1 << 20,)).fill_(1.0)
    torch.cuda._sleep(50_000_000)
    copy = tensor + 0
    address = tensor.data_ptr()
    del tensor
    again = cache.alloc((1 << 20,)).fill_(2.0)
    assert again.data_ptr() == address
    assert (copy == 1.0).all() and (again == 2.0).all()


def test_a_buffer_serves_one_stream_only(cache):
    side = torch.cuda.Stream()
    address = cache.alloc((8, 64)).data_ptr()
    with torch.cuda.stream(side):
        other = cache.alloc((8, 64))
        assert other.data_ptr() != address
        other_address = other.data_ptr()
        del other
        assert cache.alloc((8, 64)).data_ptr() == other_address
    assert cache.alloc((8, 64)).data_ptr() == address
    assert cache.stats().num_buffers == 2


def test_a_forgotten_tensor_can_be_recorded_on_another_stream(cache):
    side = torch.cuda.Stream()
    tensor = cache.alloc((1 << 20,)).fill_(3.0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        copy = tensor + 0
    assert cache.forget(tensor)
    tensor.record_stream(side)
    del tensor
    cache.alloc((1 << 20,)).fill_(4.0)
    torch.cuda.current_stream().wait_stream(side)
    assert (copy == 3.0).all()


def test_capture_takes_no_buffers_and_replay_writes_none(cache):
    x = torch.arange(512.0, device="cuda").view(8, 64)
    result = torch.zeros(8, 64, device="cuda")

    def step() -> None:
        hidden = cache.alloc((8, 64))
        torch.mul(x, 2, out=hidden)
        result.copy_(hidden + 1)

    graph = capture(step)
    assert cache.stats().num_bypassed == 1
    live = [cache.alloc((8, 64)).fill_(float(stamp)) for stamp in range(6)]
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, x * 2 + 1)
    assert all((tensor == stamp).all() for stamp, tensor in enumerate(live))


def test_graphs_of_different_batch_sizes_share_an_output(cache):
    outputs = SharedOutputs("cuda")
    outputs.reserve("target", 8 * 64 * 4)
    outputs.reserve("draft", 8 * 64 * 4)
    x = torch.randn(8, 64, device="cuda")
    graphs = {}
    for name, scale in [("target", 2.0), ("draft", 3.0)]:
        for batch in BATCHES:
            out = outputs.tensor(name, (batch, 64))

            def step(out=out, batch=batch, scale=scale) -> None:
                torch.mul(x[:batch], scale, out=out)

            graphs[name, batch] = capture(step), out
    for name in ("target", "draft"):
        assert len({graphs[name, batch][1].data_ptr() for batch in BATCHES}) == 1
    for batch in BATCHES:
        x.normal_()
        graphs["target", batch][0].replay()
        graphs["draft", batch][0].replay()
        torch.testing.assert_close(graphs["target", batch][1], x[:batch] * 2)
        torch.testing.assert_close(graphs["draft", batch][1], x[:batch] * 3)


def test_an_output_cannot_be_reserved_while_a_graph_is_captured():
    outputs = SharedOutputs("cuda")
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(RuntimeError, match="'late' must be reserved before the capture"):
            outputs.reserve("late", 64)


def test_a_full_device_takes_idle_buffers_back(cache):
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(cache.device).total_memory
    limit = torch.cuda.memory_reserved() + (256 << 20)
    assert torch.cuda.mem_get_info()[0] > 512 << 20
    try:
        torch.cuda.set_per_process_memory_fraction(limit / total_bytes)
        cache.alloc((160 << 20,), torch.int8)
        assert cache.alloc((208 << 20,), torch.int8).numel() == 208 << 20
        assert cache.stats().num_buffers == 1
        kept = cache.alloc((208 << 20,), torch.int8)
        with pytest.raises(torch.OutOfMemoryError):
            cache.alloc((160 << 20,), torch.int8)
        assert kept.fill_(1).numel() == 208 << 20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
