"""From the tensors of a checkpoint to layers, each straight to its device, dtype and fused place.

The only place that knows Hugging Face weight names, with what stands in for files in `dummy.py`.
Every tensor is checked against the shape that the config implies, and a tensor that nothing asked
for is an error: a file that does not match its config would otherwise run and produce nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridspec.models.checkpoint import Checkpoint
from hybridspec.models.config import ModelConfig
from hybridspec.models.dummy import DummyCheckpoint
from hybridspec.models.layers import (
    ATTENTION,
    CAUSAL_CONV1D,
    GATED_DELTA_RULE,
    NORM_AND_ROTATE,
    PROMPT_ATTENTION,
    AttentionLayer,
    DecoderLayer,
    GdnLayer,
)
from hybridspec.models.mlp import EXPERTS, Mlp, MoeMlp
from hybridspec.models.products import BLAS, PRODUCTS, OrderedProducts, Products
from hybridspec.models.tuned_products import TunedProducts
from hybridspec.ops.experts import Matrices
from hybridspec.ops.norms import RmsNorm

__all__ = ["MTP_PREFIX", "WeightReader", "embedding_name"]

MTP_PREFIX = "mtp."
_TRUNK_PREFIXES = ("model.language_model.", "model.")


def embedding_name(checkpoint: Checkpoint | DummyCheckpoint) -> str:
    """Return the name of the token embedding."""
    return f"{_trunk_prefix(checkpoint)}embed_tokens.weight"


def _trunk_prefix(checkpoint: Checkpoint | DummyCheckpoint) -> str:
    long, short = _TRUNK_PREFIXES
    return long if checkpoint.has_prefix(long) else short


@dataclass(slots=True, kw_only=True)
class WeightReader:
    """Builds layers from a checkpoint.

    Attributes:
        checkpoint: where tensors come from.
        mtp_checkpoint: where those of the draft head come from.
        config: sizes.
        dtype: dtype of matrices and activations.
        device: where tensors go.
        backends: by op, what the layers use; "auto" for others.
        products: how rows are multiplied with weights.
    """

    checkpoint: Checkpoint | DummyCheckpoint
    mtp_checkpoint: Checkpoint | DummyCheckpoint
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    backends: Mapping[str, str]
    products: Products = field(init=False)
    # One for all blocks: what is allocated and freed between tensors that stay leaves holes.
    _scratch: Tensor = field(init=False, default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def __post_init__(self) -> None:
        named: dict[str, Products] = {"ordered": OrderedProducts(), "tuned": TunedProducts()}
        self.products = named.get(self.backends.get(PRODUCTS, "auto"), BLAS)

    @property
    def vector_dtype(self) -> torch.dtype:
        """The dtype of norms and gates: fp32, or fp64 in an fp64 model."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def has_mtp(self) -> bool:
        """Whether there is a draft head."""
        return self.mtp_checkpoint.has_prefix(MTP_PREFIX)

    def embedding(self) -> Tensor:
        """Return the token embedding, [vocab, D]."""
        rows, columns = self.config.vocab_size, self.config.hidden_size
        embedding = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        self._fill(embedding, embedding_name(self.checkpoint))
        return embedding

    def head(self, embedding: Tensor) -> Tensor:
        """Return the matrix of the LM head, [vocab, D].

        A head that the files hold counts, whatever the config says of sharing; the embedding stands
        in where there is none, and for a copy of it.
        """
        name, is_tied = "lm_head.weight", self.config.is_head_tied
        if is_tied and not self.checkpoint.has(name):
            return embedding
        head = self._matrix(name, self.config.vocab_size, self.config.hidden_size)
        if is_tied and torch.equal(head, embedding):
            self.checkpoint.num_parameters -= head.numel()
            return embedding
        return head

    def final_norm(self) -> RmsNorm:
        """Return the norm behind the last layer."""
        return self._norm(f"{_trunk_prefix(self.checkpoint)}norm.weight", self.config.hidden_size)

    def trunk_layer(self, index: int) -> DecoderLayer:
        """Return layer `index` of the trunk."""
        moe = self.config.moe
        return self._layer(
            f"{_trunk_prefix(self.checkpoint)}layers.{index}.",
            self.config.layer_kinds[index],
            has_experts=moe is not None and index not in moe.dense_layers,
        )

    def mtp_layer(self) -> DecoderLayer:
        """Return the draft head's attention layer."""
        prefix = f"{MTP_PREFIX}layers.0."
        is_plain = self.mtp_checkpoint.has(f"{prefix}mlp.gate_proj.weight")
        return self._layer(
            prefix,
            "attention",
            has_experts=self.config.moe is not None and not (is_plain and self.config.ffn_size),
        )

    def mtp_parts(self) -> dict[str, Any]:
        """Return the draft head's own parts, named as in `MtpHead`."""
        size = self.config.hidden_size
        return {
            "embedding_norm": self._norm(f"{MTP_PREFIX}pre_fc_norm_embedding.weight", size),
            "hidden_norm": self._norm(f"{MTP_PREFIX}pre_fc_norm_hidden.weight", size),
            "in_weight": self._matrix(f"{MTP_PREFIX}fc.weight", size, 2 * size),
            "norm": self._norm(f"{MTP_PREFIX}norm.weight", size),
        }

    def _source(self, name: str) -> Checkpoint | DummyCheckpoint:
        return self.mtp_checkpoint if name.startswith(MTP_PREFIX) else self.checkpoint

    def _fill(self, target: Tensor, name: str) -> None:
        """Read a tensor into `target`, whose shape it must have."""
        for rows, block in self._source(name).blocks(name, tuple(target.shape)):
            self._store(target[rows], block)

    def _store(self, target: Tensor, block: Tensor) -> None:
        """Copy a block to where it belongs, converting it.

        Into a matrix whose columns lie side by side, it is turned over before it is converted:
        PyTorch has a fast way for either, and none for both at once (5 times as long on a CPU).
        """
        if target.dim() < 2 or target.is_contiguous() or target.stride(-2) != 1:
            target.copy_(block)
            return
        stacks = (target, block) if target.dim() == 3 else (target[None], block[None])
        for matrix, rows in zip(*stacks, strict=True):
            if self._scratch.numel() < rows.nbytes:
                self._scratch = torch.empty(rows.nbytes, dtype=torch.uint8, device=self.device)
            turned = self._scratch[: rows.nbytes].view(rows.dtype).view(rows.shape[::-1])
            matrix.t().copy_(turned.copy_(rows.t()))

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """Return one matrix in the layout of `_empty`."""
        matrix = self._empty(rows, columns)
        self._fill(matrix, name)
        return matrix

    def _empty(self, *shape: int) -> Tensor:
        """Return an uninitialised matrix [out, in], or a stack of them, for `F.linear`.

        On a CPU its columns lie side by side in memory: products of few rows with weights that are
        not in the cache take 0.7 of the time that way.
        """
        *stack, rows, columns = shape
        if self.device.type == "cpu":
            return torch.empty(*stack, columns, rows, dtype=self.dtype, device=self.device).mT
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _vector(self, name: str, size: int) -> Tensor:
        vector = torch.empty(size, dtype=self.vector_dtype, device=self.device)
        self._fill(vector, name)
        return vector

    def _norm(self, name: str, size: int) -> RmsNorm:
        """Return a block norm, whose weight is stored as its difference from one."""
        return RmsNorm(self._vector(name, size) + 1.0, self.config.norm_eps)

    def _stacked(self, parts: dict[str, int]) -> Tensor:
        """Return matrices over the hidden size, of given row counts, in one."""
        stacked = self._empty(sum(parts.values()), self.config.hidden_size)
        targets = stacked.split_with_sizes(list(parts.values()))
        for name, target in zip(parts, targets, strict=True):
            self._fill(target, name)
        return stacked

    def _layer(self, prefix: str, kind: str, *, has_experts: bool) -> DecoderLayer:
        size = self.config.hidden_size
        mlp = f"{prefix}mlp."
        return DecoderLayer(
            mixer=self._gdn(f"{prefix}linear_attn.")
            if kind == "gdn"
            else self._attention(f"{prefix}self_attn."),
            mlp=self._moe(mlp) if has_experts else self._mlp(mlp, self.config.ffn_size),
            mixer_norm=self._norm(f"{prefix}input_layernorm.weight", size),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm.weight", size),
            products=self.products,
        )

    def _mlp(self, prefix: str, ffn_size: int) -> Mlp:
        parts = {f"{prefix}gate_proj.weight": ffn_size, f"{prefix}up_proj.weight": ffn_size}
        return Mlp(
            products=self.products,
            gate_up_weight=self._stacked(parts),
            down_weight=self._matrix(
                f"{prefix}down_proj.weight", self.config.hidden_size, ffn_size
            ),
        )

    def _moe(self, prefix: str) -> MoeMlp:
        moe, size = self.config.moe, self.config.hidden_size
        assert moe is not None
        count, ffn_size = moe.num_experts, moe.expert_ffn_size
        router_parts = {f"{prefix}gate.weight": count, f"{prefix}shared_expert_gate.weight": 1}
        gate_up_weight = self._empty(count, 2 * ffn_size, size)
        down_weight = self._empty(count, size, ffn_size)
        self._fill_experts(
            f"{prefix}experts.",
            {
                "gate_up_proj": (gate_up_weight, ("gate_proj", "up_proj")),
                "down_proj": (down_weight, ("down_proj",)),
            },
        )
        shared = self._mlp(f"{prefix}shared_expert.", moe.shared_ffn_size)
        return MoeMlp(
            config=moe,
            router_weight=self._stacked(router_parts),
            matrices=Matrices(
                gate_up_weight, down_weight, shared.gate_up_weight, shared.down_weight
            ),
            meeting=torch.zeros(2, dtype=torch.int32, device=gate_up_weight.device),
            products=self.products,
            backend="ordered" if self.backends.get(EXPERTS) == "ordered" else "auto",
        )

    def _fill_experts(self, prefix: str, parts: dict[str, tuple[Tensor, tuple[str, ...]]]) -> None:
        """Read the experts' matrices from one tensor for all of them, or from one for each.

        Args:
            prefix: of the names.
            parts: for the name of a fused tensor, where it goes, [E, out, in], and the names of the
                matrices that an expert has in its place, one above the other.
        """
        for fused, (target, names) in parts.items():
            if self._source(prefix).has(prefix + fused):
                self._fill(target, prefix + fused)
                continue
            for expert, matrix in enumerate(target):
                for name, rows in zip(names, matrix.chunk(len(names)), strict=True):
                    self._fill(rows, f"{prefix}{expert}.{name}.weight")

    def _gdn(self, prefix: str) -> GdnLayer:
        g = self.config.gdn
        conv_weight = torch.empty(g.conv_dim, 1, g.conv_width, dtype=self.dtype, device=self.device)
        self._fill(conv_weight, f"{prefix}conv1d.weight")
        norm_weight = self._vector(f"{prefix}norm.weight", g.value_dim)
        return GdnLayer(
            config=self.config,
            in_weight=self._gdn_projections(prefix),
            # channels side by side, as the convolution reads them
            conv_weight=conv_weight.squeeze(1).t().contiguous().t(),
            A_log=self._vector(f"{prefix}A_log", g.num_value_heads),
            dt_bias=self._vector(f"{prefix}dt_bias", g.num_value_heads),
            norm=RmsNorm(norm_weight, self.config.norm_eps),
            out_weight=self._matrix(
                f"{prefix}out_proj.weight",
                self.config.hidden_size,
                g.num_value_heads * g.value_dim,
            ),
            conv_backend=self.backends.get(CAUSAL_CONV1D, "auto"),
            rule_backend=self.backends.get(GATED_DELTA_RULE, "auto"),
            products=self.products,
        )

    def _gdn_projections(self, prefix: str) -> Tensor:
        """Return [q | k | v | z | b | a] stacked, [2 H K + 2 HV V + 2 HV, D]."""
        g = self.config.gdn
        v_size = g.num_value_heads * g.value_dim
        if self.config.family != "qwen3_next":
            return self._stacked(
                {
                    f"{prefix}in_proj_qkv.weight": g.conv_dim,
                    f"{prefix}in_proj_z.weight": v_size,
                    f"{prefix}in_proj_b.weight": g.num_value_heads,
                    f"{prefix}in_proj_a.weight": g.num_value_heads,
                }
            )
        # Stored rows go key head by key head: its q, its k, its value heads' v, then their z; and
        # its value heads' b, then their a.
        k_size, ratio = g.num_key_heads * g.key_dim, g.num_value_heads // g.num_key_heads
        sizes = (g.key_dim, g.key_dim, ratio * g.value_dim, ratio * g.value_dim)
        totals = (k_size, k_size, v_size, v_size, g.num_value_heads, g.num_value_heads)
        stacked = self._empty(sum(totals), self.config.hidden_size)
        parts = stacked.split_with_sizes(totals)
        self._fill_by_head(parts[:4], f"{prefix}in_proj_qkvz.weight", g.num_key_heads, sizes)
        self._fill_by_head(parts[4:], f"{prefix}in_proj_ba.weight", g.num_key_heads, (ratio, ratio))
        return stacked

    def _fill_by_head(
        self, targets: Sequence[Tensor], name: str, num_heads: int, sizes: tuple[int, ...]
    ) -> None:
        """Read a matrix whose rows alternate per head into one matrix for each of their kinds."""
        rows = num_heads * sum(sizes)
        [(_, stored)] = self._source(name).blocks(
            name, (rows, self.config.hidden_size), is_whole=True
        )
        heads = stored.view(num_heads, sum(sizes), -1)
        for target, size, part in zip(
            targets, sizes, heads.split_with_sizes(sizes, 1), strict=True
        ):
            for rows_of_head, block in zip(target.split(size), part, strict=True):
                self._store(rows_of_head, block)

    def _attention(self, prefix: str) -> AttentionLayer:
        c = self.config
        heads, kv_heads, head_dim = c.num_attention_heads, c.num_kv_heads, c.head_dim
        q_size, kv_size = heads * head_dim, kv_heads * head_dim
        in_weight = self._empty(2 * (q_size + kv_size), c.hidden_size)
        q, k, v, gate = in_weight.split_with_sizes((q_size, kv_size, kv_size, q_size))
        self._fill_by_head((q, gate), f"{prefix}q_proj.weight", heads, (head_dim, head_dim))
        self._fill(k, f"{prefix}k_proj.weight")
        self._fill(v, f"{prefix}v_proj.weight")
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
            verify_backend=self.backends.get(ATTENTION, "auto"),
            prefill_backend=self.backends.get(PROMPT_ATTENTION, "auto"),
            rotary_backend=self.backends.get(NORM_AND_ROTATE, "auto"),
            products=self.products,
        )
