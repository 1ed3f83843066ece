"""Registered ops: the schema that follows from a signature, and what is looked at only once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._backends import always
from hybridspec.ops._library import Backend, Lasting, Written, register


class Pool(NamedTuple):
    values: Written[Tensor]
    cursor: Tensor | None


@dataclass(frozen=True)
class Whole:
    first: Tensor
    size: int


seen: list[str] = []


def add(x: Tensor, pool: Written[Pool], whole: Written[Whole], by: float) -> None:
    pool.values.add_(x * by)


def prepare(x: Tensor, *others: object) -> Any:
    seen.append("prepare")
    return add


def check(x: Tensor, pool: Pool, whole: Whole, by: float) -> None:
    seen.append("check")
    if not isinstance(by, float):
        raise TypeError("by: expected a float")


def explain(x: Tensor, *others: object) -> str | None:
    return "x is not aligned" if x.data_ptr() % 16 else None


OP = register(
    "test_library.add",
    {"fast": Backend(explain, add, prepare), "reference": Backend(always, add)},
    check,
)
BASE = torch.zeros(24)


def called(x: Tensor, **changes: Any) -> list[str]:
    """Call the op; return what it looked at."""
    seen.clear()
    pool = Pool(torch.zeros(x.shape), changes.pop("cursor", None))
    with torch.no_grad():
        OP(x, pool, Whole(BASE, 3), changes.pop("by", 1.0), **{"backend": "fast"} | changes)
    return list(seen)


def test_schema_follows_the_fields() -> None:
    schema = torch.ops.hybridspec.test_library_add.default._schema
    assert [argument.name for argument in schema.arguments] == [
        "x", "pool_values", "pool_cursor", "whole_first", "whole_size", "by", "backend"
    ]  # fmt: skip
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["pool_values", "whole_first"]  # marked fields, or all where none is
    assert str(schema.arguments[2].type) == "Optional[Tensor]"


def test_a_call_is_looked_at_once() -> None:
    assert called(torch.ones(8)) == ["check", "prepare"]
    assert called(torch.ones(8)) == []
    kinds = [
        (torch.ones(4), {}),
        (torch.ones(16)[::2], {}),
        (torch.ones(8, dtype=torch.float64), {}),
        (torch.ones(8), {"by": 2.0}),
        (torch.ones(8), {"cursor": torch.ones(1)}),
    ]
    for x, changes in kinds:
        assert called(x, **changes) == ["check", "prepare"]
        assert called(x, **changes) == []


def test_equal_options_of_another_type_are_looked_at() -> None:
    called(torch.ones(8))
    with pytest.raises(TypeError, match="by: expected a float"):
        called(torch.ones(8), by=1)
    with pytest.raises(TypeError, match="by: expected a float"):
        called(torch.ones(8), by=[])  # not hashable


def test_addresses_that_are_aligned_otherwise_are_looked_at() -> None:
    called(BASE[4:12])
    with pytest.raises(UnsupportedError, match="x is not aligned"):
        called(BASE[5:13])
    assert called(BASE[8:16]) == []


def test_what_is_wrong_is_looked_at_each_time() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="backend: expected one of"):
            called(torch.ones(8), backend="none")
        with pytest.raises(TypeError, match="backend: expected a text"):
            called(torch.ones(8), backend=3)


def look_up(x: Tensor, pool: Lasting[Written[Pool]], out: Written[Tensor]) -> None:
    out.copy_(pool.values[: len(x)])


def check_look_up(x: Tensor, pool: Pool, out: Tensor) -> None:
    seen.append("check")
    if pool.values.dim() != 1:
        raise ValueError("pool.values: expected [S]")


LOOK_UP = register("test_library.look_up", {"reference": Backend(always, look_up)}, check_look_up)


def looked_up(pool: Pool) -> list[str]:
    seen.clear()
    with torch.no_grad():
        LOOK_UP(torch.ones(2), pool, torch.zeros(2))
    return list(seen)


def test_what_lasts_is_recognised_and_what_comes_in_its_place_is_looked_at() -> None:
    pool = Pool(torch.zeros(8), None)
    assert looked_up(pool) == ["check"]
    assert looked_up(pool) == looked_up(Pool(torch.zeros(8), None)) == []
    assert looked_up(pool._replace(cursor=torch.zeros(1))) == ["check"]
    for size in range(9, 60):  # many at the address of one that is gone
        assert looked_up(Pool(torch.zeros(size), None)) == ["check"]
        with pytest.raises(ValueError, match=r"pool.values: expected \[S\]"):
            looked_up(Pool(torch.zeros(size, 1), None))
    with pytest.raises(AttributeError):
        looked_up(Pool([0.0] * 8, None))  # type: ignore[arg-type]


def test_a_parameter_may_be_replaced_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    assert looked_up(Pool(weight, None)) == ["check"]
    weight.data = torch.zeros(7, 2)
    with pytest.raises(ValueError, match=r"pool.values: expected \[S\]"):
        looked_up(Pool(weight, None))


def test_both_ways_compute_the_same() -> None:
    found = []
    for has_grad in (False, True):
        pool = Pool(torch.zeros(3), None)
        with torch.set_grad_enabled(has_grad):
            OP(torch.ones(3), pool, Whole(BASE, 3), 0.5)
        found.append(pool.values.tolist())
    assert found == [[0.5] * 3] * 2
    arguments = (torch.ones(3), torch.zeros(3), None, torch.zeros(2), 3, 0.5, "auto")
    torch.library.opcheck(torch.ops.hybridspec.test_library_add.default, arguments)


def test_explains_every_backend() -> None:
    pool = Pool(torch.zeros(8), None)
    found = OP.explain(BASE[5:13], pool, Whole(BASE, 3), 1.0)
    assert found == {"reference": None, "fast": "x is not aligned"}
