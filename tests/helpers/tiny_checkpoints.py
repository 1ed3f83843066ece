"""Random Qwen3.5 checkpoints of a few thousand parameters, with the transformers model beside them.

Every tensor is randomised, norms, A_log and dt_bias included: left at their initial zeros and ones,
they would hide mistakes in how they enter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

__all__ = ["Layout", "TinyCheckpoint", "build_tiny_checkpoint"]

Layout = Literal["text", "language_model", "composite"]

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 96,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    },
}
# Where transformers' generic draft model keeps the tensors of a Qwen3.5 head.
_ORACLE_NAMES = {
    "mtp.fc.": "layers.0.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
    "mtp.layers.0.": "layers.0.mtp_block.",
    "mtp.norm.": "layers.0.post_norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCheckpoint:
    """A folder on disk, and what transformers makes of the same numbers.

    Attributes:
        folder: what to load.
        model: fp32, in evaluation mode.
        mtp: transformers' draft model over it, or None.
    """

    folder: Path
    model: Qwen3_5ForCausalLM
    mtp: MtpModel | None

    def draft_hidden(self, token_ids: Tensor, hidden: Tensor, cache: MtpCache) -> Tensor:
        """Run transformers' draft layer over rows [N] and [N, D] behind `cache`."""
        start = cache.get_seq_length(0)
        positions = torch.arange(start, start + token_ids.shape[0])[None]
        with torch.inference_mode():
            return self.mtp.forward_layer(0, hidden[None], positions, cache, token_ids[None])[0]


def build_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    has_mtp: bool = True,
    layout: Layout = "text",
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> TinyCheckpoint:
    """Write a random checkpoint.

    Args:
        folder: where to; made if it does not exist.
        seed: of all numbers.
        has_mtp: whether to add a draft head.
        layout: "text" as transformers saves the text model; "language_model" with the names of
            released files; "composite" those names, a config with `text_config` and vision tensors.
        num_shards: 1 is a single file without an index.
        dtype: of the stored matrices; A_log and the gated norms stay fp32.
        **sizes: config fields that replace the small defaults.

    Returns:
        The folder and the models of transformers that hold the same numbers.
    """
    config = Qwen3_5TextConfig(**{**_SIZES, **sizes})
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    model = Qwen3_5ForCausalLM(config).eval()
    mtp = MtpModel(model, 1).eval() if has_mtp else None
    generator = torch.Generator().manual_seed(seed)
    for module in (model, mtp):
        for name, parameter in module.named_parameters() if module is not None else ():
            _randomise(name, parameter.data, generator)
            stays_wide = name.endswith(("A_log", "linear_attn.norm.weight"))
            parameter.data.copy_(parameter.data.to(torch.float32 if stays_wide else dtype))
    tensors = _file_tensors(model, mtp, dtype)
    if layout != "text":
        tensors = {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in tensors.items()
        }
    if layout == "composite":
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 2)
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder, tensors, num_shards)
    _write_config(folder, config, layout, has_mtp)
    return TinyCheckpoint(folder=folder, model=model, mtp=mtp)


def _randomise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(tensor.shape, generator=generator)
    if name.endswith("A_log"):
        tensor.copy_(torch.rand(tensor.shape, generator=generator).mul_(4).add_(0.1).log_())
    elif name.endswith("linear_attn.norm.weight"):
        tensor.copy_(1 + 0.3 * noise)
    elif tensor.dim() == 1:
        tensor.copy_(0.3 * noise)
    elif "conv1d" in name:
        tensor.copy_(0.5 * noise)
    else:
        tensor.copy_(noise * (0.5 if "embed" in name else tensor.shape[-1] ** -0.5))


def _file_tensors(
    model: Qwen3_5ForCausalLM, mtp: MtpModel | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if mtp is not None:
        own = {n: t for n, t in mtp.state_dict().items() if n.startswith("layers.")}
        for file_name, oracle_name in _ORACLE_NAMES.items():
            for name in [n for n in own if n.startswith(oracle_name)]:
                tensors[name.replace(oracle_name, file_name, 1)] = own.pop(name)
        assert not own, f"unmapped draft tensors: {sorted(own)}"
    wide = ("A_log", "linear_attn.norm.weight")
    return {
        name: tensor.to(torch.float32 if name.endswith(wide) else dtype).clone()
        for name, tensor in tensors.items()
    }


def _write_tensors(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    metadata = {"format": "pt"}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        return
    weight_map = {}
    names = sorted(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata=metadata)
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_config(folder: Path, config: Qwen3_5TextConfig, layout: Layout, has_mtp: bool) -> None:
    fields = config.to_dict()
    for name in ("num_mtp_layers", "mtp_layer_types"):
        fields.pop(name)
    fields["mtp_num_hidden_layers"] = int(has_mtp)
    fields["mamba_ssm_dtype"] = "float32"
    if layout == "composite":
        fields = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": config.tie_word_embeddings,
            "text_config": fields,
        }
    else:
        fields["architectures"] = ["Qwen3_5ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
