"""As much of vLLM 0.33 as the plug-in touches, for tests without its wheel.

Only names, signatures and what of their behaviour the plug-in relies on; `tests/releases` compares
the plug-in with the released modules themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import vllm_kernels

__all__ = ["CommonMetadata", "install_fake", "make_config"]

LAYERS = "vllm.model_executor.layers.mamba"
MODELS = "vllm.model_executor.models"
DTYPES = (torch.float32, torch.float32)


def make_config(drafts: int | None = 3, **changes: Any) -> SimpleNamespace:
    """Return what the plug-in, the layer and the builder read of vLLM's configuration."""
    text = SimpleNamespace(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, hidden_size=32, hidden_act="silu",
        rms_norm_eps=1e-6,
    )  # fmt: skip
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, use_eagle_block_drop=lambda: False, parallel_drafting=False
    )
    cache = SimpleNamespace(
        enable_prefix_caching=False, mamba_cache_mode="none", num_gpu_blocks=8,
        mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", mamba_block_size=128,
        mamba_page_size_padded=None, use_replayssm=False,
    )  # fmt: skip
    full_graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="Qwen3NextForCausalLM", dtype=torch.float32, hf_text_config=text
        ),
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts or 0,
        cache_config=cache,
        quant_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_mode=full_graphs, max_cudagraph_capture_size=16, static_forward_context={}
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=6),
        additional_config={},
        use_v2_model_runner=False,
    )
    for path, value in changes.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(config, part) if part else config, name, value)
    return config


@dataclass
class ForwardContext:
    """What a forward pass knows."""

    attn_metadata: Any


@dataclass
class Spec:
    """A MambaSpec."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_speculative_blocks: int


@dataclass
class CommonMetadata:
    """CommonAttentionMetadata, as far as it matters."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table_tensor: Tensor
    num_actual_tokens: int
    num_reqs: int
    query_start_loc_cpu: Tensor
    max_query_len: int
    max_seq_len: int
    slot_mapping: Tensor
    is_prefilling: Tensor
    seq_lens_cpu_upper_bound: Tensor

    def replace(self, **changes: Any) -> CommonMetadata:
        """Return a copy with other fields."""
        return replace(self, **changes)


@dataclass
class Metadata:
    """GDNAttentionMetadata, as far as it matters."""

    num_prefills: int
    num_prefill_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: Tensor | None
    spec_query_start_loc: Tensor | None
    non_spec_query_start_loc: Tensor | None
    spec_state_indices_tensor: Tensor | None
    non_spec_state_indices_tensor: Tensor | None
    spec_sequence_masks: Tensor | None
    spec_sequence_masks_cpu: Tensor | None
    spec_token_indx: Tensor | None
    non_spec_token_indx: Tensor | None
    num_accepted_tokens: Tensor | None


class Builder:
    """GDNAttentionMetadataBuilder: requests with -1 drafts are prompts, the others verify."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.num_spec = vllm_config.speculative_config.num_speculative_tokens

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None, fast_build: bool = False,
    ) -> Metadata:  # fmt: skip
        m, drafts = common_attn_metadata, num_decode_draft_tokens_cpu
        lengths = m.query_start_loc.diff()
        # Padding stays with the prompts where there are some, else with the drafts.
        masks = drafts >= 0
        rest = ~masks & (lengths > 0)
        blocks, has_drafts = m.block_table_tensor, bool(masks.any())
        is_mixed = has_drafts and bool(rest.any())
        verified = masks if is_mixed or not has_drafts else masks | (lengths == 0)
        count = int(masks.sum())
        tokens = torch.repeat_interleave(masks, lengths.long())
        order = torch.argsort(tokens.int(), stable=True)
        split = int((~tokens).sum())
        ids = blocks[verified, : self.num_spec + 1]
        if has_drafts and not is_mixed:  # the buffers of a captured graph
            ids = ids.expand(-1, self.num_spec + 1).contiguous()
        return Metadata(
            num_prefills=int(rest.sum()),
            num_prefill_tokens=int(lengths[rest].sum()),
            num_spec_decodes=count,
            num_spec_decode_tokens=int(lengths[masks].sum()),
            num_actual_tokens=m.num_actual_tokens,
            has_initial_state=(m.seq_lens - lengths > 0)[~masks] if rest.any() else None,
            spec_query_start_loc=_bounds(lengths[verified]) if has_drafts else None,
            non_spec_query_start_loc=_bounds(lengths[~masks]) if rest.any() else None,
            spec_state_indices_tensor=ids if has_drafts else None,
            non_spec_state_indices_tensor=blocks[~masks, 0] if rest.any() else None,
            spec_sequence_masks=masks if has_drafts else None,
            spec_sequence_masks_cpu=masks if has_drafts else None,
            spec_token_indx=order[split:] if has_drafts else None,
            non_spec_token_indx=order[:split] if has_drafts else None,
            num_accepted_tokens=num_accepted_tokens[verified] if has_drafts else None,
        )


def _bounds(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


class Backend:
    """GDNAttentionBackend."""

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class PluggableLayer(torch.nn.Module):
    """Creates the class that was registered in place of another one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(
            sys.modules["vllm.model_executor.custom_op"].op_registry_oot.get(cls.__name__, cls)
        )

    @classmethod
    def register_oot(cls, layer: type, name: str) -> type:
        registry = sys.modules["vllm.model_executor.custom_op"].op_registry_oot
        assert name not in registry, f"Duplicate layer name: {name}"
        registry[name] = layer
        return layer


class QwenGatedDeltaNetAttention(PluggableLayer):
    """The layer without projections."""

    def __init__(
        self, config: Any, vllm_config: Any, prefix: str = "",
        gqa_interleaved_layout: bool = False, reduce_results: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.prefix, self.tp_size, self.activation = prefix, 1, "silu"
        self.model_config, self.vllm_config = vllm_config.model_config, vllm_config
        speculative = vllm_config.speculative_config
        self.num_spec = speculative.num_speculative_tokens if speculative else 0
        self.num_k_heads, self.num_v_heads = 2, 4
        self.head_k_dim, self.head_v_dim, self.conv_dim = 16, 8, 96
        self.conv1d = torch.nn.Module()
        self.conv1d.weight = torch.nn.Parameter(0.5 * torch.randn(96, 1, 4), requires_grad=False)
        self.conv1d.bias = None
        self.A_log, self.dt_bias = (
            torch.nn.Parameter(torch.randn(4), requires_grad=False) for _ in range(2)
        )
        self.gdn_decode_kernel = "cuda"
        if self._fused_gdn_decode_unsupported_reason(vllm_config) is not None:
            self.gdn_decode_kernel = "triton"
        self.warmed_up = 0

    def _fused_gdn_decode_unsupported_reason(self, vllm_config: Any) -> str | None:
        _, _ = self.get_state_dtype()
        return None

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((3 + self.num_spec, 96), (4, 8, 16))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return DTYPES

    def get_kv_cache_spec(self, vllm_config: Any) -> Spec:
        return Spec(self.get_state_shape(), self.get_state_dtype(), self.num_spec)

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        pages, offset, parts = kv_cache.squeeze(dim=(1, 2)), 0, []
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            parts.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(parts)

    def _warmup_prefill_kernels(self, qkv_or_qkvz: Tensor, v_dim: int) -> None:
        _, _ = self.get_state_dtype()
        self.warmed_up += 1

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        m = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
        if m is None:
            self._warmup_prefill_kernels(mixed_qkv, 0)
            return
        m, (conv, state) = m[self.prefix], self.kv_cache[:2]
        count, blocks = m.num_actual_tokens, m.non_spec_state_indices_tensor
        assert m.spec_sequence_masks is None
        rows = vllm_kernels.causal_conv1d_fn(
            mixed_qkv[:count].T, self.conv1d.weight.squeeze(1), None, conv.transpose(-1, -2),
            m.non_spec_query_start_loc, blocks, m.has_initial_state,
        ).T  # fmt: skip
        prepared = vllm_kernels.fused_post_conv_prep(
            rows, a[:count], b[:count], self.A_log, self.dt_bias, 2, 16, 8
        )
        q, k, v, g, beta = (part[None] for part in prepared)
        initial = state[blocks]
        initial[~m.has_initial_state] = 0.0
        out, last = vllm_kernels.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=initial, output_final_state=True,
            cu_seqlens=m.non_spec_query_start_loc, use_qk_l2norm_in_kernel=False,
        )  # fmt: skip
        live = blocks > 0
        state[blocks[live]] = last[live]
        core_attn_out[:count] = out[0]


def _model(name: str, base: type = object) -> type:
    """Return a model class that says what a block holds."""

    def shapes(cls: type, vllm_config: Any) -> Any:
        return ((3 + vllm_config.num_speculative_tokens, 96), (4, 8, 16))

    def dtypes(cls: type, vllm_config: Any) -> Any:
        return DTYPES

    return type(
        name,
        (base,),
        {
            "get_mamba_state_shape_from_config": classmethod(shapes),
            "get_mamba_state_dtype_from_config": classmethod(dtypes),
        },
    )


def install_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import vllm` find these classes for the length of a test."""
    current: list[Any] = [None]

    @contextmanager
    def override(context: Any) -> Iterator[None]:
        current.append(context)
        try:
            yield
        finally:
            current.pop()

    contents: dict[str, dict[str, Any]] = {
        "vllm.forward_context": {
            "ForwardContext": ForwardContext,
            "get_forward_context": lambda: current[-1],
            "override_forward_context": override,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": {}},
        f"{LAYERS}.mamba_utils": {"is_conv_state_dim_first": lambda: False},
        f"{LAYERS}.ops.causal_conv1d": {"causal_conv1d_update": vllm_kernels.causal_conv1d_update},
        f"{LAYERS}.gdn.qwen_gdn_linear_attn": {
            "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention
        },
        f"{MODELS}.qwen3_next": {"Qwen3NextForCausalLM": _model("Qwen3NextForCausalLM")},
        f"{MODELS}.qwen3_5": {
            name: _model(name)
            for name in ("Qwen3_5ForCausalLMBase", "Qwen3_5ForConditionalGeneration")
        },
        "vllm.v1.attention.backends.gdn_attn": {
            "GDNAttentionBackend": Backend, "GDNAttentionMetadataBuilder": Builder,
        },
    }  # fmt: skip
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
