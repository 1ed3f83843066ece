"""The speculative decoding method: `step` is all of it, on one page."""

from __future__ import annotations

from hybridspec.speculate.decoder import Asks, Decoder, Drafter, Outcome
from hybridspec.speculate.draft import Draft, DraftsFromLists, ListDrafter, MtpDrafter, NoDrafter
from hybridspec.speculate.forced import ForcedAcceptance
from hybridspec.speculate.logprobs import (
    Logprob,
    LogprobReport,
    TokenLogprobs,
    report_logprobs,
)
from hybridspec.speculate.lookup import LookupDrafter
from hybridspec.speculate.step import decode_step, prefill_step

__all__ = [
    "Asks",
    "Decoder",
    "Draft",
    "Drafter",
    "DraftsFromLists",
    "ForcedAcceptance",
    "ListDrafter",
    "Logprob",
    "LogprobReport",
    "LookupDrafter",
    "MtpDrafter",
    "NoDrafter",
    "Outcome",
    "TokenLogprobs",
    "decode_step",
    "prefill_step",
    "report_logprobs",
]
