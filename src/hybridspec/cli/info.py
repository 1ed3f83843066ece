"""`hybridspec info`: what a model is, what it runs on, and what a request takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hybridspec.cli import loading
from hybridspec.cli.render import (
    DUMMY_WEIGHTS,
    PlainConsole,
    amount,
    drafter_name,
    drafting,
    percent,
    synthetic,
)

if TYPE_CHECKING:
    from hybridspec.engine import EngineInfo
    from hybridspec.models import ModelConfig
    from hybridspec.speculate import CostTable

__all__ = ["as_json", "run", "sections"]

_NAME_WIDTH = 31
_RINGS = {"u": "corrections", "raw": "rows as they came; corrections are recomputed"}
_SHOWN_SIZES = (1, 8, 32, 128, 256)  # requests whose steps' costs are printed
_SIZED = {"fixed": "", "off": "", "dynamic": " at most, as many as pay"}
_LAYOUTS = {"paged": "paged", "contiguous": "contiguous, the longest request in every slot"}


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    info = loading.open_engine(arguments).describe()
    if arguments.json:
        print(json.dumps(as_json(info), allow_nan=False))
        return 0
    console = PlainConsole()
    for index, (title, rows) in enumerate(sections(info).items()):
        if index:
            console.print()
        console.print(title, style="bold")
        for name, value in rows:
            _print_row(console, name, value)
    return 0


def _print_row(console: PlainConsole, name: str, value: str) -> None:
    """Print a fact; in a terminal, what does not fit in its line stands below the value."""
    width = max(console.width - _NAME_WIDTH, 16) if console.is_terminal else len(value) + 1
    for part in Text(value).wrap(console, width):
        part.rstrip()
        line = Text("  ").append(f"{name:<{_NAME_WIDTH - 2}}", "dim").append(part)
        console.print(line, soft_wrap=True)
        name = ""


def sections(info: EngineInfo) -> dict[str, list[tuple[str, str]]]:
    """Return the facts by section, as names and values."""
    return {
        "model": _model_rows(info),
        "engine": _engine_rows(info),
        **({"sizes of steps": _policy_rows(info)} if info.config.is_dynamic else {}),
        "backends": [(op, f"{name}: {reason}") for op, (name, reason) in info.backends.items()],
        "memory of a request": _memory_rows(info),
    }


def _model_rows(info: EngineInfo) -> list[tuple[str, str]]:
    model, gdn = info.model_config, info.model_config.gdn
    num_gdn = model.layer_kinds.count("gdn")
    rows = [("folder", info.model)]
    if info.config.dummy_weights:
        rows.append(("weights", DUMMY_WEIGHTS))
    return [
        *rows,
        ("type", f"{model.model_type}, {info.num_parameters:,} parameters"),
        (
            "layers",
            f"{model.num_layers}: {num_gdn} Gated DeltaNet, {model.num_layers - num_gdn} attention",
        ),
        ("hidden, feed-forward", f"{model.hidden_size}, {_feed_forward(model)}"),
        (
            "Gated DeltaNet",
            f"{gdn.num_key_heads} key heads of {gdn.key_dim}, {gdn.num_value_heads} value heads "
            f"of {gdn.value_dim}, convolution of {gdn.conv_width}",
        ),
        (
            "attention",
            f"{model.num_attention_heads} heads, {model.num_kv_heads} of keys and values, "
            f"of {model.head_dim}",
        ),
        ("vocabulary, context", f"{model.vocab_size:,}, {model.max_positions:,} tokens"),
        ("draft head", "MTP" if info.has_mtp else "none (--mtp-from takes one from elsewhere)"),
    ]


def _feed_forward(model: ModelConfig) -> str:
    moe = model.moe
    if moe is None:
        return str(model.ffn_size)
    text = (
        f"{moe.experts_per_token} of {moe.num_experts} experts of {moe.expert_ffn_size} and "
        f"{moe.shared_ffn_size} shared"
    )
    dense = len(moe.dense_layers)
    return text + (f"; {model.ffn_size} without experts (layers: {dense})" if dense else "")


def _engine_rows(info: EngineInfo) -> list[tuple[str, str]]:
    config = info.config
    label = synthetic(config)
    return [
        *([] if label is None else [("acceptance", label)]),
        ("device", config.device),
        ("dtype", f"{config.dtype}, recurrent state {config.state_dtype}"),
        ("rings", _RINGS[config.ring]),
        ("draft tokens", f"{config.draft_tokens} a step{_SIZED[config.speculation]}"),
        ("drafter", drafter_name(config)),
        ("longest request", f"{config.max_model_len:,} tokens"),
        ("keys and values", _LAYOUTS[config.kv_layout]),
        ("exact", info.exactness),
    ]


def _policy_rows(info: EngineInfo) -> list[tuple[str, str]]:
    """What captured steps cost, and what the policy expected of those that ran."""
    costs, seen = info.step_costs, info.policy
    rows = [("costs", "learnt from the steps that run")] if costs is None else _cost_rows(costs)
    if seen.steps:
        rows += [
            ("steps", f"{seen.steps:,}, {seen.probes:,} of them to find out"),
            ("tokens", f"{seen.committed:,}, expected {seen.expected_tokens:,.0f}"),
            ("seconds", f"{seen.seconds:.2f}, expected {seen.expected_s:.2f}"),
            ("accepted by position", "  ".join(map(percent, seen.acceptance))),
        ]
    return rows


def _cost_rows(costs: CostTable) -> list[tuple[str, str]]:
    rows = []
    for size in costs.sizes_of(_SHOWN_SIZES):
        verify = ", ".join(f"{n} rows {1e3 * s:.2f}" for n, s in costs.verify[size].items())
        draft = ", ".join(f"{1e3 * s:.2f}" for s in costs.draft[size][1:])
        rows.append((_count(size, "request"), f"{verify} ms; drafts {draft} ms"))
    return rows


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _memory_rows(info: EngineInfo) -> list[tuple[str, str]]:
    length = info.config.max_model_len
    assert length is not None
    kv, fixed = info.kv_bytes_per_token, sum(info.request_bytes.values())
    is_contiguous = info.config.kv_layout == "contiguous"
    where = "whatever the length" if is_contiguous else f"at {length:,} tokens"
    rows = [(name, amount(size)) for name, size in info.request_bytes.items()]
    rows += [
        ("keys and values", f"{amount(kv)} a token, {amount(kv * length)} {where}"),
        ("together", f"{amount(fixed)} and keys and values"),
    ]
    if info.config.draft_tokens:
        rows.append(("with state snapshots", f"{amount(info.snapshot_bytes)} and keys and values"))
    if info.counters.num_states:
        rows.append(("prefixes kept", f"at most {info.counters.num_states}, {amount(fixed)} each"))
    rows.append(("requests that fit", f"{info.num_requests_fit:,} of {length:,} tokens"))
    return rows


def as_json(info: EngineInfo) -> dict[str, Any]:
    """Return the same facts as one JSON object."""
    model, gdn, config = info.model_config, info.model_config.gdn, info.config
    return {
        "model": info.model,
        "model_type": model.model_type,
        "num_parameters": info.num_parameters,
        "layer_kinds": list(model.layer_kinds),
        "hidden_size": model.hidden_size,
        "ffn_size": model.ffn_size,
        "moe": None if model.moe is None else dataclasses.asdict(model.moe),
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "gdn": {
            "num_key_heads": gdn.num_key_heads,
            "num_value_heads": gdn.num_value_heads,
            "key_dim": gdn.key_dim,
            "value_dim": gdn.value_dim,
            "conv_width": gdn.conv_width,
        },
        "attention": {
            "num_heads": model.num_attention_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
        },
        "has_mtp": info.has_mtp,
        "device": config.device,
        "dtype": config.dtype,
        "state_dtype": config.state_dtype,
        "ring": config.ring,
        **drafting(config),
        "policy": dataclasses.asdict(info.policy),
        "step_costs": None if info.step_costs is None else info.step_costs.as_dict(),
        "max_model_len": config.max_model_len,
        "kv_layout": config.kv_layout,
        "attention_backend": config.attention_backend,
        "exact": config.exact,
        "backends": {
            op: {"name": name, "reason": reason} for op, (name, reason) in info.backends.items()
        },
        "request_bytes": info.request_bytes,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "snapshot_bytes": info.snapshot_bytes,
        "num_requests_fit": info.num_requests_fit,
        "num_prefix_states": info.counters.num_states,
    }
