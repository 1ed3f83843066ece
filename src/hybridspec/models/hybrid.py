"""The hybrid decoder: Gated DeltaNet layers, every few of them a full-attention layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.errors import CheckpointError
from hybridspec.models.checkpoint import Checkpoint, OnProgress
from hybridspec.models.config import ModelConfig
from hybridspec.models.dummy import DummyCheckpoint
from hybridspec.models.layers import (
    AttentionLayer,
    DecoderLayer,
    GdnLayer,
    Mixer,
    Rotary,
    Rows,
)
from hybridspec.models.mlp import MoeMlp
from hybridspec.models.mtp import MtpHead
from hybridspec.models.products import BLAS, Products
from hybridspec.models.weights import MTP_PREFIX, WeightReader, embedding_name
from hybridspec.ops.norms import RmsNorm
from hybridspec.ops.verify_plan import Step
from hybridspec.runtime import MemoryOptions, MemorySpecs

__all__ = ["MIXERS", "HybridModel", "ModelFacts", "load_model", "memory_specs", "read_facts"]

MIXERS: dict[str, type[Mixer]] = {
    "gdn": GdnLayer,
    "attention": AttentionLayer,
}  # by their names in the config

# By name: the method of `Products` that uses it.
_MATRICES = {
    "in_weight": "linear",
    "out_weight": "add_and_norm",
    "gate_up_weight": "linear",
    "down_weight": "add_and_norm",
    "router_weight": "linear",
}
_Files = Checkpoint | DummyCheckpoint

# What a draft head's tensors mean depends on these, and shapes do not tell all of them.
_MTP_FIELDS = ("num_attention_heads", "num_kv_heads", "head_dim", "rotary_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """A hybrid decoder on one device.

    Attributes:
        config: sizes and constants.
        dtype: dtype of matrices and activations.
        device: where it lives.
        embedding: [vocab, D].
        layers: the trunk.
        norm: the final norm.
        head: matrix of the LM head, [vocab, D].
        rotary: shared by all attention layers.
        num_parameters: weights in the files, the draft head's included.
        mtp: the draft head, or None where the checkpoint has none.
        products: how rows are multiplied with weights.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Tensor
    rotary: Rotary
    num_parameters: int
    mtp: MtpHead | None
    products: Products = BLAS

    def memory_specs(self, options: MemoryOptions, *, has_head: bool = True) -> MemorySpecs:
        """State the memories that requests need, the draft head's included if it is run."""
        return memory_specs(self.config, options, has_head=has_head and self.mtp is not None)

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights [F, D] of the trunk and the LM head that rows are multiplied with.

        Each comes with the method of `Products` that uses it.
        """
        for layer in self.layers:
            for part in (layer.mixer, layer.mlp):
                for name, use in _MATRICES.items():
                    if hasattr(part, name):
                        is_apart = name == "out_weight" and isinstance(layer.mlp, MoeMlp)
                        yield "add" if is_apart else use, getattr(part, name)
        yield "logits", self.head

    def forward(self, step: Step, memories: Sequence[Any]) -> Tensor:
        """Run the trunk over packed rows and append them to the logs of their slots.

        Cursors are read, not moved: committing is the caller's.

        Args:
            step: the rows, their tokens and their layout.
            memories: one for each layer; logs in-out, cursors in.

        Returns:
            Hidden states after the final norm, [N, D], dtype of the model.
        """
        rows = Rows(step, self.rotary.rows(step.positions))
        x = F.embedding(step.token_ids, self.embedding)
        y = self.layers[0].mixer_norm.forward(x)
        behind = [*(layer.mixer_norm for layer in self.layers[1:]), self.norm]
        for layer, memory, norm in zip(self.layers, memories, behind, strict=True):
            x, y = layer.forward(x, y, rows, memory, norm)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the LM head's logits [N, vocab] of hidden states [N, D], fp32 (fp64 if fp64).

        Numerics: a matrix product in the model's dtype, then widened; with sums in one order the
            product's sums as they are.
        """
        return self.products.logits(hidden, self.head)


def memory_specs(config: ModelConfig, options: MemoryOptions, *, has_head: bool) -> MemorySpecs:
    """State the memories that requests of a model need, without its weights.

    Args:
        config: sizes of the model.
        options: dtypes and lengths.
        has_head: whether a draft head is run, which needs a memory of its own.
    """
    return MemorySpecs(
        layers=tuple(MIXERS[kind].memory_spec(config, options) for kind in config.layer_kinds),
        head=AttentionLayer.memory_spec(config, options) if has_head else None,
        options=options,
    )


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: str | torch.device = "cpu",
    backends: Mapping[str, str] = MappingProxyType({}),
    mtp_from: str | Path | None = None,
    has_dummy_weights: bool = False,
    on_progress: OnProgress | None = None,
) -> HybridModel:
    """Read a model folder in the Hugging Face layout onto a device.

    Args:
        path: folder with config.json and safetensors files.
        dtype: dtype of matrices and activations; "auto" is fp32 on a CPU, the stored dtype of the
            embedding elsewhere. Norms, A_log and dt_bias are at least fp32 in any case.
        device: where the tensors go.
        backends: by op, the implementation that the layers use; others choose at each call.
        mtp_from: folder to take the draft head from, in place of the model's own.
        has_dummy_weights: make the weights up instead of reading them; needs config.json only.
        on_progress: called with the bytes read so far and the bytes of all files.

    Returns:
        The model, with a draft head if the files hold one.

    Raises:
        CheckpointError: if a folder is incomplete, broken or does not match the config.
        UnsupportedError: if it describes a model that this package does not compute.
    """
    device = torch.device(device)
    config, checkpoint, mtp_checkpoint = _opened(
        Path(path), device, mtp_from, has_dummy_weights, on_progress
    )
    if dtype == "auto":
        dtype = _facts(config, checkpoint, mtp_checkpoint).dtype_on(device)
    reader = WeightReader(
        checkpoint=checkpoint,
        mtp_checkpoint=mtp_checkpoint,
        config=config,
        dtype=dtype,
        device=device,
        backends=backends,
    )
    rotary = Rotary(config.rotary_dim, config.rope_theta, dtype=reader.vector_dtype, device=device)
    embedding = reader.embedding()
    model = HybridModel(
        config=config,
        dtype=dtype,
        device=device,
        embedding=embedding,
        layers=tuple(reader.trunk_layer(i) for i in range(config.num_layers)),
        norm=reader.final_norm(),
        head=reader.head(embedding),
        rotary=rotary,
        num_parameters=0,
        mtp=_load_mtp(reader, embedding, rotary) if reader.has_mtp else None,
        products=reader.products,
    )
    sources = {checkpoint, mtp_checkpoint}
    for source in sources:
        source.finish()
    return replace(model, num_parameters=sum(source.num_parameters for source in sources))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the headers of a model's files say.

    Attributes:
        has_mtp: whether there is a draft head.
        stored_dtype: dtype of the embedding in the files.
    """

    has_mtp: bool
    stored_dtype: torch.dtype

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return what "auto" means: fp32 on a CPU, the stored dtype elsewhere."""
        return torch.float32 if device.type == "cpu" else self.stored_dtype


def read_facts(
    path: str | Path, *, mtp_from: str | Path | None = None, has_dummy_weights: bool = False
) -> ModelFacts:
    """Read what `load_model` would find, without reading a weight; arguments and errors are its."""
    return _facts(*_opened(Path(path), torch.device("cpu"), mtp_from, has_dummy_weights, None))


def _facts(_: ModelConfig, checkpoint: _Files, mtp_checkpoint: _Files) -> ModelFacts:
    stored = checkpoint.dtype(embedding_name(checkpoint))
    return ModelFacts(mtp_checkpoint.has_prefix(MTP_PREFIX), stored)


def _opened(
    folder: Path,
    device: torch.device,
    mtp_from: str | Path | None,
    has_dummy_weights: bool,
    on_progress: OnProgress | None,
) -> tuple[ModelConfig, _Files, _Files]:
    """Open a model's files, and those that hold its draft head."""
    config = ModelConfig.from_folder(folder)
    checkpoint: _Files
    if has_dummy_weights:
        checkpoint = DummyCheckpoint(device, has_mtp=config.num_mtp_layers > 0)
    else:
        checkpoint = Checkpoint(folder, device, on_progress=on_progress)
    if mtp_from is None:
        return config, checkpoint, checkpoint
    checkpoint.skip(MTP_PREFIX)
    return config, checkpoint, _open_mtp(Path(mtp_from), config, device)


def _load_mtp(reader: WeightReader, embedding: Tensor, rotary: Rotary) -> MtpHead:
    return MtpHead(
        embedding=embedding,
        layer=reader.mtp_layer(),
        rotary=rotary,
        **reader.mtp_parts(),
    )


def _open_mtp(folder: Path, config: ModelConfig, device: torch.device) -> Checkpoint:
    """Open the files that hold a draft head for a model of this config."""
    other = ModelConfig.from_folder(folder)
    for field in _MTP_FIELDS:
        expected, found = getattr(config, field), getattr(other, field)
        if expected != found:
            raise CheckpointError(
                f"{folder}/config.json: a draft head for this model needs {field} {expected}, "
                f"found {found}"
            )
    checkpoint = Checkpoint(folder, device, only=MTP_PREFIX)
    if not checkpoint.has_prefix(MTP_PREFIX):
        raise CheckpointError(
            f"{checkpoint.source}: expected a draft head ({MTP_PREFIX}* tensors), found none"
        )
    return checkpoint
