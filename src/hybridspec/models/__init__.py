"""Models: from a folder in the Hugging Face layout to logits over the pools."""

from __future__ import annotations

from hybridspec.models.checkpoint import OnProgress
from hybridspec.models.config import GdnConfig, ModelConfig, MoeConfig
from hybridspec.models.hub import find_model
from hybridspec.models.hybrid import HybridModel, load_model, read_facts
from hybridspec.models.mtp import MtpHead
from hybridspec.models.tokenizer import Detokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Detokenizer",
    "GdnConfig",
    "HybridModel",
    "ModelConfig",
    "MoeConfig",
    "MtpHead",
    "OnProgress",
    "Tokenizer",
    "find_model",
    "load_model",
    "load_tokenizer",
    "read_facts",
]
