"""The sizes that the steps of an engine can have, and the choice among them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.config import EngineConfig
from hybridspec.engine.graphs import StepGraphs, ladder
from hybridspec.engine.measure import measure_costs
from hybridspec.engine.prompt_graphs import ROWS as PROMPT_ROWS
from hybridspec.ops.sampling import SamplingUses
from hybridspec.runtime import Allocator, to_device
from hybridspec.speculate import (
    AcceptanceModel,
    Asks,
    Decoder,
    DynamicPolicy,
    FixedPolicy,
    LearntCosts,
    Policy,
    row_budgets,
)

__all__ = [
    "capture_steps",
    "first_calibration",
    "make_policy",
    "row_counts",
    "step_sizes",
    "tell_calibration",
]

MOST_CAPTURED = 256  # requests of the largest captured step
MOST_TUNED = 1024  # rows of prompts; torch multiplies more of them well


def step_sizes(allocator: Allocator, config: EngineConfig) -> dict[int, list[int]]:
    """Return the sizes of captured steps: numbers of rows, rising, by numbers of requests.

    Args:
        allocator: has so many slots.
        config: the resolved options.
    """
    fixed = FixedPolicy(config.draft_tokens, config.verify_rows)
    sizes = {}
    for count in ladder(min(allocator.max_slots, MOST_CAPTURED)):
        largest = fixed.choose(count).rows
        smaller = row_budgets(count, config.draft_tokens) if config.is_dynamic else []
        sizes[count] = [*(rows for rows in smaller if rows < largest), largest]
    return sizes


def row_counts(sizes: dict[int, list[int]], config: EngineConfig) -> list[int]:
    """Return the numbers of rows, rising, that captured forwards of some hundred rows have.

    Args:
        sizes: of captured steps; drafts take one row for each request.
        config: the resolved options.
    """
    most = config.max_num_batched_tokens
    assert most is not None  # resolved
    found = {rows for rows in PROMPT_ROWS if rows <= min(most, MOST_TUNED)}
    found |= {rows for budgets in sizes.values() for rows in budgets}
    return sorted(found | (set(sizes) if config.draft_tokens else set()))


def capture_steps(
    decoder: Decoder, allocator: Allocator, sizes: dict[int, list[int]], config: EngineConfig
) -> StepGraphs:
    """Capture steps of all sizes that a policy of this resolved config may choose."""
    most = config.draft_tokens
    return StepGraphs(
        decoder,
        allocator,
        sizes,
        drafts=range(most + 1) if config.is_dynamic else [most],
        asks=Asks(uses=SamplingUses.everything(), has_confidences=config.needs_confidences),
    )


def make_policy(config: EngineConfig, graphs: StepGraphs | None) -> Policy:
    """Return who chooses the sizes of steps, knowing what captured ones cost.

    Args:
        config: the resolved options.
        graphs: captured steps, which are timed here, with no slot in use; None: costs are learnt
            from the steps that run.
    """
    if not config.is_dynamic:
        return FixedPolicy(config.draft_tokens, config.verify_rows)
    costs = LearntCosts(config.draft_tokens) if graphs is None else measure_costs(graphs)
    return DynamicPolicy(config.draft_tokens, costs, config.verify_rows)


def first_calibration(config: EngineConfig, device: torch.device) -> Tensor | None:
    """Return what `Decoder.calibration` is before anything was learnt."""
    if not config.is_dynamic:
        return None
    return AcceptanceModel(config.draft_tokens).table().to(device)


def tell_calibration(policy: Policy, calibration: Tensor | None) -> None:
    """Let the steps to come choose rows by what a policy has learnt; nothing is waited for."""
    if isinstance(policy, DynamicPolicy) and calibration is not None and policy.has_news():
        calibration.copy_(to_device(policy.table, calibration.device), non_blocking=True)
