"""Statistics of drafts: how often they are accepted, and how confident the drafter was lately.

The two are learnt apart. How often a draft of some confidence is accepted, by position,
changes slowly. How confident the drafts are changes with the text, and is seen without
verification. Everything is a small tensor on the CPU: a loop over the requests of a step would hold
up the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["AcceptanceModel"]

NUM_BINS = 32
_OWN_WORD = 2.0  # observations that a drafter's own confidence counts for
_SHARED = 8.0  # observations that all positions' acceptance counts for at each of them
_MOST_COUNTED = 2048.0  # observations of a position; then older ones count half
_UNKNOWN = 0.7  # acceptance of a draft of which nothing is known
_LEAST_SAMPLES, _MOST_SAMPLES = 128, 512  # proposals that say how confident the drafter is now
_SMALL = 8  # batches below this are looked at one by one


class AcceptanceModel:
    """Acceptance by position and confidence, and the confidences of the newest proposals.

    Args:
        num_drafts: most drafts k of one request.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._counts = torch.zeros(num_drafts, NUM_BINS)
        self._hits = torch.zeros(num_drafts, NUM_BINS)
        self._index = torch.arange(num_drafts)
        self._sure = torch.zeros(0, num_drafts)  # of the newest proposals, the newest ones last
        self._depth = torch.zeros(0, dtype=torch.int64)  # drafts of each of them
        self._typical = torch.full((num_drafts,), _UNKNOWN)
        self._num_seen = 0  # positions of which something is known
        self._scores = torch.zeros(0, num_drafts)
        self._curves: dict[tuple[int, int], list[float]] = {}

    def note(
        self, depth: int, confidences: Tensor, num_verified: Tensor, num_accepted: Tensor
    ) -> None:
        """Take in what a step did.

        Args:
            depth: drafts that were proposed for each request of the batch.
            confidences: of each request's drafts; 0 where it had none, [B, k] fp32; in.
            num_verified: how many of them were verified, [B] int; in.
            num_accepted: how many of these were right, [B] int; in.
        """
        if depth > 0:
            self._sure = torch.cat([self._sure, confidences])[-_MOST_SAMPLES:]
            depths = torch.full((confidences.shape[0],), depth)
            self._depth = torch.cat([self._depth, depths])[-_MOST_SAMPLES:]
        # What comes behind the first wrong draft says nothing.
        is_seen = self._index < torch.minimum(num_verified, num_accepted + 1)[:, None]
        stands = self._index < num_accepted[:, None]
        place = (self._index * NUM_BINS + _bins(confidences)).flatten()
        self._counts.view(-1).index_add_(0, place, is_seen.flatten().float())
        self._hits.view(-1).index_add_(0, place, (is_seen & stands).flatten().float())

    def table(self) -> Tensor:
        """Return the acceptance of drafts by position and bin of confidence, [k, bins] fp32.

        What was seen at a position leans on what all positions saw, and that on the drafter's own
        word.
        """
        self.forget(_MOST_COUNTED)
        own_word = (torch.arange(NUM_BINS) + 0.5) / NUM_BINS
        shared = (self._hits.sum(0) + _OWN_WORD * own_word) / (self._counts.sum(0) + _OWN_WORD)
        return (self._hits + _SHARED * shared) / (self._counts + _SHARED)

    def forget(self, above: float = 0.0) -> None:
        """Let what was seen so far count half, at positions of which more than this was seen."""
        is_much = self._counts.sum(1, keepdim=True) > above
        self._counts = torch.where(is_much, 0.5 * self._counts, self._counts)
        self._hits = torch.where(is_much, 0.5 * self._hits, self._hits)

    @property
    def by_position(self) -> list[float | None]:
        """Share of verified drafts that stood, those before them standing; None if unseen."""
        hits, counts = self._hits.sum(1).tolist(), self._counts.sum(1).tolist()
        return [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]

    def refresh(self, table: Tensor, num_requests: int) -> None:
        """Look at the newest proposals again.

        Args:
            table: of `table`, [k, bins] fp32; in.
            num_requests: requests of a batch.
        """
        self._curves.clear()
        count = max(_LEAST_SAMPLES, 2 * num_requests)
        sure, depth = self._sure[-count:], self._depth[-count:]
        sure = torch.where(sure > 0, table[self._index, _bins(sure)], 0.0)
        is_proposed = self._index < depth[:, None]
        known = is_proposed.sum(0)
        typical = torch.where(is_proposed, sure, 0.0).sum(0) / known.clamp(min=1)
        for j in range(self.num_drafts):
            if int(known[j]):
                self._typical[j], self._num_seen = typical[j], max(self._num_seen, j + 1)
            elif j >= self._num_seen and j:
                self._typical[j] = self._typical[j - 1]
        # What was not proposed is taken to be as it usually is.
        self._scores = torch.where(is_proposed, sure, self._typical).cumprod(1)

    def expected(self, num_requests: int, depth: int, quota: float) -> float:
        """Estimate how many drafts of a request stand if the batch's best ones are verified.

        Args:
            num_requests: requests of the batch.
            depth: drafts that are proposed for each request.
            quota: drafts for each request that are verified.
        """
        group = num_requests if num_requests < _SMALL else 0
        key = (group, depth)
        if key not in self._curves:
            self._curves[key] = self._curve(group, depth)
        curve = self._curves[key]
        place = min(max(quota, 0.0), depth) / max(depth, 1) * (len(curve) - 1)
        low = min(int(place), len(curve) - 1)
        high = min(low + 1, len(curve) - 1)
        return curve[low] + (place - low) * (curve[high] - curve[low])

    def _curve(self, group: int, depth: int) -> list[float]:
        """Drafts that stand per request when 0, 1, ... of those of a group are verified."""
        if depth == 0:
            return [0.0]
        scores = self._scores if len(self._scores) else self._typical.cumprod(0)[None]
        group = min(group or len(scores), len(scores))
        # The oldest ones that do not fill a group are left out.
        whole = scores[len(scores) % group :, :depth].reshape(-1, group * depth)
        best = whole.sort(dim=1, descending=True).values.mean(0) / group
        return [0.0, *best.cumsum(0).tolist()]


def _bins(confidences: Tensor) -> Tensor:
    """Bin of each confidence, int64; NaN is in the first one."""
    safe = torch.where(confidences > 0, confidences, 0.0).clamp(max=1.0)
    return (safe * NUM_BINS).long().clamp(max=NUM_BINS - 1)
