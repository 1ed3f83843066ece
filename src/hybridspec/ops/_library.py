"""Registered ops: backends of one short signature, from which schema and flattening follow.

A backend takes groups (named tuples or dataclasses), tensors and options, and returns nothing:
results are written into arguments annotated as `Written`, which the public function allocates. The
fields of the groups become the arguments of `torch.ops.hybridspec.<name>`.

Where there is nothing to trace and nothing to differentiate, a call does not meet the dispatcher,
and contract and choice are looked at once for each combination of shapes, strides, dtypes, devices,
alignments and options: what remains of a later call is to recognise it and to launch.
"""

from __future__ import annotations

import dataclasses
import operator
import string
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridspec.ops._autocast import without_autocast
from hybridspec.ops._backends import Supports, always, choose_backend

__all__ = ["LIBRARY", "Backend", "Op", "Written", "register", "register_kernel"]

LIBRARY = torch.library.Library("hybridspec", "FRAGMENT")

T = TypeVar("T")
_WRITTEN = "written"
# Of an argument: the backend writes it. Of some fields of a group: only these, where it is written.
Written = Annotated[T, _WRITTEN]

_KINDS = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
_MOST_CALLS = 4096  # that an op remembers
_ALIGNMENT = 16  # bytes; more is never asked for
_SHAPE, _DTYPE = Tensor.shape.__get__, Tensor.dtype.__get__  # type: ignore[attr-defined]
_COMPLAINTS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)

Run = Callable[..., None]


class Backend(NamedTuple):
    """One implementation of an op; all functions take the op's arguments.

    Attributes:
        explain: says why it cannot serve a call, or returns None.
        run: serves a call.
        prepare: derives all that does not depend on contents and addresses, and returns what to run
            for every call of the same kind; None: `run` itself.
    """

    explain: Supports
    run: Run
    prepare: Callable[..., Run] | None = None

    def prepared(self, *arguments: Any) -> Run:
        """Return what serves this call and all of its kind."""
        return self.run if self.prepare is None else self.prepare(*arguments)


class _Group(NamedTuple):
    """A class whose fields are arguments of the registered op."""

    kind: Any
    names: tuple[str, ...]
    is_tuple: bool

    @classmethod
    def of(cls, hint: Any) -> _Group | None:
        """Return the group that a type is, or None for a tensor or an option."""
        if dataclasses.is_dataclass(hint):
            return cls(hint, tuple([field.name for field in dataclasses.fields(hint)]), False)
        return cls(hint, hint._fields, True) if hasattr(hint, "_fields") else None

    def values(self, argument: Any) -> list[Any]:
        return [getattr(argument, name) for name in self.names]


class _Leaf(NamedTuple):
    """One argument of the registered op: its declaration, and whether it is a tensor, or may be."""

    declaration: str
    kind: str

    @classmethod
    def of(cls, name: str, hint: Any, letter: str | None) -> _Leaf:
        """Declare a tensor, a list of tensors or an option; `letter` marks what is written."""
        is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
        if is_optional:
            [hint] = [part for part in typing.get_args(hint) if part is not types.NoneType]
        is_list = typing.get_origin(hint) is list
        kind = _KINDS[typing.get_args(hint)[0] if is_list else hint]
        mark = f"({letter}!)" if letter and kind == "Tensor" else ""
        suffix = "[]" * is_list + "?" * is_optional
        return cls(f"{kind}{mark}{suffix} {name}", kind + suffix)


def _unmarked(hint: Any) -> tuple[Any, bool]:
    """Return a type without its mark, and whether it had one."""
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[0], _WRITTEN in typing.get_args(hint)[1:]
    return hint, False


class Op:
    """A public operator: its contract, its backends, and its entry in `torch.ops.hybridspec`.

    Args:
        name: as messages say it, such as "ring.commit"; dots become underscores where registered.
        backends: in order of preference on a device; on a CPU "reference" comes first. All have the
            signature of the reference.
        check: raises unless a call is right; None: every call is.
    """

    def __init__(
        self, name: str, backends: Mapping[str, Backend], check: Run | None = None
    ) -> None:
        self.name = name
        self.backends = backends
        self._check = check or always
        self._groups: list[_Group | None] = []  # one for each argument
        leaves = list(self._declared(backends["reference"].run))
        self._tensors = [i for i, leaf in enumerate(leaves) if leaf.kind == "Tensor"]
        self._optional = [i for i, leaf in enumerate(leaves) if leaf.kind == "Tensor?"]
        self._options = [i for i, leaf in enumerate(leaves) if not leaf.kind.startswith("Tensor")]
        self._anchor = self._tensors[
            0
        ]  # decides the device, and whether there is something to trace
        self._is_remembered = not any(leaf.kind == "Tensor[]" for leaf in leaves)
        self._runs: dict[object, Run] = {}
        self._serve_exactly = without_autocast(self._serve)
        qualified = name.replace(".", "_")
        schema = ", ".join([leaf.declaration for leaf in leaves] + ["str backend"])
        LIBRARY.define(f"{qualified}({schema}) -> ()")
        LIBRARY.impl(qualified, self._run_flat, "CompositeExplicitAutograd")
        torch.library.register_fake(f"hybridspec::{qualified}", always, lib=LIBRARY)
        self._op = getattr(torch.ops.hybridspec, qualified).default

    def __call__(self, *arguments: Any, backend: str = "auto") -> None:
        """Serve a call with a backend, or with the first that can."""
        flat = None
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            flat = self._flat(arguments)
            if type(flat[self._anchor]) is not Tensor:
                flat = None
        if flat is not None:
            self._serve_exactly(arguments, flat, backend)
            return
        self._check(*arguments)
        if not isinstance(backend, str):
            raise TypeError(f"backend: expected a text, got {backend!r}")
        self._op(*self._flat(arguments), backend)

    def explain(self, *arguments: Any) -> dict[str, str | None]:
        """Say of each backend, in order of preference, why it cannot serve a call, or None."""
        candidates = self._candidates(self._flat(arguments))
        return {name: explain(*arguments) for name, explain in candidates.items()}

    def _declared(self, signature: Run) -> Sequence[_Leaf]:
        """List the arguments of the registered op by a backend's annotations."""
        letters = iter(string.ascii_lowercase)
        leaves = []
        hints = typing.get_type_hints(signature, include_extras=True)
        for name, marked in hints.items():
            if name == "return":
                continue
            hint, is_written = _unmarked(marked)
            group = _Group.of(hint)
            self._groups.append(group)
            if group is None:
                leaves.append(_Leaf.of(name, hint, next(letters) if is_written else None))
                continue
            parts = typing.get_type_hints(hint, include_extras=True)
            fields = {field: _unmarked(parts[field]) for field in group.names}
            is_whole = not any(is_marked for _, is_marked in fields.values())
            for field, (kind, is_marked) in fields.items():
                letter = next(letters) if is_written and (is_marked or is_whole) else None
                full_name = field if field.startswith(f"{name}_") else f"{name}_{field}"
                leaves.append(_Leaf.of(full_name, kind, letter))
        return leaves

    def _flat(self, arguments: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for argument, group in zip(arguments, self._groups, strict=True):
            if group is not None and type(argument) is group.kind:
                flat += argument if group.is_tuple else group.values(argument)
            else:
                flat.append(argument)
        return flat

    def _run_flat(self, *flat_and_backend: Any) -> None:
        *flat, backend = flat_and_backend
        rest = iter(flat)
        arguments = [
            next(rest)
            if group is None
            else group.kind(**{name: next(rest) for name in group.names})
            for group in self._groups
        ]
        self._serve_exactly(arguments, flat, backend)

    def _serve(self, arguments: Sequence[Any], flat: Sequence[Any], backend: str) -> None:
        try:
            key = self._key(flat, backend) if self._is_remembered else None
            run = self._runs.get(key)
        except _COMPLAINTS:  # no tensor where one is expected, or an option of a strange kind
            key = run = None
        if run is None:
            run = self._chosen(arguments, flat, backend)
            if key is not None:
                if len(self._runs) >= _MOST_CALLS:
                    self._runs.clear()
                self._runs[key] = run
        run(*arguments)

    def _key(self, flat: Sequence[Any], backend: str) -> tuple[Any, ...]:
        """What contract, choice and preparation depend on."""
        tensors = [flat[i] for i in self._tensors]
        absent = None
        if self._optional:
            optional = [flat[i] for i in self._optional]
            absent = tuple([part is None for part in optional])
            tensors += [part for part in optional if part is not None]
        options = [flat[i] for i in self._options]
        offsets: Any = reduce(operator.or_, map(Tensor.data_ptr, tensors)) % _ALIGNMENT
        if offsets:
            offsets = tuple([tensor.data_ptr() % _ALIGNMENT for tensor in tensors])
        # Built in C, several times as fast as an attribute after the other.
        return (
            backend, absent, offsets, *options, *map(type, options), *map(_SHAPE, tensors),
            *map(Tensor.stride, tensors), *map(_DTYPE, tensors), *map(Tensor.get_device, tensors),
        )  # fmt: skip

    def _candidates(self, flat: Sequence[Any]) -> Mapping[str, Supports]:
        found = {name: backend.explain for name, backend in self.backends.items()}
        return found if flat[self._anchor].is_cuda else {"reference": found["reference"]} | found

    def _chosen(self, arguments: Sequence[Any], flat: Sequence[Any], backend: str) -> Run:
        self._check(*arguments)
        if not isinstance(backend, str):
            raise TypeError(f"backend: expected a text, got {backend!r}")
        name = choose_backend(self.name, backend, self._candidates(flat), *arguments)
        return self.backends[name].prepared(*arguments)


def register(name: str, backends: Mapping[str, Backend], check: Run | None = None) -> Op:
    """Define an op for every device; see `Op`."""
    return Op(name, backends, check)


def register_kernel(
    name: str, explain: Supports, kernel: Run, reference: Run, check: Run | None = None
) -> Op:
    """Define an op that has a Triton kernel, and PyTorch operators otherwise; see `Op`.

    Args:
        name: as messages say it.
        explain: says why the kernel cannot serve a call, or returns None.
        kernel: launches it.
        reference: serves every call.
        check: raises unless a call is right.
    """
    backends = {"triton": Backend(explain, kernel), "reference": Backend(always, reference)}
    return Op(name, backends, check)
