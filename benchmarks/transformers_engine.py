"""`generate` of transformers, with flash-linear-attention, on the same geometry and prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_transformers"]

_FEW = 4  # tokens of the run that is taken off, with its prompt


def run_transformers(
    folder: Path,
    batches: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
    show: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Time greedy decoding of each batch: a long run less a short one.

    Args:
        folder: with a config.json; the weights are made up.
        batches: prompts of each batch, all of one length.
        num_tokens: new tokens of the long run.
        show: called with each row.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rows = []
    for prompts in batches:
        ids = torch.tensor(prompts, device="cuda")

        def seconds(count: int, ids: torch.Tensor = ids) -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            return time.perf_counter() - started

        seconds(_FEW)
        taken = seconds(num_tokens) - seconds(_FEW)
        step_s = taken / (num_tokens - _FEW)
        rows.append(
            {
                "mode": "transformers",
                "requests": len(prompts),
                "tokens_per_s": len(prompts) / step_s,
                "step_ms": step_s * 1e3,
                "tokens_per_step": 1.0,
            }
        )
        show(rows[-1])
    return rows
