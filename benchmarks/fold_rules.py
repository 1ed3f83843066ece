"""Count the folds of a step under different rules for folding early; needs no GPU.

256 requests are admitted together and decode. For each rule and pattern of acceptance:
the share of them that folds in a step (median, 99th percentile, largest) and the folds beyond those
of the rule that folds full windows only. `decide_folds` is the operator itself.

    python benchmarks/fold_rules.py --json benchmarks/results/fold_rules_cpu.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hybridspec.ops.ring import decide_folds
from measured_commit import measured_commit

REQUESTS, WINDOW, RING = 256, 16, 32
SLOTS = torch.arange(REQUESTS, dtype=torch.int32)
MIXED = torch.tensor([1, 2, 3, 4, 4, 5, 6, 7], dtype=torch.int32).repeat(REQUESTS // 8)

# history_len, ring_start, num_verify_tokens -> is_fold
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
# generator -> (num_verify_tokens, num_committed)
Pattern = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def by_operator(*, is_staggered: bool) -> Rule:
    """Return what `decide_folds` says."""

    def rule(history_len: Tensor, ring_start: Tensor, rows: Tensor) -> Tensor:
        is_fold = torch.empty(REQUESTS, dtype=torch.int8)
        decide_folds(
            history_len, SLOTS, rows, is_fold, max_window=WINDOW,
            ring_start=ring_start if is_staggered else None,
        )  # fmt: skip
        return is_fold.bool()

    return rule


def by_lower_threshold(history_len: Tensor, ring_start: Tensor, rows: Tensor) -> Tensor:
    """Lower the threshold of the first window by 7 slot mod W: rows count, so the bins differ."""
    is_first = (ring_start == 0) & (history_len > 0)
    return is_first & (history_len + rows > WINDOW - SLOTS * 7 % WINDOW)


def by_random_length(history_len: Tensor, ring_start: Tensor, rows: Tensor) -> Tensor:
    """Fold every window at a length of 9 to 16 that is drawn from slot and window."""
    drawn = (SLOTS.long() * 40503 + ring_start.long() * 12345) * 2654435761 >> 7
    return history_len >= 9 + drawn % 8


def by_budget(least: int) -> Rule:
    """Fold a quarter of the requests in every step, the fullest windows of `least` rows first."""

    def rule(history_len: Tensor, ring_start: Tensor, rows: Tensor) -> Tensor:
        is_full = history_len + rows > WINDOW
        wanted = max(0, REQUESTS // 4 - int(is_full.sum()))
        order = torch.where(is_full | (history_len < least), 0, history_len)
        fullest = order.sort(descending=True, stable=True).indices[:wanted]
        chosen = torch.zeros(REQUESTS, dtype=torch.bool)
        chosen[fullest] = order[fullest] > 0
        return chosen

    return rule


RULES: dict[str, Rule] = {
    "full windows only": by_operator(is_staggered=False),
    "first window by slot (decide_folds)": by_operator(is_staggered=True),
    "first window, threshold less 7 slot mod 16": by_lower_threshold,
    "every window at a random length": by_random_length,
    "a quarter of the batch, fullest first": by_budget(1),
    "the same, from 8 rows on": by_budget(8),
}


def fixed(num_rows: int, num_committed: int) -> Pattern:
    """Every request verifies and commits the same number of rows in every step."""
    both = [torch.full((REQUESTS,), n, dtype=torch.int32) for n in (num_rows, num_committed)]
    return lambda generator: (both[0], both[1])


def drawn(rows: Tensor | int, acceptance: float) -> Pattern:
    """Each draft is accepted with this probability, where those before it are."""
    sizes = torch.as_tensor(rows, dtype=torch.int32).expand(REQUESTS).contiguous()

    def pattern(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        is_right = torch.rand(REQUESTS, 7, generator=generator) < acceptance
        num_accepted = is_right.int().cumprod(1).sum(1, dtype=torch.int32)
        return sizes, 1 + num_accepted.minimum(sizes - 1)

    return pattern


def any_number(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four rows, of which one to four are committed, all numbers equally often."""
    committed = torch.randint(1, 5, (REQUESTS,), generator=generator, dtype=torch.int32)
    return torch.full_like(committed, 4), committed


PATTERNS: dict[str, Pattern] = {
    "T = 4, all accepted": fixed(4, 4),
    "T = 4, none accepted": fixed(4, 1),
    "T = 4, always 2 committed": fixed(4, 2),
    "T = 4, always 3 committed": fixed(4, 3),
    "T = 4, 1 to 4 committed": any_number,
    "T = 4, 0.9 per draft": drawn(4, 0.9),
    "T = 1": fixed(1, 1),
    "T = 8, all accepted": fixed(8, 8),
    "T = 8, 0.9 per draft": drawn(8, 0.9),
    "T mixed, 0.8 per draft": drawn(MIXED, 0.8),
}


def simulate(rule: Rule, pattern: Pattern, steps: int) -> tuple[Tensor, int]:
    """Return the share of requests that folds in each step, and the tokens of all steps."""
    generator = torch.Generator().manual_seed(0)
    history_len, ring_start = torch.zeros_like(SLOTS), torch.zeros_like(SLOTS)
    shares, num_tokens = [], 0
    for _ in range(steps):
        rows, committed = pattern(generator)
        is_fold = rule(history_len, ring_start, rows) | (history_len + rows > WINDOW)
        ring_start = torch.where(is_fold, (ring_start + history_len) % RING, ring_start)
        history_len = torch.where(is_fold, 0, history_len) + committed
        shares.append(is_fold.float().mean())
        num_tokens += int(committed.sum())
    return torch.stack(shares), num_tokens


def main() -> None:
    """Run all rules on all patterns; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default 400)")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    rows = []
    for pattern_name, pattern in PATTERNS.items():
        print(pattern_name)
        forced = 0.0
        for name, rule in RULES.items():
            shares, num_tokens = simulate(rule, pattern, options.steps)
            per_token = float(shares.sum()) * REQUESTS / num_tokens
            forced = forced or per_token
            extra = per_token / forced - 1 if forced else 0.0  # no window was full
            row = {
                "pattern": pattern_name,
                "rule": name,
                "p50": round(float(shares.quantile(0.5)), 3),
                "p99": round(float(shares.quantile(0.99)), 3),
                "max": round(float(shares.max()), 3),
                "folds_per_token": round(per_token, 4),
                "extra_folds": round(extra, 4),
            }
            rows.append(row)
            print(
                f"  {name:44} p50 {row['p50']:.3f}  p99 {row['p99']:.3f}  max {row['max']:.3f}  "
                f"extra {row['extra_folds']:+.1%}"
            )
    result = {
        "commit": measured_commit(), "torch": torch.__version__, "requests": REQUESTS,
        "steps": options.steps, "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
