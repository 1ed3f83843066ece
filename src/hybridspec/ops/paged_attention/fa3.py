"""Attention of FlashAttention-3, whichever build is installed; it is imported when it is needed.

Two builds have the same function `flash_attn_with_kvcache`: the package fa3-fwd, which is on PyPI
and takes one contiguous cache per slot, and FlashAttention's own, which takes page tables too.
Keys and values are appended here, since the library would append those of padding as well.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from hybridspec.ops._checks import dtype_name, row_alignment
from hybridspec.ops._requests import Batch
from hybridspec.ops._triton_support import CPU_CAPABILITY, capability
from hybridspec.ops.paged_attention.append import append_rows
from hybridspec.ops.paged_attention.call import Pages, Rows

__all__ = ["Build", "explain", "installed_build", "verify"]

_BUILDS = (("fa3_fwd_interface", "fa3_fwd_config"), ("flash_attn_interface", "flash_attn_config"))
_HOPPER = (9, 0)
_HEAD_DIMS = (64, 96, 128, 192, 256)
_ALIGNMENT = 16  # bytes, of addresses and strides


@dataclass(frozen=True, slots=True)
class Build:
    """An importable build of FlashAttention-3.

    Attributes:
        name: the module.
        library: the module itself.
        disabled: what it was compiled without, such as "PAGEDKV".
    """

    name: str
    library: ModuleType
    disabled: frozenset[str] = field(default_factory=frozenset)

    @property
    def has_pages(self) -> bool:
        return "PAGEDKV" not in self.disabled


@functools.cache
def installed_build(has_pages: bool = False) -> Build | str:
    """Import the first build that supports a layout of the cache; else return why there is none.

    Args:
        has_pages: whether the caches are paged.
    """
    reasons = []
    for name, config_name in _BUILDS:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            build = Build(name, importlib.import_module(name), _disabled(config_name))
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{name} cannot be imported: {str(error).splitlines()[0]}")
            continue
        if build.has_pages or not has_pages:
            return build
        reasons.append(f"{name} was built without page tables; it takes one page per slot")
    return "; ".join(reasons) or "not installed: neither fa3_fwd_interface (PyPI: fa3-fwd) nor " + (
        "flash_attn_interface can be found"
    )


def _disabled(config_name: str) -> frozenset[str]:
    """Read what a build reports that it was compiled without; empty without a report."""
    if importlib.util.find_spec(config_name) is None:
        return frozenset()
    flags = importlib.import_module(config_name).CONFIG["build_flags"]
    prefix = "FLASHATTENTION_DISABLE_"
    return frozenset(name.removeprefix(prefix) for name, is_off in flags.items() if is_off)


def explain(rows: Rows, pages: Pages, batch: Batch) -> str | None:
    """Return why FlashAttention-3 does not support a call, or None."""
    q, device = rows.q, capability(rows.q)
    if device == CPU_CAPABILITY:
        return "the tensors are not on a CUDA device"
    if device != _HOPPER:
        return f"hardware sm_{device[0]}{device[1]}: FlashAttention-3 is for sm_90"
    for name, tensor in (("k_pages", pages.k), ("v_pages", pages.v), ("slots", batch.slots)):
        if tensor.device != q.device:
            return f"{name} is on {tensor.device}, q is on {q.device}"
    reason = _explain_dtypes(q, pages.k, pages.v) or _explain_strides(q, pages.k, pages.v)
    if reason is not None:
        return reason
    build = installed_build(pages.table.shape[1] != 1)
    return build if isinstance(build, str) else _explain_build(build, q)


def _explain_dtypes(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> str | None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q has dtype {dtype_name(q.dtype)}; FlashAttention-3 takes bfloat16 and float16"
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        if tensor.dtype != q.dtype:
            return f"{name} has dtype {dtype_name(tensor.dtype)}, q has {dtype_name(q.dtype)}"
    return None


def _explain_strides(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> str | None:
    for name, tensor in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if row_alignment(tensor) < _ALIGNMENT:
            return f"{name} is not aligned to {_ALIGNMENT} bytes (strides {tensor.stride()})"
    return None


def _explain_build(build: Build, q: Tensor) -> str | None:
    """Return what a call needs and a build was compiled without."""
    if q.dtype == torch.float16 and "FP16" in build.disabled:
        return f"{build.name} was built without float16"
    if "VARLEN" in build.disabled:
        return f"{build.name} was built without ragged batches"
    head_dim = q.shape[2]
    if not any(dim >= head_dim and f"HDIM{dim}" not in build.disabled for dim in _HEAD_DIMS):
        return f"{build.name} was built without head size {head_dim}"
    return None


def verify(rows: Rows, pages: Pages, batch: Batch) -> None:
    """Append the rows, then attend.

    A request that is padding, or has no rows, has no keys either and reads none. With one page per
    slot the pages are the caches and the first page number says which; otherwise the rows of the
    page table are copied in the order of the batch, as the library wants them. That branch was not
    run here: fa3-fwd refuses page tables.
    """
    (q, _, _, out, _), (cu_seqlens, slots, max_rows) = rows, batch
    has_pages = pages.table.shape[1] != 1
    build = installed_build(has_pages)
    assert isinstance(build, Build)
    appended = append_rows(rows, pages, batch)
    if q.shape[0] == 0 or slots.shape[0] == 0:
        out.zero_()
        return
    layout = {"cache_batch_idx": appended.first_page}
    if has_pages:
        layout = {"page_table": pages.table.index_select(0, slots.clamp(min=0)).to(torch.int32)}
    y = build.library.flash_attn_with_kvcache(
        q,
        pages.k,
        pages.v,
        cache_seqlens=appended.kv_len,
        cu_seqlens_q=cu_seqlens.to(torch.int32),
        max_seqlen_q=max_rows,
        softmax_scale=rows.score_scale(),
        causal=True,
        **layout,
    )
    # By selection: the library leaves rows that belong to no request as they were.
    out.copy_(y.masked_fill_(appended.is_dead[:, None, None], 0.0))
