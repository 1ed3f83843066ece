"""Registration with torch.library: opcheck, and whole graphs under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.attention_cases import expected_output, expected_pages, make_attention_batch
from hybridspec.ops import paged_attention

LIMITS = {"verify": "max_verify_tokens", "prefill": "max_seqlen"}


@pytest.mark.parametrize("op", ["verify", "prefill"])
def test_opcheck(op: str) -> None:
    batch = make_attention_batch([3, 0, 2], [2, 5, 15], [4, 1, -1], tail_rows=1)
    for tensor in (batch.q, batch.k, batch.v, batch.k_pages, batch.v_pages):
        tensor.nan_to_num_()
    torch.library.opcheck(
        getattr(torch.ops.hybridspec, f"paged_attention_{op}").default,
        (
            batch.q,
            batch.k,
            batch.v,
            torch.empty_like(batch.q),
            0.25,
            batch.k_pages,
            batch.v_pages,
            batch.page_table,
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
    def layer(q: Tensor, *rest: Tensor) -> Tensor:
        return getattr(paged_attention, op)(q * 2, *rest, **{LIMITS[op]: 3}) + 1

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for lengths in ([3, 1, 2], [2, 3, 3]):  # another number of rows: shapes become symbols
        batch = make_attention_batch(lengths, [2, 5, 15], [4, 1, 0])
        right = expected_output(batch)
        k_pages, v_pages = expected_pages(batch)
        batch.q.div_(2)
        out = compiled(*batch.tensors)
        torch.testing.assert_close(out, right + 1, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(batch.k_pages, k_pages, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(batch.v_pages, v_pages, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["verify", "prefill"])
def test_schema_names_what_changes(op: str) -> None:
    schema = getattr(torch.ops.hybridspec, f"paged_attention_{op}").default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == ["rows_out", "pages_k", "pages_v"]
