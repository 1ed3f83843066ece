"""The speculative decoding method: draft, verify, accept, commit."""

from __future__ import annotations

from hybridspec.speculate.accept import accept_prefix
from hybridspec.speculate.choose import NO_TOKEN, ChoiceRule, choose_and_report, choose_tokens
from hybridspec.speculate.draft import Draft, Drafter, MtpDrafter
from hybridspec.speculate.logprobs import Logprob, TokenLogprobs, report_logprobs
from hybridspec.speculate.lookup import LookupDrafter
from hybridspec.speculate.penalties import LogitEdits, edit_logits
from hybridspec.speculate.plan import plan_drafts
from hybridspec.speculate.verify import Verified, commit_rows, verify_drafts

__all__ = [
    "NO_TOKEN",
    "ChoiceRule",
    "Draft",
    "Drafter",
    "LogitEdits",
    "Logprob",
    "LookupDrafter",
    "MtpDrafter",
    "TokenLogprobs",
    "Verified",
    "accept_prefix",
    "choose_and_report",
    "choose_tokens",
    "commit_rows",
    "edit_logits",
    "plan_drafts",
    "report_logprobs",
    "verify_drafts",
]
