"""The one `torch.library` handle of the package, and the form that all its ops take.

An op returns nothing: results are written into arguments marked `(a!)`, which the Python function
of the same name allocates. Fake kernels therefore have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["LIBRARY", "register"]

LIBRARY = torch.library.Library("hybridspec", "FRAGMENT")


def _fake(*args: object, **kwargs: object) -> None:
    return None


def register(schema: str, implementation: Callable[..., None]) -> Callable[..., None]:
    """Define `hybridspec::<name>` for every device and return the callable overload.

    Args:
        schema: name and arguments without the result, such as `"scale(Tensor(a!) x, float s)"`.
        implementation: called with the arguments in schema order; chooses its backend itself.

    Returns:
        The operator `torch.ops.hybridspec.<name>.default`.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(f"{schema} -> ()")
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridspec::{name}", _fake, lib=LIBRARY)
    return getattr(torch.ops.hybridspec, name).default
