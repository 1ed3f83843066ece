"""Which commit a benchmark measured; needs no GPU and no Triton."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["measured_commit"]


def measured_commit() -> str:
    """Name the commit of this checkout, "-dirty" where files differ, "unknown" without git."""
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
