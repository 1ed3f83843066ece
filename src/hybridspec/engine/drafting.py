"""Which drafter an engine uses."""

from __future__ import annotations

import logging
from dataclasses import replace

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

__all__ = ["make_drafter", "resolve_drafter"]

_log = logging.getLogger("hybridspec")


def resolve_drafter(config: EngineConfig, model: HybridModel, name: str) -> EngineConfig:
    """Return the config with the drafter chosen, and without drafts where there is none.

    Args:
        config: what was asked for.
        model: the model, with or without a draft head.
        name: what to call the model in messages.

    Raises:
        ValueError: if "mtp" was asked for and there is no head.
    """
    drafter = config.drafter
    if config.draft_tokens == 0 or drafter == "none":
        return replace(config, drafter="none", mtp_from=None, draft_tokens=0)
    if model.mtp is None:
        if drafter == "mtp":
            raise ValueError(
                f"drafter: expected an MTP head (mtp.* tensors) for 'mtp', {name} has none; "
                f"take one from another checkpoint with mtp_from (--mtp-from)"
            )
        if drafter == "auto":
            drafter = "lookup"
            _log.warning(
                "%s has no MTP head (mtp.* tensors): drafting by prompt lookup; mtp_from "
                "(--mtp-from) takes a head from another checkpoint, drafter (--drafter) chooses",
                name,
            )
    elif drafter == "auto":
        drafter = "mtp"
    origin = f" of {config.mtp_from or name}" if drafter == "mtp" else ""
    _log.info("drafter: %s%s", drafter, origin)
    return replace(config, drafter=drafter)


def make_drafter(
    config: EngineConfig, model: HybridModel, pools: Pools, given: ListDrafter | None
) -> Drafter:
    """Return the drafter that was given, or the one that a resolved config names."""
    if given is not None:
        return DraftsFromLists(given)
    if config.drafter == "mtp":
        return MtpDrafter(model, pools)
    if config.drafter == "lookup":
        return DraftsFromLists(LookupDrafter())
    return NoDrafter()
