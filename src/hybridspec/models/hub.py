"""Model folders by name: a path, or the id of a repository on the Hugging Face hub.

What is downloaded goes to the hub's own cache, and only the files that are read here: descriptions
first, then the weight files that they name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybridspec.errors import CheckpointError
from hybridspec.models.checkpoint import weight_files
from hybridspec.values import shown

__all__ = ["find_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DESCRIPTIONS = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    # These are not read but refused by name.
    "adapter_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
]


def find_model(
    model: str | Path, *, only: str = "", has_weights: bool = True, revision: str | None = None
) -> Path:
    """Return the folder of a model, downloaded first if it is one of the hub's.

    Args:
        model: a path, or an "owner/name" that is no path here.
        only: of a repository, download only files with tensors whose names start with this.
        has_weights: whether to download weights at all.
        revision: branch, tag or commit of the repository; None is its main branch.

    Returns:
        The folder. A path is returned as it is, whether or not there is anything.

    Raises:
        TypeError, ValueError: if `model` is neither, or a path with a revision.
        CheckpointError: if the path cannot be looked at, or the hub does not know the id, does not
            give it out, or cannot be reached while its cache does not hold the model.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model: expected a folder or an id, got {model!r}")
    if model == "":
        raise ValueError("model: expected a folder or an id, got an empty text")
    is_there = _exists(model)
    if isinstance(model, Path) or is_there or not _HUB_ID.fullmatch(model):
        if revision is not None:
            raise ValueError(f"revision: expected an id on the hub with it, got {str(model)!r}")
        return Path(model)
    folder = _download(model, _DESCRIPTIONS, revision)
    if not has_weights:
        return folder
    return _download(model, _DESCRIPTIONS + weight_files(folder, only), revision)


def _exists(path: str | Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # a name that no file can have, or no permission
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"model: {shown(str(path))}: {reason}") from None
    return True


def _download(model: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=patterns, revision=revision))
    except Exception as error:  # of the hub's client, its network library or the file system
        raise CheckpointError(
            f"{model}: no such path here, and from the Hugging Face hub: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "its owner gives it out on request only; ask there, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "no such repository, or a private one"
    if isinstance(error, RevisionNotFoundError):
        return "no such revision of it"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached, and its cache does not hold the whole model"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
