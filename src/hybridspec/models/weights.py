"""Tensors of a checkpoint, read straight to their device, dtype and fused place.

The only place that knows Hugging Face weight names. Every tensor is checked against the shape that
the config implies, and a tensor that nothing asked for is an error: a file that does not match its
config would otherwise run and produce nonsense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.config import ModelConfig
from hybridspec.models.layers import AttentionLayer, DecoderLayer, GdnLayer, Mlp, RmsNorm

__all__ = ["Checkpoint", "WeightReader"]

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_IGNORED_PREFIXES = ("model.visual.", "visual.")
_TRUNK_PREFIXES = ("model.language_model.", "model.")


class Checkpoint:
    """The safetensors files of a folder; reads tensors by name and keeps count of what was read.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        device: where tensors are read to.

    Attributes:
        num_parameters: elements of the tensors read so far.

    Raises:
        CheckpointError: if files are missing or broken.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.num_parameters = 0
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._unread: set[str] = set()
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            self.source = index
            self._open_shards(folder, index)
        elif single.is_file():
            self.source = single
            self._open(single)
        else:
            raise CheckpointError(
                f"{folder}: expected model.safetensors or model.safetensors.index.json, "
                "found neither"
            )
        self._unread = set(self._file_of)
        self.trunk_prefix = _TRUNK_PREFIXES[0]
        if not self.has_prefix(self.trunk_prefix):
            self.trunk_prefix = _TRUNK_PREFIXES[1]

    def _open_shards(self, folder: Path, index: Path) -> None:
        try:
            shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted({folder / shard for shard in shard_of.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: expected a JSON object with a weight_map of names to files "
                f"({type(error).__name__}: {error})"
            ) from None
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(f"{index}: names the file {shard.name}, which does not exist")
            self._open(shard)
        for name, shard in shard_of.items():
            if self._file_of.get(name) != folder / shard:
                raise CheckpointError(f"{folder / shard}: {name}: named by {index.name}, not found")

    def _open(self, file: Path) -> None:
        try:
            handle: Any = safe_open(file, framework="pt", device=str(self.device))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not readable as safetensors ({error})") from None
        self._files[file] = handle
        self._file_of.update(dict.fromkeys(handle.keys(), file))

    def has_prefix(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._file_of)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in."""
        return self._dtype(name, self._slice(name, "any"))

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the device.

        Args:
            name: full name in the files.
            shape: what the config implies.
            dtype: dtype of the result.

        Raises:
            CheckpointError: if the tensor is missing or has another shape.
            UnsupportedError: if it is stored in a dtype that needs a scale.
        """
        stored = self._slice(name, f"shape {list(shape)}")
        if stored.get_shape() != list(shape):
            raise CheckpointError(
                f"{self._file_of[name]}: {name}: expected shape {list(shape)}, "
                f"found {stored.get_shape()}"
            )
        self._dtype(name, stored)
        self._unread.discard(name)
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        self.num_parameters += tensor.numel()
        return tensor.to(dtype)

    def skip(self, name: str) -> None:
        """Count a tensor as read that the model does not need."""
        self._unread.discard(name)

    def require_all_read(self) -> None:
        """Raise CheckpointError if the files hold tensors that the config does not imply."""
        extra = sorted(name for name in self._unread if not name.startswith(_IGNORED_PREFIXES))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise CheckpointError(
                f"{self._file_of[extra[0]]}: {extra[0]}{more}: expected no such tensor by "
                f"config.json, found shape {self._slice(extra[0], 'any').get_shape()}"
            )

    def _slice(self, name: str, expected: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.source}: {name}: expected {expected}, found no tensor")
        return self._files[self._file_of[name]].get_slice(name)

    def _dtype(self, name: str, stored: Any) -> torch.dtype:
        if stored.get_dtype() not in _DTYPES:
            raise UnsupportedError(
                f"{self._file_of[name]}: {name}: expected {', '.join(_DTYPES)}, "
                f"found {stored.get_dtype()}; quantized files are not supported"
            )
        return _DTYPES[stored.get_dtype()]


@dataclass(slots=True, kw_only=True)
class WeightReader:
    """Builds layers from a checkpoint.

    Attributes:
        checkpoint: where tensors come from.
        config: sizes.
        dtype: dtype of matrices and activations.
        backend: handed to the layers.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    backend: str
    _num_pools: dict[str, int] = field(
        init=False, default_factory=lambda: {"gdn": 0, "attention": 0}
    )

    @property
    def vector_dtype(self) -> torch.dtype:
        """The dtype of norms and gates: fp32, or fp64 in an fp64 model."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def has_mtp(self) -> bool:
        """Whether the files hold a draft head."""
        return self.checkpoint.has_prefix("mtp.")

    def embedding(self) -> Tensor:
        """Return the token embedding, [vocab, D]."""
        return self._stored(
            f"{self.checkpoint.trunk_prefix}embed_tokens.weight",
            self.config.vocab_size,
            self.config.hidden_size,
        )

    def head(self, embedding: Tensor) -> Tensor:
        """Return the matrix of the LM head, [vocab, D]; the embedding itself where tied."""
        if self.config.is_head_tied:
            self.checkpoint.skip("lm_head.weight")
            return embedding
        return self._matrix("lm_head.weight", self.config.vocab_size, self.config.hidden_size)

    def final_norm(self) -> RmsNorm:
        """Return the norm behind the last layer."""
        return self._norm(f"{self.checkpoint.trunk_prefix}norm.weight", self.config.hidden_size)

    def trunk_layer(self, index: int) -> DecoderLayer:
        """Return layer `index` of the trunk; layers must be asked for in order."""
        prefix = f"{self.checkpoint.trunk_prefix}layers.{index}."
        return self._layer(prefix, self.config.layer_kinds[index])

    def mtp_layer(self) -> DecoderLayer:
        """Return the draft head's attention layer; asked for after the trunk's."""
        return self._layer("mtp.layers.0.", "attention")

    def mtp_parts(self) -> dict[str, Any]:
        """Return the draft head's own parts, named as in `MtpHead`."""
        size = self.config.hidden_size
        return {
            "embedding_norm": self._norm("mtp.pre_fc_norm_embedding.weight", size),
            "hidden_norm": self._norm("mtp.pre_fc_norm_hidden.weight", size),
            "in_weight": self._matrix("mtp.fc.weight", size, 2 * size),
            "norm": self._norm("mtp.norm.weight", size),
        }

    def _stored(self, name: str, rows: int, columns: int) -> Tensor:
        return self.checkpoint.read(name, (rows, columns), self.dtype)

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return one matrix in the layout of `_empty`."""
        return self._empty(rows, columns).copy_(self._stored(name, rows, columns))

    def _empty(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised matrix for `F.linear`.

        On a CPU its columns lie side by side in memory: products of few rows with weights that are
        not in the cache take 0.7 of the time that way.
        """
        device = self.checkpoint.device
        if device.type == "cpu":
            return torch.empty(columns, rows, dtype=self.dtype, device=device).t()
        return torch.empty(rows, columns, dtype=self.dtype, device=device)

    def _vector(self, name: str, size: int) -> Tensor:
        return self.checkpoint.read(name, (size,), self.vector_dtype)

    def _norm(self, name: str, size: int) -> RmsNorm:
        """Return a block norm, whose weight is stored as its difference from one."""
        return RmsNorm(self._vector(name, size) + 1.0, self.config.norm_eps)

    def _stacked(self, parts: dict[str, int]) -> Tensor:
        """Return matrices over the hidden size, of given row counts, in one."""
        stacked = self._empty(sum(parts.values()), self.config.hidden_size)
        for (name, rows), target in zip(
            parts.items(), stacked.split_with_sizes(list(parts.values())), strict=True
        ):
            target.copy_(self._stored(name, rows, self.config.hidden_size))
        return stacked

    def _layer(self, prefix: str, kind: str) -> DecoderLayer:
        config = self.config
        pool_index = self._num_pools[kind]
        self._num_pools[kind] += 1
        return DecoderLayer(
            mixer=self._gdn(f"{prefix}linear_attn.")
            if kind == "gdn"
            else self._attention(f"{prefix}self_attn."),
            mlp=Mlp(
                gate_up_weight=self._stacked(
                    {
                        f"{prefix}mlp.gate_proj.weight": config.ffn_size,
                        f"{prefix}mlp.up_proj.weight": config.ffn_size,
                    }
                ),
                down_weight=self._matrix(
                    f"{prefix}mlp.down_proj.weight", config.hidden_size, config.ffn_size
                ),
            ),
            mixer_norm=self._norm(f"{prefix}input_layernorm.weight", config.hidden_size),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            pool_index=pool_index,
        )

    def _gdn(self, prefix: str) -> GdnLayer:
        g = self.config.gdn
        v_size = g.num_value_heads * g.value_dim
        conv_shape = (g.conv_dim, 1, g.conv_width)
        return GdnLayer(
            config=self.config,
            in_weight=self._stacked(
                {
                    f"{prefix}in_proj_qkv.weight": g.conv_dim,
                    f"{prefix}in_proj_z.weight": v_size,
                    f"{prefix}in_proj_b.weight": g.num_value_heads,
                    f"{prefix}in_proj_a.weight": g.num_value_heads,
                }
            ),
            conv_weight=self.checkpoint.read(
                f"{prefix}conv1d.weight", conv_shape, self.dtype
            ).squeeze(1),
            A_log=self._vector(f"{prefix}A_log", g.num_value_heads),
            dt_bias=self._vector(f"{prefix}dt_bias", g.num_value_heads),
            norm=RmsNorm(self._vector(f"{prefix}norm.weight", g.value_dim), self.config.norm_eps),
            out_weight=self._matrix(f"{prefix}out_proj.weight", self.config.hidden_size, v_size),
            backend=self.backend,
        )

    def _attention(self, prefix: str) -> AttentionLayer:
        c = self.config
        heads, kv_heads, head_dim = c.num_attention_heads, c.num_kv_heads, c.head_dim
        q_size, kv_size = heads * head_dim, kv_heads * head_dim
        stored = {
            name: self._stored(f"{prefix}{name}_proj.weight", rows, c.hidden_size)
            for name, rows in (("q", 2 * q_size), ("k", kv_size), ("v", kv_size))
        }
        # Stored rows of q alternate per head: q, then its gate.
        q, gate = stored["q"].view(heads, 2, head_dim, -1).unbind(1)
        in_weight = self._empty(2 * (q_size + kv_size), c.hidden_size)
        for target, part in zip(
            in_weight.split_with_sizes((q_size, kv_size, kv_size, q_size)),
            (q.flatten(0, 1), stored["k"], stored["v"], gate.flatten(0, 1)),
            strict=True,
        ):
            target.copy_(part)
        q_norm = self._norm(f"{prefix}q_norm.weight", head_dim)
        k_norm = self._norm(f"{prefix}k_norm.weight", head_dim)
        return AttentionLayer(
            config=c,
            in_weight=in_weight,
            qk_norm=RmsNorm(
                torch.cat((q_norm.weight.expand(heads, -1), k_norm.weight.expand(kv_heads, -1))),
                c.norm_eps,
            ),
            out_weight=self._matrix(f"{prefix}o_proj.weight", c.hidden_size, q_size),
            backend=self.backend,
        )
