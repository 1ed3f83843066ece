"""Captured steps without a GPU: what a graph would replay is run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridspec.engine import capture, engine, measure

__all__ = ["capture_on_cpu", "record_by_rerunning"]


@dataclass
class Rerun:
    """Runs a function anew, as a graph replays it."""

    run: Callable[[], None]
    count: int = 0

    def replay(self) -> None:
        self.count += 1
        self.run()


def record_by_rerunning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let work be recorded without a GPU."""

    def record(run: Callable[[], None], pool: Any, device: torch.device) -> Rerun:
        run()
        return Rerun(run)

    monkeypatch.setattr(capture, "record", record)
    monkeypatch.setattr(capture, "free_bytes", lambda device: 0)
    monkeypatch.setattr(capture, "memory_pool", lambda device: None)


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Let engines on a CPU capture their steps and read the times from a function.

    Args:
        monkeypatch: puts everything back.
        seconds: of the launch that is timed next.
    """

    record_by_rerunning(monkeypatch)

    def timed(decoder: Any, launch: Callable[[], None]) -> float:
        launch()
        return seconds()

    monkeypatch.setattr(measure, "_seconds", timed)
    monkeypatch.setattr(engine.Engine, "_can_capture", lambda self, drafter: drafter is None)
