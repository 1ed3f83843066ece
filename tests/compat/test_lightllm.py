"""LightLLM's names, argument names, order, shapes and meaning."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from helpers.group_cases import GROUPINGS, group_case, groups_plain
from hybridspec.compat import lightllm


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_signatures() -> None:
    names = list(inspect.signature(lightllm.build_dynamic_mtp_fa3_decode_params).parameters)
    assert names == [
        "b_req_idx",
        "b_seq_len",
        "b_mark_shared_group",
        "att_batch_size",
        "hold_req_id",
    ]
    names = list(inspect.signature(lightllm.page_table_copy).parameters)
    assert names == ["page_table", "req_to_token_indexs", "b_req_idx"]


def test_a_batch_by_hand() -> None:
    # Request 3 with two rows, request 8 with one, request 5 with three, two padding rows.
    found = lightllm.build_dynamic_mtp_fa3_decode_params(
        b_req_idx=integers(3, 3, 8, 5, 5, 5, 63, 63),
        b_seq_len=integers(101, 102, 40, 7, 8, 9, 0, 0),
        b_mark_shared_group=integers(0, 2, 1, 0, 0, 3, 0, 0),
        att_batch_size=8,
        hold_req_id=63,
    )
    assert [t.tolist() for t in found] == [
        [2, 1, 3, 0, 0, 0, 0, 0],
        [102, 40, 9, 0, 0, 0, 0, 0],
        [3, 8, 5, 63, 63, 63, 63, 63],
        [102, 40, 9, 0, 0, 0, 0, 0],
    ]
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in found)
    assert len({t.data_ptr() for t in found}) == 4


@pytest.mark.parametrize("num_rows", [1, 2, 1023, 1024, 1025, 20_000])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_any_batch_size(num_rows: int, grouping: str) -> None:
    requests, seq_len, marks = group_case(num_rows, grouping)
    arguments = (requests, seq_len, marks, num_rows, 31)
    copies = [t.clone() for t in arguments[:3]]
    q_len, kv_len, req_idx, att_len = lightllm.build_dynamic_mtp_fa3_decode_params(*arguments)
    expected = groups_plain(requests, seq_len, marks, num_rows, 31)
    assert [q_len.tolist(), kv_len.tolist(), req_idx.tolist()] == expected
    assert torch.equal(att_len, kv_len)
    assert all(torch.equal(t, copy) for t, copy in zip(arguments[:3], copies, strict=True))


def test_page_table_copy_into_a_strided_view() -> None:
    tokens = torch.randint(0, 1000, (6, 32), dtype=torch.int32)
    requests = integers(5, 0, 2, 5)
    buffer = torch.full((4, 64), -7, dtype=torch.int32)
    assert lightllm.page_table_copy(buffer[:, 8:28], tokens, requests) is None
    assert torch.equal(buffer[:, 8:28], tokens[[5, 0, 2, 5], :20])
    assert buffer[:, :8].eq(-7).all() and buffer[:, 28:].eq(-7).all()
    # Every second request index, as a view.
    lightllm.page_table_copy(buffer[:2, :32], tokens, requests[::2])
    assert torch.equal(buffer[:2, :32], tokens[[5, 2]])


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="expected shape"):
        lightllm.page_table_copy(integers(1, 2), torch.zeros(2, 2).int(), integers(0))
    with pytest.raises(ValueError, match="expected room for 2 groups, got 1"):
        lightllm.build_dynamic_mtp_fa3_decode_params(
            integers(1, 2), integers(3, 4), integers(1, 1), 1, 0
        )
