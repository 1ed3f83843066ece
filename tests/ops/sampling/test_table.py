"""The table as it is made."""

from __future__ import annotations

from hybridspec.ops.sampling import SamplingTable, SamplingUses


def test_bits_past_the_vocabulary_are_zero() -> None:
    table = SamplingTable.create(2, 70)
    assert table.allowed_bits.tolist() == [[-1, -1, 0b111111]] * 2
    assert SamplingTable.create(1, 64).allowed_bits.tolist() == [[-1, -1]]


def test_tensors_are_named_again() -> None:
    table = SamplingTable.create(2, 70)
    again = SamplingTable.of(table.tensors())
    assert all(a is b for a, b in zip(again.tensors(), table.tensors(), strict=True))


def test_uses_join() -> None:
    one, other = SamplingUses(has_noise=True), SamplingUses(has_bias=True)
    assert one | other == SamplingUses(has_noise=True, has_bias=True)
    assert (one.has_edits, other.has_edits) == (False, True)
    assert SamplingUses.of(one.flags()) == one
    assert all(SamplingUses.everything().flags())
