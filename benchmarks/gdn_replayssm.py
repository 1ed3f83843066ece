"""Time ReplaySSM's Triton kernels for vLLM beside `hybridspec.compat.vllm`, in one run.

Both get the same tensors, laid out as the fork lays them out: `gdn_replayssm_spec_decode` with 4
rows a request, and `fused_recurrent_gated_delta_rule_replayssm` with one. The peer's files are not
part of this repository: FOLDER holds the fork, or of its package `vllm` the two files and what they
import. Each function is compared with fp64 on a few requests before it is timed; without a GPU,
which Triton's interpreter (TRITON_INTERPRET=1) then stands for, it is only compared.

    python benchmarks/gdn_replayssm.py --peer FOLDER \
        --json benchmarks/results/gdn_replayssm_h200.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_verify import BF16, CHECKED, GEOMETRIES, HEAD_DIM, TOLERANCES
from harness import (
    Timing,
    Variant,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.compat import vllm as compat

PEER = "vllm.model_executor.layers.fla.ops"
SPECULATIVE, SINGLE = "gdn_replayssm_spec_decode", "fused_recurrent_gated_delta_rule_replayssm"
MODULES = {SPECULATIVE: "gdn_replayssm_spec_decode", SINGLE: "fused_recurrent_replayssm"}
HEADS, VALUE_HEADS = GEOMETRIES["16/64"]
ROWS, HISTORY = 4, 12
# Windows of up to 16 rows, as `gdn_verify.py` has them: the fork marks those of 13 and more.
MAX_CACHE_LEN, FOLD_HISTORY, CAPACITY = 20, 13, 32
SINGLE_LENGTH = 16  # the fork's default; a token behind 15 rows folds
POOLS = ("state", "d_cache", "k_cache", "g_cache")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = BF16 if DEVICE == "cuda" else torch.float32  # the interpreter has no products in bf16


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    function: str
    batch: int
    share: float


class Step:
    """The arguments of a setting, and copies of what a step changes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        is_single = setting.function == SINGLE
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        batch, blocks = setting.batch, setting.batch + 1  # block 0 is padding's
        self.rows = 1 if is_single else ROWS
        capacity = SINGLE_LENGTH if is_single else CAPACITY
        width = 2 * HEADS * HEAD_DIM + VALUE_HEADS * HEAD_DIM
        num_rows = batch * self.rows
        folds = torch.randperm(batch, generator=self.generator, device=DEVICE)
        folds = folds[: round(batch * setting.share)]
        window = torch.full((batch,), HISTORY, dtype=torch.int32, device=DEVICE)
        window[folds] = SINGLE_LENGTH - 1 if is_single else FOLD_HISTORY
        order = torch.randperm(batch, generator=self.generator, device=DEVICE)
        self.blocks = (1 + order).to(torch.int32)
        keys = self.normal(blocks, HEADS, capacity, HEAD_DIM)
        decays = torch.rand(
            blocks, VALUE_HEADS, capacity, generator=self.generator, device=DEVICE
        )  # fmt: skip
        self.pools = {
            "state": self.normal(blocks, VALUE_HEADS, HEAD_DIM, HEAD_DIM).to(DTYPE),
            "d_cache": self.normal(blocks, VALUE_HEADS, capacity, HEAD_DIM).to(DTYPE),
            "k_cache": F.normalize(keys, dim=-1).to(DTYPE),
            "g_cache": -0.2 * decays,
        }
        self.pristine = {name: pool.clone() for name, pool in self.pools.items()}
        self.inputs: dict[str, Any] = {
            "mixed_qkv": self.normal(num_rows, width).to(DTYPE),
            "a": self.normal(num_rows, VALUE_HEADS).to(DTYPE),
            "b": self.normal(num_rows, VALUE_HEADS).to(DTYPE),
            "A_log": 0.3 * self.normal(VALUE_HEADS),
            "dt_bias": 0.3 * self.normal(VALUE_HEADS),
            "scale": HEAD_DIM**-0.5,
            "use_qk_l2norm_in_kernel": True,
            "ssm_state_indices": self.blocks,
        }
        sizes = (num_rows, 1) if is_single else (num_rows,)
        self.out = torch.empty(*sizes, VALUE_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        if is_single:
            self.inputs["write_pos"] = window
            return
        cursors = torch.zeros(2, blocks, dtype=torch.int32, device=DEVICE)
        cursors[0, self.blocks.long()] = window
        cursors[1] = torch.randint(
            0, capacity, (blocks,), generator=self.generator, device=DEVICE
        )  # fmt: skip
        marks = cursors[0] + 2 * ROWS > MAX_CACHE_LEN
        assert int(marks.sum()) == len(folds), "the benchmark does not fold as it says"
        self.inputs |= {
            "query_start_loc": ROWS * torch.arange(blocks, dtype=torch.int32, device=DEVICE),
            "write_pos": cursors[0],
            "cache_base": cursors[1],
            "is_flush": marks.to(torch.int8),
            "max_cache_len": MAX_CACHE_LEN,
            "max_spec_len": ROWS,
        }

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, device=DEVICE)

    def restore(self) -> None:
        """Put back what a step changes: rings, and states where some are folded."""
        for name, pool in self.pools.items():
            if name != "state" or self.setting.share:
                pool.copy_(self.pristine[name])

    def run(self, function: Callable[..., object]) -> None:
        """Call a function of either side, in place."""
        call(function, self.inputs, self.pools, self.out)

    def check(self, function: Callable[..., object], name: str) -> None:
        """Raise unless a few requests agree with fp64."""
        self.restore()
        self.out.fill_(torch.nan)
        self.run(function)
        index = torch.linspace(0, self.setting.batch - 1, CHECKED).long().unique()
        at = index.to(DEVICE)
        blocks = self.blocks[at].long()
        taken = (self.rows * at[:, None] + torch.arange(self.rows, device=DEVICE)).flatten()
        inputs = dict(self.inputs)
        inputs |= {name: inputs[name][taken] for name in ("mixed_qkv", "a", "b")}
        inputs["ssm_state_indices"] = 1 + torch.arange(len(at), dtype=torch.int32)
        if self.setting.function == SINGLE:
            inputs["write_pos"] = inputs["write_pos"][at]
        else:
            inputs["query_start_loc"] = ROWS * torch.arange(len(at) + 1, dtype=torch.int32)
            for cursor in ("write_pos", "cache_base", "is_flush"):
                inputs[cursor] = F.pad(inputs[cursor][blocks], (1, 0))
        inputs = {name: exact(value) for name, value in inputs.items()}
        pools = {
            name: exact(F.pad(pool[blocks], (0, 0) * (pool.dim() - 1) + (1, 0)))
            for name, pool in self.pristine.items()
        }
        out = torch.empty(len(taken), *self.out.shape[1:], dtype=torch.float64)
        call(getattr(compat, self.setting.function), inputs, pools, out)
        pairs = {"out": (self.out[taken], out)}
        pairs |= {part: (self.pools[part][blocks], pools[part][1:]) for part in POOLS}
        for part, (found, right) in pairs.items():
            if self.setting.function == SINGLE and part not in ("out", "state"):
                # Only ours also stores the token that fills a cache.
                found, right = found[:, :, :-1], right[:, :, :-1]
            error = float((found.double().cpu() - right).norm() / right.norm())
            if not error <= TOLERANCES[DTYPE]:
                raise AssertionError(f"{name}: {part} wrong by {error:.2e} in {self.setting}")


def call(
    function: Callable[..., object], inputs: dict[str, Any], pools: dict[str, Tensor], out: Tensor
) -> None:
    """Call either of the two functions."""
    state = "initial_state" if "max_cache_len" not in inputs else "checkpoint_state"
    caches = {name: pools[name] for name in POOLS[1:]}
    function(**inputs, **{state: pools["state"]}, **caches, out=out)


def exact(value: Any) -> Any:
    """Floating-point tensors in fp64, all of them on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def measure(setting: Setting, iterations: int) -> list[dict[str, Any]]:
    """Compare, then time both sides in one interleaved run."""
    step = Step(setting)
    module = importlib.import_module(f"{PEER}.{MODULES[setting.function]}")
    sides = {"hybridspec": compat, "ReplaySSM": module}
    functions = {name: getattr(side, setting.function) for name, side in sides.items()}
    for name, function in functions.items():
        step.check(function, name)
    if DEVICE == "cpu":
        return []
    pool, sink = step.pristine["state"], torch.empty(1, device=DEVICE)
    num_elements = pool[: setting.batch].numel()
    variants = [Variant("state read", lambda: read_pool(pool, num_elements, sink))]
    variants += [
        Variant(name, lambda function=function: step.run(function), step.restore)
        for name, function in functions.items()
    ]
    timings = time_interleaved(variants, iterations)
    return [row(setting, name, timings) for name in timings]


def row(setting: Setting, name: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """What is written of one side."""
    median = timings[name].median
    times = {part: round(value, 2) for part, value in vars(timings[name]).items()}
    return {
        **vars(setting),
        "variant": name,
        **times,
        "x_state_read": round(median / timings["state read"].median, 3),
        "x_replayssm": round(median / timings["ReplaySSM"].median, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="folder of the fork")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 256], help="requests")
    parser.add_argument("--share", type=float, nargs="+", default=[0.0, 0.4], help="that fold")
    parser.add_argument("--iters", type=int, default=60, help="replays (default 60)")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    sys.path.insert(0, str(options.peer))
    rows: list[dict[str, Any]] = []
    for function in (SPECULATIVE, SINGLE):
        for batch in options.batch:
            for share in options.share:
                for one in measure(Setting(function, batch, share), options.iters):
                    rows.append(one)
                    print(
                        f"{function} B {batch:4} {share:4.0%} {one['variant']:10} "
                        f"{one['median']:8.1f} us ({one['p20']:.1f}..{one['p80']:.1f}) "
                        f"{one['x_state_read']:6.3f} x read {one['x_replayssm']:6.3f} x ReplaySSM"
                    )
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
    if DEVICE == "cpu":
        print("both agree with fp64; nothing is timed without a GPU")
        return
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
