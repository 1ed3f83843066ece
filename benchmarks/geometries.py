"""Published sizes of models, written as folders with a config.json alone, for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridspec.bundled import bundled_model_path

__all__ = ["GEOMETRIES", "write_geometry", "write_tokenizer"]

_SHARED: dict[str, Any] = {
    "dtype": "bfloat16",
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
# Model cards of Qwen3.5.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "9b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}


def write_geometry(folder: Path, name: str, vocab_size: int) -> Path:
    """Write a folder that `LLM(folder, dummy_weights=True)` takes.

    Args:
        folder: where; made if it is not there.
        name: one of GEOMETRIES.
        vocab_size: words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {**_SHARED, **GEOMETRIES[name], "vocab_size": vocab_size}
    layers = sizes["num_hidden_layers"]
    sizes["layer_types"] = [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
    ]
    (folder / "config.json").write_text(json.dumps(sizes, indent=2))
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Add a tokenizer to such a folder, in which every token is a word of four letters or so."""
    file = json.loads((bundled_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, taken = file["model"]["vocab"], 256 + len(file["added_tokens"])
    vocab |= {f"\u0120w{i}": i for i in range(taken, vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
