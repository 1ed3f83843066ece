"""The same pools with the log-decay of each token in place of their sums."""

from __future__ import annotations

from helpers.gdn_cases import Pools

__all__ = ["hold_token_decays"]


def hold_token_decays(pools: Pools) -> None:
    """Replace G of the live rows by steps from row to row, and say so."""
    for slot in range(pools.geometry.num_slots):
        rows = pools.live_rows(slot)
        decays = pools.ring.cum_log_decay[slot]
        cum = decays[:, rows]
        decays[:, rows] = cum.diff(dim=1, prepend=cum.new_zeros(cum.shape[0], 1))
    pools.ring = pools.ring._replace(has_token_decay=True)
