"""The semantics of FlashAttention-3's `flash_attn_with_kvcache` in plain PyTorch, and its refusals.

Written from the function's documentation. What the library leaves unwritten is NaN here.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hybridspec.ops.paged_attention import fa3

__all__ = ["FakeFa3", "fa3_build"]


class FakeFa3(ModuleType):
    """A build of the library; `calls` holds the keyword arguments of every call.

    Args:
        name: the module's name.
        disabled: what it was compiled without.
    """

    def __init__(self, name: str, disabled: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.disabled = disabled
        self.calls: list[dict] = []

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        cache_batch_idx: Tensor | None = None,
        page_table: Tensor | None = None,
    ) -> Tensor:
        self.calls.append({"cache_batch_idx": cache_batch_idx, "page_table": page_table})
        num_requests = cu_seqlens_q.shape[0] - 1
        assert (cache_batch_idx is None) != (page_table is None)
        if page_table is not None and "PAGEDKV" in self.disabled:
            raise RuntimeError("This flash attention build does not support paged KV.")
        metadata = [cache_seqlens, cu_seqlens_q, cache_batch_idx, page_table]
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in metadata if t is not None)
        assert cache_seqlens.shape == (num_requests,) and causal
        out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
        bounds = cu_seqlens_q.tolist()
        for b, length in enumerate(cache_seqlens.tolist()):
            start, stop = bounds[b], bounds[b + 1]
            assert 0 <= stop - start <= max_seqlen_q and stop <= q.shape[0]
            if cache_batch_idx is not None:
                assert 0 <= cache_batch_idx[b] < k_cache.shape[0] and length <= k_cache.shape[1]
                keys, values = (pool[cache_batch_idx[b], :length] for pool in (k_cache, v_cache))
            else:
                positions = torch.arange(length)
                pages = page_table[b, positions // k_cache.shape[1]].long()
                places = positions % k_cache.shape[1]
                keys, values = k_cache[pages, places], v_cache[pages, places]
            out[start:stop] = _attend(q[start:stop], keys, values, softmax_scale)
        return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention aligned to the end; rows that see nothing are zero."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, 1).double() for t in (keys, values))
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) * scale
    ends = torch.arange(len(q)) + len(keys) - len(q)
    scores.masked_fill_(torch.arange(len(keys)) > ends[:, None], -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("htl,lhd->thd", weights, values).to(q.dtype)


def fa3_build(
    monkeypatch: pytest.MonkeyPatch, name: str = "fa3_fwd_interface", *disabled: str
) -> FakeFa3:
    """Make a fake build the only one that can be imported, until the test ends."""
    fake = FakeFa3(name, disabled)
    config = ModuleType("config")
    config.__spec__ = ModuleSpec("config", None)
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True for flag in disabled}}
    config.CONFIG["build_flags"]["FLASHATTENTION_DISABLE_SPLIT"] = False
    modules = {"fa3_fwd_interface": "fa3_fwd_config", "flash_attn_interface": "flash_attn_config"}
    for module, config_name in modules.items():
        monkeypatch.delitem(sys.modules, module, raising=False)
        if module == name:
            monkeypatch.setitem(sys.modules, module, fake)
            monkeypatch.setitem(sys.modules, config_name, config)
    monkeypatch.setattr(fa3, "_BUILDS", ((name, modules[name]),))
    monkeypatch.setattr(fa3, "installed_build", fa3.installed_build.__wrapped__)
    return fake
