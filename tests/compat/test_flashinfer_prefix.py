"""The drop-in for FlashInfer's states for prefix caches."""

from __future__ import annotations

import inspect

import pytest
import torch

from helpers.gdn_cases import Dtypes, assert_same_bits
from helpers.prefix_calls import PrefixCall
from hybridspec.compat.flashinfer import CallerError, gdn_prefix_materialize

BF16 = torch.bfloat16


def arguments(call: PrefixCall) -> dict[str, torch.Tensor]:
    ring = call.pools.ring
    return {
        "state": call.pools.state,
        "src_slots": call.slots,
        "dst_slots": call.out_slots,
        "k_cache": ring.k,
        "u_cache": ring.u,
        "g_cache": ring.cum_log_decay,
        "cache_base": call.starts,
        "count": call.counts,
    }


def test_signature() -> None:
    parameters = inspect.signature(gdn_prefix_materialize).parameters
    assert list(parameters) == [
        "state", "src_slots", "dst_slots", "k_cache", "u_cache", "g_cache", "cache_base", "count",
        "active_request_indices", "num_active", "min_blocks_per_mp",
    ]  # fmt: skip
    assert [parameter.default for parameter in parameters.values()][8:] == [None, None, 8]
    assert parameters["min_blocks_per_mp"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("capacity", [16, 32])
def test_is_the_op(capacity: int) -> None:
    call = PrefixCall(Dtypes(BF16, BF16, BF16), capacity)
    expected, given = call.run(), arguments(call)
    active, num_active = torch.arange(8, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    assert gdn_prefix_materialize(*given.values(), active, num_active) is given["state"]
    assert_same_bits(call.pools.state, expected)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("k_cache", lambda x: x[0], r"k_cache: expected a tensor \[pool, H, R, K\]"),
        ("u_cache", lambda x: x[:, :, :8], "u_cache: expected shape"),
        ("g_cache", lambda x: x.half(), "g_cache: expected dtype float32"),
        ("src_slots", lambda x: x.long(), "src_slots: expected dtype int32, got int64"),
        ("dst_slots", lambda x: x[:3], r"dst_slots: expected shape .* = \[8\], got \[3\]"),
        ("cache_base", lambda x: x.float(), "cache_base: expected dtype int32, got float32"),
        ("count", lambda x: x[:, None], r"count: expected shape .* got \[8, 1\]"),
    ],
)
def test_wrong_calls(name: str, change, text: str) -> None:
    given = arguments(PrefixCall(Dtypes(BF16, BF16, BF16)))
    given[name] = change(given[name])
    with pytest.raises(CallerError, match=text):
        gdn_prefix_materialize(**given)
