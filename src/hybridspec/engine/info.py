"""What an engine runs on and what a request costs in it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from hybridspec.config import EngineConfig
from hybridspec.engine.counters import Counters
from hybridspec.engine.engine import Engine
from hybridspec.engine.exactness import describe_exactness
from hybridspec.engine.memory import available_bytes
from hybridspec.models import ModelConfig
from hybridspec.speculate import CostTable, DynamicPolicy, PolicyReport

__all__ = ["EngineInfo", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine runs on and what a request costs in it.

    Attributes:
        model: folder that was loaded.
        config: options, every "auto" resolved.
        model_config: sizes of the model.
        num_parameters: weights on the device, the draft head's included.
        has_mtp: whether the checkpoint holds a draft head.
        backends: per op, the backend in use and why.
        request_bytes: per kind of memory, bytes that one request holds whatever its length.
        kv_bytes_per_token: bytes of keys, values and ids that each of its tokens adds.
        snapshot_bytes: recurrent states that one request would need with a snapshot per verified
            row (draft_tokens + 1 of them), which is what `request_bytes` replaces.
        num_requests_fit: requests of max_model_len tokens that fit the memory.
        counters: what it holds and has done.
        policy: what the policy that sizes steps expected so far, and what happened.
        step_costs: measured seconds of captured steps; None where costs are learnt, or not asked.
    """

    model: str
    config: EngineConfig
    model_config: ModelConfig
    num_parameters: int
    has_mtp: bool
    backends: dict[str, tuple[str, str]]
    request_bytes: dict[str, int]
    kv_bytes_per_token: int
    snapshot_bytes: int
    num_requests_fit: int
    counters: Counters
    policy: PolicyReport = field(default_factory=PolicyReport)
    step_costs: CostTable | None = None

    @property
    def exactness(self) -> str:
        """What drafts, batch and load do not change, and by what means."""
        return describe_exactness(self.config)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values that a request of so many tokens keeps others from using."""
        if self.config.kv_layout == "contiguous":
            assert self.config.max_model_len is not None
            num_tokens = self.config.max_model_len
        return num_tokens * self.kv_bytes_per_token


def describe(engine: Engine) -> EngineInfo:
    """Return what an engine runs on and what a request costs."""
    pools, specs = engine.pools, engine.pools.specs
    kv_per_token = specs.token_bytes()
    max_len = engine.config.max_model_len
    assert max_len is not None
    whole = specs.request_bytes() + kv_per_token * max_len
    if pools.device.type == "cuda":
        fit = min(
            engine.allocator.max_slots, pools.num_pages // engine.allocator.pages_for(max_len)
        )
    else:
        fit = min(engine.allocator.max_slots, available_bytes(pools.device) // whole)
    policy = engine.runner.policy
    costs = policy.costs if isinstance(policy, DynamicPolicy) else None
    return EngineInfo(
        model=str(engine.folder),
        config=engine.config,
        model_config=engine.model.config,
        num_parameters=engine.model.num_parameters,
        has_mtp=engine.model.mtp is not None,
        backends=engine.resolved.backends,
        request_bytes=specs.bytes_by_part(),
        kv_bytes_per_token=kv_per_token,
        snapshot_bytes=(engine.config.draft_tokens + 1) * specs.state_bytes(),
        num_requests_fit=fit,
        counters=engine.counters(),
        policy=copy.deepcopy(policy.report),
        step_costs=copy.deepcopy(costs) if isinstance(costs, CostTable) else None,
    )
