"""How much memory loading takes beside the model itself, measured in a process of its own.

The kernel's own high-water mark of resident memory is read (VmHWM), which counts pages of mapped
files too, once they are touched. `ru_maxrss` would count the parent's memory at the fork as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny_checkpoints import build_tiny_checkpoint

# Loads a tiny model first, which takes what the first load of any size needs.
MEASURE = """
import sys
import torch
from hybridspec.models import load_model

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

load_model(sys.argv[1])
before = resident("VmRSS")
{before_loading}
model = load_model(sys.argv[2], dtype=getattr(torch, sys.argv[3]))
print(before, resident("VmHWM"), model.num_parameters)
"""
WHOLE_FILES = """
import pathlib
from safetensors.torch import load
files = [load(file.read_bytes()) for file in pathlib.Path(sys.argv[2]).glob("*.safetensors")]
"""
SIZES = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 5120}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny")).folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 110 million parameters in 16 bits, in two large files and one for the head."""
    folder = tmp_path_factory.mktemp("sharded")
    return build_tiny_checkpoint(folder, num_shards=2, dtype=torch.bfloat16, **SIZES).folder


def extra_bytes(tiny: Path, folder: Path, dtype: str, *, before_loading: str = "") -> int:
    """Return the most memory that loading took beyond what was there and the model."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.format(before_loading=before_loading)]
        + [str(tiny), str(folder), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, peak, num_parameters = map(int, done.stdout.split())
    return peak - before - num_parameters * getattr(torch, dtype).itemsize


def largest_shard(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_most_the_largest_shard_and_a_fifth(tiny: Path, sharded: Path, dtype: str) -> None:
    shard = largest_shard(sharded)
    assert shard > 80 << 20
    extra = extra_bytes(tiny, sharded, dtype)
    assert extra < 1.2 * shard, f"{extra / shard:.2f} of {shard >> 20} MiB"


def test_teeth_whole_files_are_seen(tiny: Path, sharded: Path) -> None:
    extra = extra_bytes(tiny, sharded, "bfloat16", before_loading=WHOLE_FILES)
    assert extra > 2 * largest_shard(sharded)
