"""Pools of a stated size that do not grow, as on a GPU."""

from __future__ import annotations

from hybridspec.engine.engine import Engine

__all__ = ["fix_pools"]


def fix_pools(engine: Engine, *, num_slots: int, num_pages: int) -> None:
    """Let an engine on a CPU, which runs nothing yet, have so many slots and pages for good."""
    allocator, pools = engine.allocator, engine.pools
    pools.shrink(num_slots, num_pages)
    pools.grow_slots(num_slots).grow_pages(num_pages)
    allocator.max_slots, allocator.can_grow = num_slots, False
    allocator.__post_init__()
