"""The kernel that appends, in Triton's interpreter; run by test_fa3.py."""

from __future__ import annotations

import pytest
import torch

from helpers.append_cases import CASES, check_append

F32, F16 = torch.float32, torch.float16


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, F16)], ids=str)
def test_append(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check_append(name, dtypes, "cpu")
