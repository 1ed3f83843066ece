"""Which drafter an engine uses."""

from __future__ import annotations

from collections.abc import Sequence

from hybridspec.config import EngineConfig
from hybridspec.models import HybridModel
from hybridspec.runtime import Pools
from hybridspec.speculate import (
    Drafter,
    DraftsFromLists,
    ListDrafter,
    LookupDrafter,
    MtpDrafter,
    NoDrafter,
)

__all__ = ["make_drafter"]


def make_drafter(
    config: EngineConfig,
    model: HybridModel,
    pools: Pools,
    words: Sequence[int] | None,
    given: ListDrafter | None,
) -> Drafter:
    """Return the drafter that was given, or the one that a resolved config names.

    Args:
        config: which one.
        model, pools: of a draft head.
        words: tokens that it chooses from; None is all.
        given: the caller's.
    """
    if given is not None:
        return DraftsFromLists(given)
    if config.drafter == "mtp":
        return MtpDrafter(model, pools, words)
    if config.drafter == "lookup":
        return LookupDrafter()
    return NoDrafter()
