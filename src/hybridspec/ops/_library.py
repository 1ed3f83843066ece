"""The one `torch.library` handle of the package, and the form that all its ops take.

An op returns nothing: results are written into arguments marked `(a!)`, which the Python function
of the same name allocates. Fake kernels therefore have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._autocast import without_autocast

__all__ = ["LIBRARY", "register"]

LIBRARY = torch.library.Library("hybridspec", "FRAGMENT")


def _fake(*args: object, **kwargs: object) -> None:
    return None


def register(schema: str, implementation: Callable[..., None]) -> Callable[..., None]:
    """Define `hybridspec::<name>` for every device and return a function that calls it.

    Where there is nothing to trace and nothing to differentiate, the function calls the
    implementation itself: passing two dozen arguments through the dispatcher costs as much as ten
    operators of a small model.

    Args:
        schema: name and arguments without the result, such as `"scale(Tensor(a!) x, float s)"`.
        implementation: called with the arguments in schema order and without autocast; chooses its
            backend itself.

    Returns:
        A function of the schema's arguments, all positional.
    """
    name = schema.partition("(")[0]
    implementation = without_autocast(implementation)
    LIBRARY.define(f"{schema} -> ()")
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridspec::{name}", _fake, lib=LIBRARY)
    op = getattr(torch.ops.hybridspec, name).default
    has_backend = schema.endswith("str backend)")

    def call(*args: object) -> None:
        if has_backend and not isinstance(args[-1], str):
            raise TypeError(f"backend: expected a text, got {args[-1]!r}")
        is_plain = type(args[0]) is Tensor and not torch.is_grad_enabled()
        if is_plain and not torch.compiler.is_compiling():
            implementation(*args)
        else:
            op(*args)

    return call
