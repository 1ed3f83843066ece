"""A plug-in for vLLM 0.33 that verifies drafts of GDN layers with a ring instead of one state each.

Written against the released wheel (vllm 0.33.0, Apache-2.0): names, signatures and base classes; no
code was taken. Experimental: it has not run inside vLLM on a GPU. It serves Qwen3-Next and Qwen3.5
with speculative decoding on CUDA, without prefix caching and without transfer of the cache; other
models, and runs without drafts, stay as they are.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from hybridspec.errors import UnsupportedError

__all__ = ["register"]

_RELEASE = "0.33."


def register() -> None:
    """Replace vLLM's GDN layer, if that was asked for; a second call does nothing.

    vLLM calls this in every process. It does so for each plug-in that is installed, unless its
    variable VLLM_PLUGINS names those to load.

    Raises:
        UnsupportedError: for another vLLM, or if something else has replaced the layer.
    """
    if not _is_wanted():
        return
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(_RELEASE):
        raise UnsupportedError(f"hybridspec's plug-in serves vllm {_RELEASE}*, got {found}")
    from hybridspec.compat.vllm_plugin.install import install

    install()


def _is_wanted() -> bool:
    """Return whether the environment names the plug-in.

    The only place where a variable chooses a path: vLLM gives its plug-ins no argument.
    """
    named = os.environ.get("VLLM_PLUGINS", "").split(",")
    return "hybridspec" in named or os.environ.get("HYBRIDSPEC_VLLM") == "1"
