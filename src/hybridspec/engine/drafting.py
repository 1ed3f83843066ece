"""Which drafter an engine uses."""

from __future__ import annotations

from hybridspec.config import EngineConfig
from hybridspec.engine.draft_vocabulary import draft_vocabulary
from hybridspec.models import HybridModel, Tokenizer
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
    tokenizer: Tokenizer | None,
    given: ListDrafter | None,
) -> Drafter:
    """Return the drafter that was given, or the one that a resolved config names."""
    if given is not None:
        return DraftsFromLists(given)
    if config.drafter == "mtp":
        words = draft_vocabulary(config.draft_vocab, tokenizer, model.config.vocab_size)
        return MtpDrafter(model, pools, words)
    if config.drafter == "lookup":
        return LookupDrafter()
    return NoDrafter()
