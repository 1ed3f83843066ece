"""The speculative decoding method: draft, verify, accept, commit."""

from __future__ import annotations

from hybridspec.speculate.accept import accept_prefix
from hybridspec.speculate.choose import ChoiceRule, choose_tokens
from hybridspec.speculate.draft import Drafter, MtpDrafter
from hybridspec.speculate.verify import Verified, commit_rows, layout_rows, verify_drafts

__all__ = [
    "ChoiceRule",
    "Drafter",
    "MtpDrafter",
    "Verified",
    "accept_prefix",
    "choose_tokens",
    "commit_rows",
    "layout_rows",
    "verify_drafts",
]
