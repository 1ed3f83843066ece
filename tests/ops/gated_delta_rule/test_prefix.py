"""States at a token of the recent past, with cursors of batch rows."""

from __future__ import annotations

import pytest
import torch

from helpers.gdn_cases import Dtypes, assert_same_bits
from helpers.prefix_calls import PrefixCall
from hybridspec.ops import gated_delta_rule

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [Dtypes(F32, F32, F32), Dtypes(BF16, BF16, BF16), Dtypes(BF16, F16, F16)]


@pytest.mark.parametrize("capacity", [16, 32])
@pytest.mark.parametrize("dtypes", [Dtypes(F64, F64, F64), *DTYPES], ids=str)
def test_equal_to_cursors_of_slots(dtypes: Dtypes, capacity: int) -> None:
    call = PrefixCall(dtypes, capacity)
    found = call.run()
    assert_same_bits(found[:8], call.pools.state[:8])
    asked = slice(0, 4)
    gated_delta_rule.materialize(
        call.pools.state, call.pools.ring, call.slots[asked], call.out_slots[asked],
        call.counts[asked],
    )  # fmt: skip
    bound = 1e-12 if dtypes.state == F64 else 1e-5 if dtypes.state == F32 else 2e-2
    torch.testing.assert_close(found[8:], call.pools.state[8:], rtol=bound, atol=bound)
    assert not torch.equal(found[8], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_compiled_kernel_equals_the_reference(dtypes: Dtypes) -> None:
    call = PrefixCall(dtypes, device="cuda")
    active = torch.tensor([2, -1, 0, 7, 99, 1, 3, 5], dtype=torch.int32, device="cuda")
    bound = 1e-4 if dtypes.state == F32 else 2e-2
    for options in ({}, {"active": active}, {"active": active, "num_active": active[:1]}):
        found, expected = (call.run(backend=name, **options) for name in ("triton", "reference"))
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
    assert_same_bits(call.run(backend="triton")[11], call.pools.state[3])


def test_no_rows_are_a_copy_of_every_bit() -> None:
    call = PrefixCall(DTYPES[1])
    assert_same_bits(call.run()[11], call.pools.state[3])


def test_active_requests() -> None:
    call = PrefixCall(DTYPES[0])
    every = call.run()
    before = call.pools.state
    active = torch.tensor([2, -1, 0, 7, 99, 1, 3, 5], dtype=torch.int32)
    assert_same_bits(call.run(active=active), every)
    for count, written in ((0, ()), (-3, ()), (1, (10,)), (3, (10, 8)), (99, (8, 9, 10, 11))):
        num_active = torch.tensor([count], dtype=torch.int32)
        found = call.run(active=active, num_active=num_active)
        for slot in range(12):
            assert_same_bits(found[slot], (every if slot in written else before)[slot])


def test_passes_opcheck() -> None:
    call = PrefixCall(DTYPES[0])
    pools = [pool.nan_to_num() for pool in call.pools.tensors()[:4]]
    active = torch.arange(8, dtype=torch.int32)
    for optional in ((None, None), (active, active[:1])):
        torch.library.opcheck(
            torch.ops.hybridspec.gated_delta_rule_materialize_rows.default,
            (
                pools[0],
                None,
                *pools[1:],
                call.starts,
                call.counts,
                16,
                False,
                call.slots,
                call.out_slots,
                call.counts,
                *optional,
                8,
                "auto",
            ),
        )
