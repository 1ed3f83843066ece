"""Captured steps without a GPU: what a graph would replay is run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridspec.engine import engine, graphs, measure

__all__ = ["capture_on_cpu"]


@dataclass(frozen=True)
class Rerun:
    """Runs a function anew, as a graph replays it."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Let engines on a CPU capture their steps and read the times from a function.

    Args:
        monkeypatch: puts everything back.
        seconds: of the launch that is timed next.
    """

    def capture(run: Callable[[], None], pool: Any, device: torch.device) -> Rerun:
        run()
        return Rerun(run)

    def timed(decoder: Any, launch: Callable[[], None]) -> float:
        launch()
        return seconds()

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_free_bytes", lambda device: 0)
    monkeypatch.setattr(graphs, "_memory_pool", lambda device: None)
    monkeypatch.setattr(measure, "_seconds", timed)
    monkeypatch.setattr(engine.Engine, "_can_capture", lambda self, drafter: drafter is None)
