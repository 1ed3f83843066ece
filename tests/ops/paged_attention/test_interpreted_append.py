"""The kernel that appends, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.append_cases import CASES, check_append
from helpers.attention_cases import expected_pages, make_attention_batch, with_far_pages
from hybridspec.ops.paged_attention.append import launch_append

pytestmark = pytest.mark.interpreted

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F16)], ids=str)
def test_append(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_append(name, dtypes, "cpu")


def test_pages_past_two_to_the_31st_element(tmp_path: Path) -> None:
    batch = make_attention_batch([4], [30], [2], page_size=16, dtype=F16)
    assert batch.page_table[2, :3].max() >= 2
    far = with_far_pages(batch, tmp_path)
    launch_append(*far.call(4, None, far.q))
    for pages, right in zip((far.k_pages, far.v_pages), expected_pages(batch), strict=True):
        torch.testing.assert_close(pages, right, rtol=0, atol=0, equal_nan=True)
