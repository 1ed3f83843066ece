"""Work on a device, recorded once and launched again as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Replayed", "free_bytes", "memory_pool", "record"]


class Replayed(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Launch it."""
        ...


def free_bytes(device: torch.device) -> int:
    """Return how much of a device's memory is free."""
    return torch.cuda.mem_get_info(device)[0]


def memory_pool(device: torch.device) -> Any:
    """Return a pool that graphs may share, no two of which run at the same time."""
    return torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, and the function that it was captured from.

    The graph knows addresses alone. What the function works on, and was not allocated in it, has
    to live as long.
    """

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def replay(self) -> None:
        self.graph.replay()


def record(run: Callable[[], None], pool: Any, device: torch.device) -> Replayed:
    """Capture a function, with no live lane, so that it changes nothing.

    Args:
        run: what is captured; held as long as the result is.
        pool: where the graph's tensors lie, as `memory_pool` gives it.
        device: where it runs.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles and loads what is missing
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return _Recorded(graph, run)
