"""Random checkpoints of a few thousand parameters, with the transformers model beside them.

transformers writes them. What it leaves out is added: the draft head, and the forms of names and
experts in which models are released. Every tensor is randomised, norms, A_log and dt_bias included:
left at their initial zeros and ones, they would hide mistakes in how they enter.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

__all__ = ["FAMILIES", "Experts", "Family", "Layout", "TinyCheckpoint", "build_tiny_checkpoint"]

Family = Literal["qwen3_5", "qwen3_5_moe", "qwen3_next"]
Layout = Literal["text", "language_model", "composite"]
Experts = Literal["separate", "fused"]
FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
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
_MLP_SIZES: dict[str, Any] = {"intermediate_size": 80}
_MOE_SIZES: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
# Sizes, and the names of the classes: text config and model, composite config and model.
_KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_5": (
        _MLP_SIZES,
        (
            "Qwen3_5TextConfig",
            "Qwen3_5ForCausalLM",
            "Qwen3_5Config",
            "Qwen3_5ForConditionalGeneration",
        ),
    ),
    "qwen3_5_moe": (
        _MOE_SIZES,
        (
            "Qwen3_5MoeTextConfig",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeConfig",
            "Qwen3_5MoeForConditionalGeneration",
        ),
    ),
    "qwen3_next": ({**_MLP_SIZES, **_MOE_SIZES}, ("Qwen3NextConfig", "Qwen3NextForCausalLM")),
}
_VISION_SIZES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 2,
}
# Where transformers' generic draft model keeps the tensors of a Qwen head.
_ORACLE_NAMES = {
    "mtp.fc.": "layers.0.eh_proj.",
    "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
    "mtp.layers.0.": "layers.0.mtp_block.",
    "mtp.norm.": "layers.0.post_norm.",
}
_WIDE = ("A_log", "linear_attn.norm.weight")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCheckpoint:
    """A folder on disk, and what transformers makes of the same numbers.

    Attributes:
        folder: what to load.
        model: fp32, in evaluation mode.
        mtp: transformers' draft model over it, or None.
    """

    folder: Path
    model: Any
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
    family: Family = "qwen3_5",
    seed: int = 0,
    has_mtp: bool = True,
    layout: Layout = "text",
    experts: Experts = "separate",
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> TinyCheckpoint:
    """Write a random checkpoint.

    Args:
        folder: where to; made if it does not exist.
        family: which architecture.
        seed: of all numbers.
        has_mtp: whether to add a draft head.
        layout: "text" as transformers saves the text model; "language_model" with the names of
            released files; "composite" as it saves the model with a vision tower.
        experts: "separate" as transformers saves them; "fused" as in some released files.
        num_shards: 1 is a single file without an index; otherwise about so many, and one more for
            the draft head.
        dtype: of the stored matrices; A_log and the gated norms stay fp32.
        **sizes: config fields that replace the small defaults.

    Returns:
        The folder and the models of transformers that hold the same numbers.
    """
    own_sizes, classes = _KINDS[family]
    config = getattr(transformers, classes[0])(**{**_SIZES, **own_sizes, **sizes})
    config.num_mtp_layers = 1
    config.mtp_layer_types = ["full_attention"]
    model = getattr(transformers, classes[1])(config).eval()
    mtp = MtpModel(model, 1).eval() if has_mtp else None
    generator = torch.Generator().manual_seed(seed)
    for module in (model, mtp):
        for name, parameter in module.named_parameters() if module is not None else ():
            _randomise(name, parameter.data, generator)
            parameter.data.copy_(_stored(name, parameter.data, dtype))
    saved = model
    if layout == "composite":
        saved = _with_vision(model, *(getattr(transformers, name) for name in classes[2:]))
    num_bytes = sum(t.numel() * dtype.itemsize for t in saved.state_dict().values())
    saved.save_pretrained(
        folder,
        state_dict={name: _stored(name, t, dtype) for name, t in saved.state_dict().items()},
        max_shard_size=2 * num_bytes if num_shards == 1 else num_bytes // num_shards + 1,
    )
    for file in sorted(folder.glob("*.safetensors")):
        _rewrite(file, lambda tensors: _released(tensors, layout, experts))
    _rewrite_index(folder, layout)
    if mtp is not None:
        _add_mtp(folder, _mtp_tensors(mtp, dtype, experts))
    _finish_config(folder, has_mtp)
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


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32 if name.endswith(_WIDE) else dtype)


def _with_vision(model: Any, config_class: type, model_class: type) -> Any:
    """Return the model that has a vision tower beside these text layers."""
    text = model.config.to_dict()
    vision = {**_VISION_SIZES, "out_hidden_size": model.config.hidden_size}
    tied = model.config.tie_word_embeddings
    whole = model_class(
        config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    )
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    return whole


def _mtp_tensors(mtp: MtpModel, dtype: torch.dtype, experts: Experts) -> dict[str, Tensor]:
    own = {n: t for n, t in mtp.state_dict().items() if n.startswith("layers.")}
    tensors = {}
    for file_name, oracle_name in _ORACLE_NAMES.items():
        for name in [n for n in own if n.startswith(oracle_name)]:
            tensors[name.replace(oracle_name, file_name, 1)] = own.pop(name).to(dtype)
    assert not own, f"unmapped draft tensors: {sorted(own)}"
    return tensors if experts == "fused" else _separated(tensors)


def _separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give every expert matrices of its own, as transformers writes them."""
    separated = {}
    for name, tensor in tensors.items():
        prefix, found, kind = name.partition(".experts.")
        if not found:
            separated[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                separated[f"{prefix}.experts.{expert}.{part}.weight"] = rows.contiguous()
    return separated


def _released(tensors: dict[str, Tensor], layout: Layout, experts: Experts) -> dict[str, Tensor]:
    """Bring what transformers wrote into another form."""
    if experts == "fused":
        tensors = _fused(tensors)
    return {_released_name(name, layout): tensor for name, tensor in tensors.items()}


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    for prefix in {n.partition(".experts.")[0] for n in tensors if ".experts." in n}:
        count = sum(n.startswith(f"{prefix}.experts.") for n in tensors) // 3
        each = [
            {
                part: tensors[f"{prefix}.experts.{expert}.{part}.weight"]
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            for expert in range(count)
        ]
        fused[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat((one["gate_proj"], one["up_proj"])) for one in each]
        )
        fused[f"{prefix}.experts.down_proj"] = torch.stack([one["down_proj"] for one in each])
    return fused


def _released_name(name: str, layout: Layout) -> str:
    if layout == "language_model":
        return re.sub(r"^model\.", "model.language_model.", name)
    return name


def _rewrite(file: Path, edit: Any) -> None:
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def _rewrite_index(folder: Path, layout: Layout) -> None:
    index = folder / _INDEX
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {
            _released_name(name, layout): file for name, file in content["weight_map"].items()
        }
        index.write_text(json.dumps(content))


def _add_mtp(folder: Path, tensors: dict[str, Tensor]) -> None:
    index = folder / _INDEX
    if not index.exists():
        _rewrite(folder / "model.safetensors", lambda held: held | tensors)
        return
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    index.write_text(json.dumps(content))


def _finish_config(folder: Path, has_mtp: bool) -> None:
    """Put the fields of released files in place of those that build the draft model here."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    fields = config.get("text_config", config)
    for name in ("num_mtp_layers", "mtp_layer_types"):
        fields.pop(name)
    fields["mtp_num_hidden_layers"] = int(has_mtp)
    fields["mamba_ssm_dtype"] = "float32"
    file.write_text(json.dumps(config, indent=1))
