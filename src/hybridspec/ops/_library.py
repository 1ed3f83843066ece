"""Registered ops: backends of one short signature, from which schema and flattening follow.

A backend takes groups (named tuples or dataclasses), tensors and options, and returns nothing:
results are written into arguments annotated as `Written`, which the public function allocates. The
fields of the groups become the arguments of `torch.ops.hybridspec.<name>`.

Where there is nothing to trace and nothing to differentiate, a call does not meet the dispatcher,
and contract and choice are looked at once for each combination of shapes, strides, dtypes, devices,
alignments and options: what remains of a later call is to recognise it and to launch. On a CPU that
is quicker still for arguments annotated as `Lasting`, which are recognised by their identity.
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
from hybridspec.ops._signatures import signatures

__all__ = ["LIBRARY", "Backend", "Lasting", "Op", "Written", "register", "register_kernel"]

LIBRARY = torch.library.Library("hybridspec", "FRAGMENT")

T = TypeVar("T")
_WRITTEN, _LASTING = "written", "lasting"
# Of an argument: the backend writes it. Of some fields of a group: only these, where it is written.
Written = Annotated[T, _WRITTEN]
# Of an argument: it outlives a call, and its tensors stay as they are, contents aside.
Lasting = Annotated[T, _LASTING]

_KINDS = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
_MOST_CALLS = 4096  # that an op remembers
_ALIGNMENT = 16  # bytes; more is never asked for
_SHAPE, _DTYPE = Tensor.shape.__get__, Tensor.dtype.__get__  # type: ignore[attr-defined]
_COMPLAINTS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)

Run = Callable[..., None]


class Backend(NamedTuple):
    """One implementation of an op; all functions take the op's arguments.

    Attributes:
        explain: returns why it does not support a call, or None.
        run: does the work of a call.
        prepare: derives all that does not depend on contents and addresses, and returns what to run
            for every call of the same kind; None: `run` itself.
    """

    explain: Supports
    run: Run
    prepare: Callable[..., Run] | None = None

    @classmethod
    def preparing(cls, explain: Supports, prepare: Callable[..., Run]) -> Backend:
        """Return a backend that runs a call by what it prepares for it."""
        return cls(explain, lambda *call: prepare(*call)(*call), prepare)

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
    """One argument of the registered op: its declaration, its kind, and whether it lasts."""

    declaration: str
    kind: str
    is_lasting: bool

    @classmethod
    def of(cls, name: str, hint: Any, letter: str | None, is_lasting: bool) -> _Leaf:
        """Declare a tensor, a list of tensors or an option; `letter` marks what is written."""
        is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
        if is_optional:
            [hint] = [part for part in typing.get_args(hint) if part is not types.NoneType]
        is_list = typing.get_origin(hint) is list
        kind = _KINDS[typing.get_args(hint)[0] if is_list else hint]
        mark = f"({letter}!)" if letter and kind == "Tensor" else ""
        suffix = "[]" * is_list + "?" * is_optional
        return cls(f"{kind}{mark}{suffix} {name}", kind + suffix, is_lasting)


def _unmarked(hint: Any) -> tuple[Any, Sequence[str]]:
    """Return a type without its marks, and those."""
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[0], typing.get_args(hint)[1:]
    return hint, ()


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what reads some items, in C where there are more than one."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda whole: tuple([whole[place] for place in places])


class _Parts(NamedTuple):
    """Tensors among the arguments of the registered op."""

    required: Callable[[Any], tuple[Any, ...]]
    optional: Callable[[Any], tuple[Any, ...]] | None

    @classmethod
    def of(cls, required: Sequence[int], optional: Sequence[int]) -> _Parts:
        """Read the tensors at some places, and those at others that are not None."""
        return cls(_picker(required), _picker(optional) if optional else None)

    def present(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[bool, ...] | None]:
        """Return the tensors, and which of the optional ones are missing."""
        required = self.required(flat)
        if self.optional is None:
            return required, None
        optional = self.optional(flat)
        given = [part for part in optional if part is not None]
        return (*required, *given), tuple([part is None for part in optional])


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
        kinds = list(enumerate([leaf.kind for leaf in leaves]))
        required = [i for i, kind in kinds if kind == "Tensor"]
        optional = [i for i, kind in kinds if kind == "Tensor?"]
        lasting = [i for i in sorted(required + optional) if leaves[i].is_lasting]
        self._anchor = required[0]  # decides the device, and whether there is something to trace
        self._tensors = _Parts.of(required, optional)
        self._passing = _Parts.of(
            [i for i in required if i not in lasting], [i for i in optional if i not in lasting]
        )
        self._lasting = _picker(lasting)
        self._options = _picker([i for i, kind in kinds if not kind.startswith("Tensor")])
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
        """Return for each backend, by preference, why it does not support a call, or None."""
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
            hint, marks = _unmarked(marked)
            is_written, is_lasting = _WRITTEN in marks, _LASTING in marks
            group = _Group.of(hint)
            self._groups.append(group)
            if group is None:
                letter = next(letters) if is_written else None
                leaves.append(_Leaf.of(name, hint, letter, is_lasting))
                continue
            parts = typing.get_type_hints(hint, include_extras=True)
            fields = {field: _unmarked(parts[field]) for field in group.names}
            is_whole = not any(_WRITTEN in own for _, own in fields.values())
            for field, (kind, own) in fields.items():
                letter = next(letters) if is_written and (_WRITTEN in own or is_whole) else None
                full_name = field if field.startswith(f"{name}_") else f"{name}_{field}"
                leaves.append(_Leaf.of(full_name, kind, letter, is_lasting))
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
        options = self._options(flat)
        if backend in ("auto", "reference") and not flat[self._anchor].is_cuda:
            # Served by the reference, which asks for no alignment.
            tensors, absent = self._passing.present(flat)
            offsets: Any = None
            lasting = signatures(self._lasting(flat))
        else:
            tensors, absent = self._tensors.present(flat)
            lasting = ()
            offsets = reduce(operator.or_, map(Tensor.data_ptr, tensors)) % _ALIGNMENT
            if offsets:
                offsets = tuple([tensor.data_ptr() % _ALIGNMENT for tensor in tensors])
        # Built in C, several times as fast as an attribute after the other.
        return (
            backend, absent, offsets, lasting, *options, *map(type, options),
            *map(_SHAPE, tensors), *map(Tensor.stride, tensors), *map(_DTYPE, tensors),
            *map(Tensor.get_device, tensors),
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
        explain: returns why the kernel does not support a call, or None.
        kernel: launches it.
        reference: supports every call.
        check: raises unless a call is right.
    """
    backends = {"triton": Backend(explain, kernel), "reference": Backend(always, reference)}
    return Op(name, backends, check)
