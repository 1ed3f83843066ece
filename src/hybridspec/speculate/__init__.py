"""The speculative decoding method: draft, verify, accept, commit."""

from __future__ import annotations

from hybridspec.speculate.accept import accept_prefix
from hybridspec.speculate.choose import ChoiceRule, choose_tokens
from hybridspec.speculate.draft import Draft, Drafter, MtpDrafter
from hybridspec.speculate.plan import plan_drafts
from hybridspec.speculate.verify import Verified, commit_rows, layout_rows, verify_drafts

__all__ = [
    "ChoiceRule",
    "Draft",
    "Drafter",
    "MtpDrafter",
    "Verified",
    "accept_prefix",
    "choose_tokens",
    "commit_rows",
    "layout_rows",
    "plan_drafts",
    "verify_drafts",
]
