"""Writes a trained demo model as a folder that `transformers` reads, and reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_model.model import DemoConfig, DemoModel

FILE_TOKEN = "<|file|>"
FILE_TOKEN_ID = 256
_FP32_ENDINGS = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")


def export_folder(model: DemoModel, folder: Path) -> None:
    """Writes config, 16-bit weights (gates and gated norms in fp32) and tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, tensor in model.state_dict().items():
        dtype = torch.float32 if name.endswith(_FP32_ENDINGS) else torch.bfloat16
        weights[name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model_config(model.config))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": FILE_TOKEN_ID, "eos_token_id": FILE_TOKEN_ID, "do_sample": False},
    )
    _write_json(folder / "tokenizer.json", tokenizer_definition())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": FILE_TOKEN,
            "eos_token": FILE_TOKEN,
            "pad_token": FILE_TOKEN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_positions,
        },
    )


def load_folder(folder: Path, device: str = "cpu") -> DemoModel:
    """The exported model in fp32, with the weights as rounded in the file."""
    config = json.loads((folder / "config.json").read_text())
    model = DemoModel(DemoConfig())
    if model_config(model.config) != config:
        raise ValueError(f"{folder}/config.json does not describe the demo geometry")
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.to(device).eval().requires_grad_(False)


def model_config(config: DemoConfig) -> dict:
    """The fields of `config.json`."""
    layer_types = [
        "full_attention" if config.is_full_attention(i) else "linear_attention"
        for i in range(config.num_layers)
    ]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "layer_types": layer_types,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": config.conv_width,
        "linear_key_head_dim": config.gdn_key_dim,
        "linear_value_head_dim": config.gdn_value_dim,
        "linear_num_key_heads": config.gdn_key_heads,
        "linear_num_value_heads": config.gdn_value_heads,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
        },
        "bos_token_id": FILE_TOKEN_ID,
        "eos_token_id": FILE_TOKEN_ID,
        "use_cache": True,
    }


def tokenizer_definition() -> dict:
    """A byte-level BPE without merges whose token b is byte b; 256 begins and ends a file.

    A text is taken for the beginning of a file: without 256 in front, the model is in the middle of
    one, where blanks are the likeliest bytes.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    file_token = {"id": FILE_TOKEN_ID, "content": FILE_TOKEN, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    begin = {"SpecialToken": {"id": FILE_TOKEN, "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [file_token | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, other],
            "special_tokens": {
                FILE_TOKEN: {"id": FILE_TOKEN, "ids": [FILE_TOKEN_ID], "tokens": [FILE_TOKEN]}
            },
        },
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte.

    Printable Latin-1 characters stand for themselves; the other bytes take code points from 256 on,
    in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
