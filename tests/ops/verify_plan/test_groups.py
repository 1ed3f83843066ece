"""Compacted groups and copied page tables against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.group_cases import GROUPINGS, group_case, groups_plain
from hybridspec.ops.verify_plan import compact_groups, copy_page_table


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 1023, 1024, 1025, 4097, 20_000])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_equal_plain_python(num_rows: int, grouping: str) -> None:
    requests, seq_len, marks = group_case(num_rows, grouping)
    found = compact_groups(requests, seq_len, marks, num_entries=num_rows, hold_request=-9)
    assert [t.dtype for t in found] == [torch.int32] * 3
    assert [t.tolist() for t in found] == groups_plain(requests, seq_len, marks, num_rows, -9)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    marks=st.lists(st.integers(-2, 4), max_size=12),
    spare=st.integers(0, 4),
    is_wide=st.booleans(),
)
def test_any_number_of_entries(marks: list[int], spare: int, is_wide: bool) -> None:
    dtype = torch.int64 if is_wide else torch.int32
    column = torch.tensor(marks, dtype=dtype)
    requests, seq_len = (
        torch.arange(len(marks), dtype=dtype) + 5,
        torch.arange(len(marks), dtype=dtype) * 3,
    )
    num_entries = sum(mark > 0 for mark in marks) + spare
    found = compact_groups(requests, seq_len, column, num_entries=num_entries, hold_request=77)
    expected = groups_plain(requests, seq_len, column, num_entries, 77)
    assert [t.tolist() for t in found] == expected
    # The comparison sees a group that is lost, and one that is too many.
    if spare and marks:
        changed = column.clone()
        changed[0] = 0 if marks[0] > 0 else 1
        assert groups_plain(requests, seq_len, changed, num_entries, 77) != expected


def test_page_tables_of_any_layout() -> None:
    source = torch.arange(60, dtype=torch.int32).view(5, 12)
    requests = torch.tensor([4, 0, 4], dtype=torch.int32)
    buffer = torch.full((3, 20), -1, dtype=torch.int32)
    copy_page_table(buffer[:, 2:18:2], source, requests)
    assert torch.equal(buffer[:, 2:18:2], source[[4, 0, 4], :8])
    assert buffer[:, 3::2].eq(-1).all() and buffer[:, :2].eq(-1).all()
    assert buffer[:, 18:].eq(-1).all()
    wide = torch.zeros(8, 3, dtype=torch.int64).T
    copy_page_table(wide, source.T.contiguous().T, requests.long())
    assert torch.equal(wide, source[[4, 0, 4], :8].long())


def test_wrong_calls() -> None:
    rows = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_entries: expected room for 3 groups, got 2"):
        compact_groups(rows, rows, rows, num_entries=2, hold_request=0)
    with pytest.raises(ValueError, match="num_entries: expected at least 0"):
        compact_groups(rows, rows, rows * 0, num_entries=-1, hold_request=0)
    with pytest.raises(ValueError, match="marks: expected shape"):
        compact_groups(rows, rows, rows[:2], num_entries=3, hold_request=0)
    with pytest.raises(TypeError, match="seq_len: expected dtype"):
        compact_groups(rows, rows.float(), rows, num_entries=3, hold_request=0)
    table = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="source: expected at least 4 columns"):
        copy_page_table(table, table[:, :2], rows)
    with pytest.raises(ValueError, match="requests: expected shape"):
        copy_page_table(table, table, rows[:2])


def test_compiles_as_one_graph() -> None:
    def compact(requests: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        entries = compact_groups(requests, requests + 5, marks, num_entries=4, hold_request=9)
        return torch.stack(list(entries))

    compiled = torch.compile(compact, fullgraph=True, backend="aot_eager")
    requests, marks = torch.arange(6), torch.tensor([0, 2, 0, 0, 3, 1])
    with torch.no_grad():
        assert torch.equal(compiled(requests, marks), compact(requests, marks))
