"""What a model is, in this package's words.

The only place with field names of Hugging Face `config.json` files. Every other module
reads a `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.fields import Fields, is_there, read_json
from hybridspec.values import shown

__all__ = ["GdnConfig", "ModelConfig", "MoeConfig"]

_FAMILIES = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
}
# Hybrids of other kinds: right files, which nothing here computes.
_OTHER_HYBRIDS = ("kimi_linear", "nemotron_h", "olmo_hybrid", "qwen4_exp")
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_LAYER_KINDS = {"linear_attention": "gdn", "full_attention": "attention"}
_STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Fields whose other values would change the arithmetic: name, values this package computes.
_FIXED_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("mlp_bias", (False,)),
    ("attn_output_gate", (True,)),
    ("output_gate_type", ("swish", "silu", None)),
    ("mtp_use_dedicated_embeddings", (False,)),
    ("use_sliding_window", (False,)),
)
# The sections of a rotation with several positions coincide where all positions are a text's.
_ROPE_FIELDS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnConfig:
    """Sizes of the Gated DeltaNet layers: H, HV, K, V and the width of the convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes of the mixtures of experts.

    Attributes:
        num_experts: E, experts that a row can be routed to.
        experts_per_token: how many it is routed to.
        expert_ffn_size: inner size of each of them.
        shared_ffn_size: inner size of the expert that every row passes.
        is_normalized: whether the weights of a row's experts are scaled to the sum of one.
        dense_layers: layers of the trunk that have a plain MLP instead.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_ffn_size: int
    is_normalized: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a hybrid language model.

    Attributes:
        model_type: name of the model's kind as the file gives it.
        ffn_size: inner size of the plain MLPs, 0 where there are none.
        moe: the mixtures of experts, None where every MLP is a plain one.
        layer_kinds: "gdn" or "attention" for every layer of the trunk.
        rotary_dim: leading dimensions of each attention head that are rotated.
        max_positions: longest sequence that the model was made for.
        is_head_tied: whether the embedding is the LM head where the files hold none.
        num_mtp_layers: draft layers that the file announces, 1 if it is silent; the weights decide
            what is there.
        state_dtype: dtype in which the checkpoint wants its recurrent states kept.
        eos_token_ids: tokens that end a sequence.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layer_kinds: tuple[str, ...]
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    is_head_tied: bool
    gdn: GdnConfig
    num_mtp_layers: int
    state_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None

    @property
    def family(self) -> str:
        """How the weights are laid out: "qwen3_5", "qwen3_5_moe" or "qwen3_next"."""
        return _FAMILIES[self.model_type]

    @property
    def num_layers(self) -> int:
        """Layers of the trunk, without the draft head."""
        return len(self.layer_kinds)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the end tokens) of a folder.

        Args:
            path: folder in the Hugging Face layout.

        Returns:
            The configuration of the text model; vision parts of composite files are ignored.

        Raises:
            CheckpointError: if a file is missing, broken or contradicts itself.
            UnsupportedError: if it describes a model that this package does not compute.
        """
        folder = Path(path)
        file = folder / "config.json"
        if is_there(folder / "adapter_config.json"):
            raise UnsupportedError(
                f"{folder}/adapter_config.json: an unmerged adapter (LoRA); "
                f"merge it into its base model first"
            )
        for name in _QUANTIZATION_FILES:
            if is_there(folder / name):
                raise UnsupportedError(f"{folder / name}: quantized files are not supported")
        if not is_there(file):
            raise CheckpointError(f"{folder}: expected a model folder with config.json, found none")
        raw = read_json(file)
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if is_there(generation_file) else {}
        return _config_from_fields(Fields(raw, str(file)), Fields(generation, str(generation_file)))


def _config_from_fields(fields: Fields, generation: Fields) -> ModelConfig:
    _require_known_arithmetic(fields)
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.fail(
            "num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads})"
        )
    gdn = GdnConfig(
        num_key_heads=fields.size("linear_num_key_heads"),
        num_value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        conv_width=fields.size("linear_conv_kernel_dim", 4),
    )
    if gdn.num_value_heads % gdn.num_key_heads:
        raise fields.fail(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({gdn.num_key_heads})"
        )
    head_dim = fields.size("head_dim", 256)
    rope_theta, rotary_dim = _rope(fields, head_dim)
    layer_kinds = _layer_kinds(fields)
    moe = _moe(fields, len(layer_kinds))
    has_plain_mlps = moe is None or bool(moe.dense_layers)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        ffn_size=fields.size("intermediate_size") if has_plain_mlps else 0,
        moe=moe,
        layer_kinds=layer_kinds,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.size("max_position_embeddings", 32768),
        is_head_tied=fields.any_flag("tie_word_embeddings"),
        gdn=gdn,
        num_mtp_layers=fields.get("mtp_num_hidden_layers", 1),
        state_dtype=_state_dtype(fields),
        eos_token_ids=_eos_token_ids(generation) or _eos_token_ids(fields),
    )


def _require_known_arithmetic(fields: Fields) -> None:
    model_type = fields.model_type
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        expected = ", ".join(repr(name) for name in _FAMILIES)
        message = (
            f"{fields.source}: model_type: expected one of {expected}, found {shown(model_type)}"
        )
        raise (UnsupportedError if model_type in _OTHER_HYBRIDS else CheckpointError)(message)
    for name, allowed in _FIXED_FIELDS:
        value = fields.get(name, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"{fields.source}: {name}: only {allowed[0]!r} is supported, found {shown(value)}"
            )
    if fields.get("quantization_config") is not None:
        raise UnsupportedError(
            f"{fields.source}: quantization_config: quantized files are not supported"
        )
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if fields.get(name, 1) not in (0, 1):
            raise UnsupportedError(
                f"{fields.source}: {name}: only 0 or 1 is supported, "
                f"found {shown(fields.get(name))}"
            )


def _rope(fields: Fields, head_dim: int) -> tuple[float, int]:
    """Return theta and the rotated dimensions, from `rope_parameters` or the top level."""
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        found = fields.get(name, {})
        if not isinstance(found, dict):
            raise fields.fail(name, "an object")
        found = {key: value for key, value in found.items() if value is not None}
        for key in ("rope_type", "type"):
            if found.get(key, "default") != "default":
                raise UnsupportedError(
                    f"{fields.source}: {name}: rope_type: only 'default' is supported, "
                    f"found {shown(found[key])}"
                )
        if unknown := [key for key in found if key not in _ROPE_FIELDS]:
            raise UnsupportedError(
                f"{fields.source}: {name}: only {', '.join(_ROPE_FIELDS)} are supported, "
                f"found {shown(unknown[0])}"
            )
        nested |= found
    rope = Fields(
        {
            "rope_theta": fields.get("rope_theta"),
            "partial_rotary_factor": fields.get("partial_rotary_factor"),
            **nested,
        },
        f"{fields.source}: rope_parameters",
    )
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 0.25))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise rope.fail("partial_rotary_factor", f"an even share of head_dim ({head_dim})")
    return rope.number("rope_theta", 10_000.0), rotary_dim


def _layer_kinds(fields: Fields) -> tuple[str, ...]:
    num_layers = fields.size("num_hidden_layers")
    names = fields.get("layer_types")
    if names is None:
        interval = fields.size("full_attention_interval", 4)
        return tuple("gdn" if (i + 1) % interval else "attention" for i in range(num_layers))
    if not isinstance(names, list) or len(names) != num_layers:
        raise fields.fail("layer_types", f"a list of {num_layers} names (num_hidden_layers)")
    if unknown := [name for name in map(str, names) if name not in _LAYER_KINDS]:
        raise UnsupportedError(
            f"{fields.source}: layer_types: only {', '.join(map(repr, _LAYER_KINDS))} are "
            f"supported, found {shown(unknown[0])}"
        )
    return tuple(_LAYER_KINDS[name] for name in names)


def _moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    """Return the mixtures of experts, or None where every layer has a plain MLP."""
    family = _FAMILIES[fields.model_type]
    dense_layers = _dense_layers(fields, num_layers) if family == "qwen3_next" else ()
    if family == "qwen3_5" or len(dense_layers) == num_layers:
        return None
    num_experts = fields.size("num_experts")
    experts_per_token = fields.size("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most num_experts ({num_experts})")
    is_normalized = fields.flag("norm_topk_prob", True)
    if family == "qwen3_5_moe" and not is_normalized:
        raise UnsupportedError(
            f"{fields.source}: norm_topk_prob: only True is supported in this family, found False"
        )
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_ffn_size=fields.size("moe_intermediate_size"),
        shared_ffn_size=fields.size("shared_expert_intermediate_size"),
        is_normalized=is_normalized,
        dense_layers=dense_layers,
    )


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a Qwen3-Next trunk that have a plain MLP."""
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise fields.fail("mlp_only_layers", "a list of layer numbers")
    if fields.get("num_experts") == 0:
        return tuple(range(num_layers))
    interval = fields.size("decoder_sparse_step", 1)
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % interval)


def _state_dtype(fields: Fields) -> torch.dtype:
    name = str(fields.get("mamba_ssm_dtype", "float32"))
    if name not in _STATE_DTYPES:
        raise fields.fail("mamba_ssm_dtype", "one of " + ", ".join(map(repr, _STATE_DTYPES)))
    return _STATE_DTYPES[name]


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise fields.fail("eos_token_id", "numbers")
    return tuple(ids)
