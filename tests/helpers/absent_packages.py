"""Stand-ins for packages that a released wheel imports and that are not installed.

A name from such a package is an empty class that may be called, subclassed and subscribed. So the
modules import, and whatever a test does with the stand-ins fails or means nothing: tests must not
rest on them. Only packages on the caller's list are made up.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

__all__ = ["make_up"]


class _Names(type):
    """Classes any attribute of which is the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Anything(metaclass=_Names):
    """What every name of an absent package is derived from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self  # a decorator leaves what it gets

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    @classmethod
    def __get_pydantic_core_schema__(cls, *args: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Module(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the absent packages, behind all that is there."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def make_up(packages: Iterable[str]) -> list[str]:
    """Let imports of these packages succeed where they are not installed; return which."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(frozenset(absent)))
    return absent
