"""Which drafter an engine uses."""

from __future__ import annotations

from hybridspec.config import EngineConfig
from hybridspec.models import HybridModel
from hybridspec.runtime import Pools
from hybridspec.speculate import Drafter, LookupDrafter, MtpDrafter

__all__ = ["make_drafter"]


def make_drafter(config: EngineConfig, model: HybridModel, pools: Pools) -> Drafter | None:
    """Return the drafter that a resolved config names."""
    if config.drafter == "mtp":
        return MtpDrafter(model, pools)
    return LookupDrafter() if config.drafter == "lookup" else None
