"""The hybrid decoder: Gated DeltaNet layers, every few of them a full-attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.models.config import ModelConfig
from hybridspec.models.layers import DecoderLayer, GdnLayer, RmsNorm, RotaryTable
from hybridspec.models.mtp import MtpHead
from hybridspec.models.weights import Checkpoint, WeightReader
from hybridspec.runtime.pools import Pools
from hybridspec.runtime.step import Step

__all__ = ["HybridModel", "load_model"]


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
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Tensor
    rotary: RotaryTable
    num_parameters: int
    mtp: MtpHead | None

    def forward(self, token_ids: Tensor, step: Step, pools: Pools) -> Tensor:
        """Run the trunk over packed rows and append them to the logs of their slots.

        Cursors are read, not moved: committing is the caller's.

        Args:
            token_ids: [N] int64; in.
            step: row layout of the batch.
            pools: the memories; logs in-out, cursors in.

        Returns:
            Hidden states after the final norm, [N, D], dtype of the model.
        """
        page_table = pools.page_table
        self.rotary.reserve(page_table.shape[1] * pools.page_size)
        rotary = self.rotary.rows(step.positions)
        x = F.embedding(token_ids, self.embedding)
        for layer in self.layers:
            pool_list = pools.gdn if isinstance(layer.mixer, GdnLayer) else pools.kv
            x = layer.forward(x, rotary, step, pool_list[layer.pool_index], page_table)
        return self.norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the LM head's logits [N, vocab] of hidden states [N, D], fp32 (fp64 if fp64).

        Numerics: a matrix product in the model's dtype, then widened.
        """
        logits = F.linear(hidden, self.head)
        return logits if logits.dtype is torch.float64 else logits.float()


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device: str | torch.device = "cpu",
    backend: str = "auto",
) -> HybridModel:
    """Read a model folder in the Hugging Face layout onto a device.

    Args:
        path: folder with config.json and safetensors files.
        dtype: dtype of matrices and activations; "auto" is fp32 on a CPU, the stored dtype of the
            embedding elsewhere. Norms, A_log and dt_bias are at least fp32 in any case.
        device: where the tensors go.
        backend: implementation of the ops, handed to the layers.

    Returns:
        The model, with its draft head if the files hold one.

    Raises:
        CheckpointError: if the folder is incomplete, broken or does not match its config.
        UnsupportedError: if it describes a model that this package does not compute.
    """
    folder = Path(path)
    config = ModelConfig.from_folder(folder)
    device = torch.device(device)
    checkpoint = Checkpoint(folder, device)
    if dtype == "auto":
        stored = checkpoint.dtype(f"{checkpoint.trunk_prefix}embed_tokens.weight")
        dtype = torch.float32 if device.type == "cpu" else stored
    reader = WeightReader(checkpoint=checkpoint, config=config, dtype=dtype, backend=backend)
    rotary = RotaryTable(
        config.rotary_dim, config.rope_theta, dtype=reader.vector_dtype, device=device
    )
    embedding = reader.embedding()
    parts = {
        "layers": tuple(reader.trunk_layer(i) for i in range(config.num_layers)),
        "norm": reader.final_norm(),
        "head": reader.head(embedding),
        "mtp": _load_mtp(reader, embedding, rotary) if reader.has_mtp else None,
    }
    checkpoint.require_all_read()
    return HybridModel(
        config=config,
        dtype=dtype,
        device=device,
        embedding=embedding,
        rotary=rotary,
        num_parameters=checkpoint.num_parameters,
        **parts,
    )


def _load_mtp(reader: WeightReader, embedding: Tensor, rotary: RotaryTable) -> MtpHead:
    return MtpHead(
        embedding=embedding,
        layer=reader.mtp_layer(),
        rotary=rotary,
        **reader.mtp_parts(),
    )
