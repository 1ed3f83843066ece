"""How often the bundled model's drafts are right, by position and kind of text, greedy and sampled.

python benchmarks/acceptance.py --json benchmarks/results/acceptance_cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

import hybridspec
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import PROMPT_KINDS, held_out_prompts
from measured_commit import measured_commit

MOST_DRAFTS = 7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="of each kind (default 16)")
    parser.add_argument("--max-tokens", type=int, default=200, help="new tokens (default 200)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


def measure(llm: LLM, kind: str, temperature: float, args: argparse.Namespace) -> dict:
    """One row: acceptance by position, and committed tokens a step for each number of drafts."""
    prompts = [prompt.text for prompt in held_out_prompts(kind)[: args.prompts]]
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True
    )
    stats = [result.stats for result in llm.generate(prompts, params)]
    # A draft counts only behind right ones: the shares are of steps that got so far.
    verified = [n for one in stats for n in one.drafted_per_step]
    accepted = [n for one in stats for n in one.accepted_per_step]
    reached = [
        sum(a >= k for a in accepted) / max(sum(d >= k for d in verified), 1)
        for k in range(1, MOST_DRAFTS + 1)
    ]
    return {
        "kind": kind,
        "temperature": temperature,
        "steps": len(accepted),
        "accepted_up_to": reached,
        "committed_per_step": [1 + sum(reached[:k]) for k in range(MOST_DRAFTS + 1)],
    }


def main() -> int:
    args = arguments()
    llm = LLM("bundled", draft_tokens=MOST_DRAFTS, device="cpu")
    rows = [measure(llm, kind, heat, args) for kind in PROMPT_KINDS for heat in (0.0, 0.8)]
    for row in rows:
        shares = "  ".join(f"{share:4.0%}" for share in row["accepted_up_to"])
        print(f"{row['kind']:5} temperature {row['temperature']:.1f}  {shares}")
    line = json.dumps(
        {
            "benchmark": "acceptance",
            "hybridspec": hybridspec.__version__,
            "commit": measured_commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "prompts": args.prompts,
            "max_tokens": args.max_tokens,
            "rows": rows,
        }
    )
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
