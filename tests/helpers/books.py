"""Who has what of an engine's pools."""

from __future__ import annotations

from hybridspec.engine.engine import Engine

__all__ = ["check_books"]


def check_books(engine: Engine) -> None:
    """Check that every slot and page of an idle engine belongs to a prefix, or is free, once."""
    allocator, sampling = engine.allocator, engine.runner.decoder.sampling
    kept = list(allocator.prefixes._kept.values())
    slots = allocator._free_slots + [one.slot for one in kept]
    assert sorted(slots) == list(range(engine.pools.num_slots))
    held = {page for one in kept for page in one.pages}
    assert sorted([*allocator._free_pages, *held]) == list(range(engine.pools.num_pages))
    assert held == set(allocator._keepers) and not allocator._users
    assert not (allocator.prefixes._expected or allocator._begun or allocator._written)
    assert not engine.runner.launched and not sampling._held
    for pool in sampling._pools.values():
        assert pool.take(pool.size) == 0  # all in one piece
        pool.give(0, pool.size)
    while allocator.give_up():
        pass
    assert sorted(allocator._free_slots) == list(range(engine.pools.num_slots))
    assert sorted(allocator._free_pages) == list(range(engine.pools.num_pages))
