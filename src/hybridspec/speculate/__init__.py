"""The speculative decoding method: `step` is all of it, on one page."""

from __future__ import annotations

from hybridspec.speculate.acceptance import AcceptanceModel
from hybridspec.speculate.costs import Costs, CostTable, LearntCosts, row_budgets
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
from hybridspec.speculate.policy import (
    DynamicPolicy,
    FixedPolicy,
    Policy,
    PolicyReport,
    StepPlan,
    StepSeen,
)
from hybridspec.speculate.step import decode_step, prefill_step, verify_step

__all__ = [
    "AcceptanceModel",
    "Asks",
    "CostTable",
    "Costs",
    "Decoder",
    "Draft",
    "Drafter",
    "DraftsFromLists",
    "DynamicPolicy",
    "FixedPolicy",
    "ForcedAcceptance",
    "LearntCosts",
    "ListDrafter",
    "Logprob",
    "LogprobReport",
    "LookupDrafter",
    "MtpDrafter",
    "NoDrafter",
    "Outcome",
    "Policy",
    "PolicyReport",
    "StepPlan",
    "StepSeen",
    "TokenLogprobs",
    "decode_step",
    "prefill_step",
    "report_logprobs",
    "row_budgets",
    "verify_step",
]
