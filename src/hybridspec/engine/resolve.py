"""Everything that is decided before an engine is built: one function, one result.

What depends on the model is read from its config and the headers of its files. Only how many slots
and pages a GPU holds has to wait until the weights lie there (`memory.plan_pools`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridspec.bundled import bundled_model_path
from hybridspec.config import MAX_NUM_SEQS, EngineConfig
from hybridspec.engine.backends import Choices, choose_backends
from hybridspec.engine.exactness import ALIGNED_WINDOW, check_bitwise
from hybridspec.errors import UnsupportedError
from hybridspec.models import ModelConfig, find_model, read_facts
from hybridspec.models.hybrid import memory_specs
from hybridspec.models.layers import ATTENTION
from hybridspec.runtime import MemoryOptions, MemorySpecs

__all__ = ["Resolved", "model_folder", "resolve"]

_log = logging.getLogger("hybridspec")

PAGE_SIZE = 64  # tokens per KV page
CPU_NUM_SEQS = 64
SMALL_HIDDEN_SIZE = 512  # up to here a step is made of small operations, slower on two threads
INT8_KEY_DIMS = (64, 128)  # where the error of 8-bit states was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What an engine runs with.

    Attributes:
        config: the options, every "auto" and None resolved.
        model: sizes of the model.
        mtp_folder: where the draft head's weights come from, if not from the model's own files.
        tokenizer_folder: where the tokenizer comes from.
        dtype: of weights and activations.
        device: where everything lives.
        specs: what the layers keep of a request.
        page_size, max_pages_per_slot: of keys and values; where they are contiguous, a page holds
            a whole request.
        backends: of every op the implementation in use, and why.
    """

    config: EngineConfig
    model: ModelConfig
    mtp_folder: Path | None
    tokenizer_folder: Path
    dtype: torch.dtype
    device: torch.device
    specs: MemorySpecs
    page_size: int
    max_pages_per_slot: int
    backends: Choices


def model_folder(
    model: str | Path, *, only: str = "", has_weights: bool = True, revision: str | None = None
) -> Path:
    """Return the folder of a model: "bundled", a path, or an id on the Hugging Face hub.

    Args:
        model: which one.
        only: from the hub, download only files with tensors whose names start with this.
        has_weights: whether to download weights at all.
        revision: of a repository on the hub: branch, tag or commit.

    Raises:
        ValueError: if a revision comes with what is not on the hub.
        CheckpointError: if an id cannot be downloaded.
    """
    if model == "bundled":
        model = bundled_model_path()
    return find_model(model, only=only, has_weights=has_weights, revision=revision)


# Options of an engine that decodes plainly; what is about drafts means nothing there.
_NO_DRAFTS: dict[str, Any] = {
    "drafter": "none",
    "mtp_from": None,
    "draft_vocab": None,
    "draft_tokens": 0,
    "speculation": "off",
    "acceptance": None,
    "acceptance_spread": 0.0,
}
_PROMPT_ROWS = {"cpu": 2048, "cuda": 8192}  # of a forward pass


def resolve(folder: Path, config: EngineConfig, *, has_own_drafter: bool = False) -> Resolved:
    """Decide device, dtypes, lengths, drafter, threads, memories and backends.

    Args:
        folder: the model's.
        config: the options asked for.
        has_own_drafter: whether the caller brings a drafter, so that `config` names none.

    Raises:
        CheckpointError: if a folder is not what its config says.
        ValueError: if an option does not go with the machine or the model.
        UnsupportedError: if nothing serves what was asked for.
    """
    device = _device(config.device)
    model = ModelConfig.from_folder(folder)
    _check_sizes(model, config)
    mtp_folder = None
    if config.mtp_from is not None and config.draft_tokens > 0:
        mtp_folder = model_folder(config.mtp_from, only="mtp.")
    tokenizer_folder = folder
    if config.tokenizer is not None:
        tokenizer_folder = model_folder(config.tokenizer, has_weights=False)
    facts = read_facts(folder, mtp_from=mtp_folder, has_dummy_weights=config.dummy_weights)
    if not has_own_drafter:
        config = _with_drafter(config, has_mtp=facts.has_mtp, name=str(folder))
    dtype = facts.dtype_on(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    state_dtype = model.state_dtype
    if config.state_dtype != "auto":
        state_dtype = getattr(torch, config.state_dtype)
    max_len = model.max_positions if config.max_model_len is None else config.max_model_len
    page_size = max_len if config.kv_layout == "contiguous" else PAGE_SIZE
    max_pages = -(-max_len // page_size)
    options = _memory_options(config, model, device, dtype, state_dtype)
    specs = memory_specs(
        model,
        options,
        has_head=facts.has_mtp and config.drafter not in ("lookup", "none"),
    )
    backends = choose_backends(
        model,
        specs,
        device=device,
        page_size=page_size,
        max_pages_per_slot=max_pages,
        attention=config.attention_backend,
        max_verify_tokens=config.draft_tokens + 1,
        is_ordered=config.exact == "bitwise" and device.type != "cpu",
    )
    attention = backends[ATTENTION][0]
    return Resolved(
        config=replace(
            config,
            device=str(device),
            dtype=_name(dtype),
            state_dtype=_name(state_dtype),
            max_model_len=max_len,
            threads=_threads(config.threads, device, model.hidden_size),
            attention_backend="triton" if attention == "pieces" else attention,
            enable_prefix_caching=_reuses_prefixes(config),
            max_num_seqs=config.max_num_seqs or _most_requests(device),
            max_num_batched_tokens=config.max_num_batched_tokens or _PROMPT_ROWS[device.type],
        ),
        model=model,
        mtp_folder=mtp_folder,
        tokenizer_folder=tokenizer_folder,
        dtype=dtype,
        device=device,
        specs=specs,
        page_size=page_size,
        max_pages_per_slot=max_pages,
        backends=backends,
    )


def _memory_options(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> MemoryOptions:
    """Return what layers have to know to state their memories."""
    options = MemoryOptions(dtype=dtype, state_dtype=state_dtype)
    if config.exact == "bitwise":
        check_bitwise(config, device, state_dtype)
        return replace(options, max_window=ALIGNED_WINDOW, is_aligned=True)
    if config.ring == "raw":  # 16 rows for a window and the rows of a step
        longest = 16 - (config.draft_tokens + 1)
        return replace(options, is_raw=True, ring_capacity=16, max_window=longest)
    return options


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ValueError(f"device: torch sees no CUDA device here, got {name!r}")
        if int(index or 0) >= count:
            raise ValueError(
                f"device: expected one of the {count} CUDA devices that torch sees here, got "
                f"{name!r}"
            )
    return torch.device(name)


def _check_sizes(model: ModelConfig, config: EngineConfig) -> None:
    """Refuse options that do not go with a model's sizes, before any weight is looked at."""
    limit, key_dim = model.max_positions, model.gdn.key_dim
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len: expected at most the model's {limit}, got {config.max_model_len}"
        )
    if config.state_dtype == "int8" and config.ring == "raw":
        raise UnsupportedError("ring: 'raw' does not go with state_dtype 'int8'; use bfloat16")
    if config.state_dtype == "int8" and key_dim not in INT8_KEY_DIMS:
        sizes = " and ".join(map(str, INT8_KEY_DIMS))
        raise UnsupportedError(
            f"state_dtype: int8 was validated for key heads of {sizes} only, this model's have "
            f"{key_dim}; use bfloat16"
        )


def _with_drafter(config: EngineConfig, *, has_mtp: bool, name: str) -> EngineConfig:
    """Return the config with the drafter chosen, and without drafts where there is none."""
    drafter = config.drafter
    if config.draft_tokens == 0 or drafter == "none":
        return replace(config, **_NO_DRAFTS)
    if not has_mtp:
        if drafter == "mtp":
            raise ValueError(
                f"drafter: expected an MTP head (mtp.* tensors) for 'mtp', {name} has none; "
                f"take one from another checkpoint with mtp_from (--mtp-from)"
            )
        if drafter == "auto":
            drafter = "lookup"
            _log.warning(
                "%s has no MTP head (mtp.* tensors): drafting by prompt lookup; mtp_from "
                "(--mtp-from) takes a head from another checkpoint, drafter (--drafter) chooses",
                name,
            )
        if config.draft_vocab is not None:
            raise ValueError(f"draft_vocab: expected a model with a draft head, {name} has none")
    elif drafter == "auto":
        drafter = "mtp"
    origin = f" of {config.mtp_from or name}" if drafter == "mtp" else ""
    _log.info("drafter: %s%s", drafter, origin)
    return replace(config, drafter=drafter)


def _reuses_prefixes(config: EngineConfig) -> bool:
    """Whether prompts may begin with what was computed of others.

    Where a page holds a whole request none can be shared.
    """
    is_paged = config.kv_layout == "paged"
    if config.enable_prefix_caching and not is_paged:
        raise ValueError("enable_prefix_caching: True does not go with kv_layout 'contiguous'")
    return is_paged and config.enable_prefix_caching is not False


def _most_requests(device: torch.device) -> int:
    return CPU_NUM_SEQS if device.type == "cpu" else MAX_NUM_SEQS


def _threads(asked: int | None, device: torch.device, hidden_size: int) -> int | None:
    """Return torch's threads for a step: no more than there are cores, which would only wait."""
    if asked is None:
        if device.type != "cpu":
            return None
        return 1 if hidden_size <= SMALL_HIDDEN_SIZE else torch.get_num_threads()
    cores = num_cores()
    if asked > cores:
        _log.warning("threads: %d on %d cores, taking %d", asked, cores, cores)
        return cores
    return asked


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
