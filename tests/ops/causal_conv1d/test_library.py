"""Registration with torch.library: opcheck, and whole graphs under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.conv_cases import expected_output, expected_ring, make_conv_batch
from hybridspec.ops import causal_conv1d


@pytest.mark.parametrize("op", ["verify", "prefill"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_opcheck(op: str, has_bias: bool) -> None:
    batch = make_conv_batch([3, 0, 2], [2, 5, 15], [4, 1, -1], tail_rows=1, has_bias=has_bias)
    batch.conv_ring.nan_to_num_()
    batch.x.nan_to_num_()
    out = torch.empty_like(batch.x)
    torch.library.opcheck(
        getattr(torch.ops.hybridspec, f"causal_conv1d_{op}").default,
        (
            batch.x,
            out,
            batch.weight,
            batch.bias,
            "silu",
            batch.conv_ring,
            batch.seq_len,
            batch.cu_seqlens,
            batch.slots,
            3,
            "auto",
        ),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", ["verify", "prefill"])
def test_compile(op: str, backend: str) -> None:
    limit = {"verify": "max_verify_tokens", "prefill": "max_seqlen"}[op]

    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        return getattr(causal_conv1d, op)(x * 2, *rest, **{limit: 3}) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for lengths in ([3, 1, 2], [2, 3, 3]):  # another number of rows: shapes become symbols
        batch = make_conv_batch(lengths, [2, 5, 15], [4, 1, 0])
        batch.x.div_(2)
        out = compiled(*batch.tensors)
        batch.x.mul_(2)
        num_kept = None if op == "verify" else 3
        ring = expected_ring(make_conv_batch(lengths, [2, 5, 15], [4, 1, 0]), num_kept=num_kept)
        torch.testing.assert_close(out, expected_output(batch) + 1, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(batch.conv_ring, ring, rtol=0, atol=0, equal_nan=True)


def test_schema_names_what_changes() -> None:
    schema = torch.ops.hybridspec.causal_conv1d_verify.default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == ["rows_out", "log_conv_ring"]
