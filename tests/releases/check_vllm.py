"""The plug-in against the modules of the released vLLM: `make test-vllm`, not part of `make test`.

On a CPU, from the wheel's Python files alone: its compiled part and its kernels do not run. What
vLLM imports and is not installed is made up (`ABSENT`); the layer's projections, and the four
kernels of `helpers/vllm_kernels.py`, are replaced. Everything else is vLLM's: the registry, the
configuration of pages, the builder, the layer's core and its forward context.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import distributions
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.utils
from torch import Tensor

from helpers import vllm_kernels
from helpers.absent_packages import make_up
from helpers.fake_vllm import make_config
from helpers.vllm_sessions import Session, run_session
from hybridspec.compat import vllm_plugin
from hybridspec.compat.vllm_plugin.builder import RingBuilder
from hybridspec.compat.vllm_plugin.layer import RingLayer

RELEASE = os.environ.get("VLLM_RELEASE", "")
ABSENT = [
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "compressed_tensors", "cpuinfo", "einops",
    "fastapi", "llguidance", "msgspec", "openai_harmony", "partial_json_parser", "psutil",
    "pybase64", "requests", "torchvision", "urllib3", "uvloop", "xgrammar", "zmq",
]  # fmt: skip

assert RELEASE, "VLLM_RELEASE: expected the folder of the wheel's files (make test-vllm)"
for has in ("is_torchvision_available", "is_vision_available", "is_cv2_available"):
    getattr(transformers.utils, has)()  # its answers are kept: packages made up are not there
sys.path.insert(0, RELEASE)
make_up(ABSENT)

from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.model_executor.layers.mamba.gdn import base, qwen_gdn_linear_attn  # noqa: E402
from vllm.model_executor.layers.mamba.ops import causal_conv1d  # noqa: E402
from vllm.model_executor.models import qwen3_5, qwen3_next  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils import torch_utils  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends import gdn_attn  # noqa: E402
from vllm.v1.attention.backends import utils as backend_utils  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

LAYER = "QwenGatedDeltaNetAttention"
MODELS = [
    qwen3_next.Qwen3NextForCausalLM,
    qwen3_5.Qwen3_5ForCausalLMBase,
    qwen3_5.Qwen3_5ForConditionalGeneration,
]
Qwen = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
Builder = gdn_attn.GDNAttentionMetadataBuilder


def parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters, but for `self` and `cls`."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


class Projection(torch.nn.Module):
    """Stands for vLLM's parallel linear layers; of these only the convolution's weight is used."""

    def __init__(self, input_size: int, output_size: int = 0, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.5 * torch.randn(output_size, input_size), False)
        self.bias = None


class Anywhere(torch.nn.Module):
    """Stands for the gated norm, and for the choice of a prompt's kernel."""

    activation, gdn_prefill_backend = "silu", "triton"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, **rows: Any) -> tuple[Tensor, Tensor]:
        return vllm_kernels.chunk_gated_delta_rule(**rows)


def advance(
    *, A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor,
    initial_state: Tensor, cu_seqlens: Tensor, ssm_state_indices: Tensor, **options: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run prompts of one row each [1, N, ...], which vLLM counts as decodes; states in place."""
    assert options == {"inplace_final_state": True, "use_qk_l2norm_in_kernel": True}
    blocks = ssm_state_indices[: cu_seqlens.shape[0] - 1]
    packed = torch.cat([part[0].flatten(1) for part in (q, k, v)], 1)
    q, k, v, g, beta = vllm_kernels.fused_post_conv_prep(
        packed, a, b, A_log, dt_bias, k.shape[2], k.shape[3], v.shape[3]
    )
    y, states = vllm_kernels.chunk_gated_delta_rule(
        q=q[None], k=k[None], v=v[None], g=g[None], beta=beta[None],
        initial_state=initial_state[blocks], output_final_state=True, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    initial_state[blocks[blocks > 0]] = states[blocks > 0]
    return y, None


def packed_decode(
    *, mixed_qkv: Tensor, initial_state: Tensor, out: Tensor, scale: float, **options: Any
) -> None:
    """Do the same for rows of q, k and v side by side."""
    heads, value_dim, key_dim = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - heads * value_dim) // 2
    q, k, v = mixed_qkv.split((keys, keys, heads * value_dim), 1)
    bounds = torch.arange(mixed_qkv.shape[0] + 1)
    out[:, 0] = advance(
        q=q.unflatten(1, (-1, key_dim))[None], k=k.unflatten(1, (-1, key_dim))[None],
        v=v.unflatten(1, (-1, value_dim))[None], initial_state=initial_state, cu_seqlens=bounds,
        inplace_final_state=True, **options,
    )[0][0]  # fmt: skip


def conv_update(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Convolve; prompts of one row come without bounds and without accepted rows."""
    count = options["conv_state_indices"].shape[0]
    if options.get("query_start_loc") is None:
        ones = torch.ones(count, dtype=torch.int32)
        options |= {"num_accepted_tokens": ones, "query_start_loc": torch.arange(count + 1)}
        options["max_query_len"] = 1
    return vllm_kernels.causal_conv1d_update(x, *args, **options)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM with the plug-in, as it is in a worker with one GPU, but for what does not run here."""
    patches = {
        base: {
            "get_tensor_model_parallel_world_size": lambda: 1,
            "get_tensor_model_parallel_rank": lambda: 0,
        },
        causal_conv1d: {"causal_conv1d_update": conv_update},
        mamba_utils: {"is_conv_state_dim_first": lambda: False},
        backend_utils: {"PIN_MEMORY": False},
        torch_utils: {"PIN_MEMORY": False},
        qwen_gdn_linear_attn: {
            "ChunkGatedDeltaRule": Anywhere,
            "ColumnParallelLinear": Projection,
            "MergedColumnParallelLinear": lambda **options: Projection(1),
            "RMSNormGated": Anywhere,
            "RowParallelLinear": Projection,
            "causal_conv1d_fn": vllm_kernels.causal_conv1d_fn,
            "causal_conv1d_update": conv_update,
            "fused_post_conv_prep": vllm_kernels.fused_post_conv_prep,
            "fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
            "fused_sigmoid_gating_delta_rule_update": advance,
            "is_conv_state_dim_first": lambda: False,
        },
    }
    for module, names in patches.items():
        for name, value in names.items():
            assert hasattr(module, name)
            monkeypatch.setattr(module, name, value)
    platform = type(current_platform)
    for name, value in {"is_cuda": True, "is_cuda_alike": True, "is_cpu": False}.items():
        monkeypatch.setattr(platform, name, lambda self, value=value: value)
    monkeypatch.setattr(platform, "current_device", lambda self: "cpu", raising=False)
    monkeypatch.setenv("HYBRIDSPEC_VLLM", "1")
    saved = [(m, dict(vars(m))) for m in MODELS]
    vllm_plugin.register()
    vllm_plugin.register()
    yield
    op_registry_oot.pop(LAYER)
    for model, names in saved:
        for name in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config"):
            setattr(model, name, names[name])


def make_layer(monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace) -> Any:
    """Create the layer as a model does: by vLLM's name, with its own constructor."""
    torch.manual_seed(0)
    monkeypatch.setattr(qwen_gdn_linear_attn, "get_current_vllm_config", lambda: config)
    layer = Qwen(config.model_config.hf_text_config, config, prefix="model.layers.0.linear_attn")
    for parameter in (layer.A_log, layer.dt_bias):
        parameter.requires_grad_(False).normal_()
    return layer


def run(layer: Any, metadata: Any, *tensors: Tensor) -> None:
    """Run the layer's core in a forward context."""
    context = ForwardContext(
        no_compile_layers={}, attn_metadata={layer.prefix: metadata}, slot_mapping={}
    )
    with override_forward_context(context):
        layer._forward_core(*tensors)


def test_the_wheel_is_the_release_that_the_plug_in_names() -> None:
    [found] = [d for d in distributions(path=[RELEASE]) if d.metadata["Name"] == "vllm"]
    assert found.version.startswith(vllm_plugin._RELEASE)


def test_base_classes() -> None:
    assert issubclass(Qwen, PluggableLayer) and Qwen.__name__ == LAYER
    assert Qwen.__mro__[1] is base.GatedDeltaNetAttention
    assert gdn_attn.GDNAttentionBackend.get_builder_cls() is Builder
    assert is_dataclass(gdn_attn.GDNAttentionMetadata) and is_dataclass(ForwardContext)
    assert is_dataclass(MambaSpec)


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (
            RingLayer,
            Qwen,
            "__init__ _forward_core _fused_gdn_decode_unsupported_reason _warmup_prefill_kernels "
            "get_attn_backend get_kv_cache_spec get_state_dtype get_state_shape",
        ),
        (RingBuilder, Builder, "__init__ build"),
    ],
    ids=["layer", "builder"],
)
def test_signatures(ours: type, theirs: type, names: str) -> None:
    """What the plug-in overrides is there, with the same parameters; nothing else is hidden."""
    overridden = {name for name, value in vars(ours).items() if inspect.isfunction(value)}
    assert overridden - {"_verify"} == set(names.split())
    for name in names.split():
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name
    for name in ("has_ring", "ring_backend", "ring", "_verify"):
        assert not hasattr(theirs, name)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_count_pages_by_themselves(model: type) -> None:
    for name in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config"):
        assert isinstance(vars(model)[name], classmethod)
        assert parameters(getattr(model, name)) == ["vllm_config"]


def test_metadata_has_what_the_plug_in_changes() -> None:
    names = {field.name for field in fields(gdn_attn.GDNAttentionMetadata)}
    used = {
        "num_prefills", "num_prefill_tokens", "num_spec_decodes", "num_spec_decode_tokens",
        "num_actual_tokens", "spec_query_start_loc", "spec_state_indices_tensor",
        "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_sequence_masks_cpu",
        "spec_token_indx", "non_spec_token_indx", "num_accepted_tokens",
    }  # fmt: skip
    assert used <= names and "ring" not in names
    update = inspect.signature(causal_conv1d.causal_conv1d_update).parameters
    theirs = list(inspect.signature(vllm_kernels.causal_conv1d_update).parameters)
    assert [name for name in update if name in theirs] == theirs


def test_the_registered_layer_is_what_a_model_creates(
    released: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(3)
    layer = make_layer(monkeypatch, config)
    assert isinstance(layer, RingLayer) and isinstance(layer, Qwen)
    assert layer.has_ring and op_registry_oot[LAYER] is type(layer)
    assert layer.gdn_decode_kernel == "triton" and not layer.enable_fused_gdn_spec_decode
    assert layer._forward_method == layer.forward_cuda
    spec = layer.get_kv_cache_spec(config)
    assert isinstance(spec, MambaSpec) and spec.num_speculative_blocks == 0
    assert spec.shapes == ((6, 96), (4, 8, 16), (4, 16, 8), (2, 16, 16), (4, 16))
    builder = layer.get_attn_backend().get_builder_cls()
    assert issubclass(builder, RingBuilder) and issubclass(builder, Builder)


@pytest.mark.parametrize("drafts", [3, None], ids=["drafts", "plain"])
def test_models_and_layer_agree_on_a_page(
    drafts: int | None, released: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(drafts)
    layer = make_layer(monkeypatch, config)
    assert layer.has_ring == bool(drafts)
    spec = layer.get_kv_cache_spec(config)
    assert len(spec.shapes) == len(spec.dtypes) == (5 if drafts else 2)
    for model in MODELS:
        counted = MambaSpec(
            shapes=model.get_mamba_state_shape_from_config(config),
            dtypes=model.get_mamba_state_dtype_from_config(config),
            block_size=-1,
        )
        assert counted.page_size_bytes == spec.page_size_bytes


def test_warming_up_takes_two_dtypes(released: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM unpacks them, and reports what fails behind that as a warning."""
    layer = make_layer(monkeypatch, make_config(3))
    seen: list[tuple[torch.dtype, ...]] = []
    monkeypatch.setattr(
        Anywhere, "forward", lambda self, **rows: seen.append(layer.get_state_dtype())
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    layer._warmup_prefill_kernels(torch.zeros(1, layer.conv_dim), 0)
    assert [len(dtypes) for dtypes in seen] == [2] and len(layer.get_state_dtype()) == 5


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_session(drafts: int, released: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(drafts)
    layer = make_layer(monkeypatch, config)
    builder = layer.get_attn_backend().get_builder_cls()
    spec = layer.get_kv_cache_spec(config)
    made = builder(spec, [layer.prefix], config, torch.device("cpu"))
    assert not made.supports_update_block_table
    run_session(Session(layer, made, 8, CommonAttentionMetadata, run, seed=drafts), drafts, 40)
    before = [part.clone() for part in vars(made.cursors).values() if isinstance(part, Tensor)]
    capture = CommonAttentionMetadata(
        query_start_loc=torch.arange(0, 9, drafts + 1, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(0, 9, drafts + 1, dtype=torch.int32),
        seq_lens=torch.full((8 // (drafts + 1),), drafts + 1, dtype=torch.int32),
        num_reqs=8 // (drafts + 1),
        num_actual_tokens=8,
        max_query_len=drafts + 1,
        max_seq_len=drafts + 1,
        block_table_tensor=torch.zeros(8 // (drafts + 1), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(8, dtype=torch.int64),
    )
    made.build_for_cudagraph_capture(capture)
    after = [part for part in vars(made.cursors).values() if isinstance(part, Tensor)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1:], new[1:])  # block 0 is padding
