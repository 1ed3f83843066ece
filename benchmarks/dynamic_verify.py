"""Many requests under one row budget: what confidence-chosen rows commit, and that tokens stay.

Decodes the same held-out prompts in one batch three times: plainly, with every draft verified, and
with the most probable drafts within the budget. Counts rows, not seconds: what a row costs depends
on the device and on the load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass

from hybridspec import LLM, RequestOutput, SamplingParams
from hybridspec.bundled import held_out_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Rows that a batch verified and tokens that they committed."""

    rows: int
    committed: int
    rows_per_request: Counter[int]

    @classmethod
    def of(cls, results: list[RequestOutput]) -> Usage:
        drafted = [count for r in results for count in r.stats.drafted_per_step]
        return cls(
            rows=sum(drafted) + len(drafted),
            committed=sum(sum(r.stats.committed_per_step) for r in results),
            rows_per_request=Counter(count + 1 for count in drafted),
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="float32", help="of weights (default float32)")
    parser.add_argument("--requests", type=int, default=16, help="prompts at once (default 16)")
    parser.add_argument("--verify-rows", type=int, default=40, help="rows a step (default 40)")
    parser.add_argument("--draft-tokens", type=int, default=5, help="drafts each (default 5)")
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens (default 48)")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prompts = [prompt.text for prompt in held_out_prompts("code")[: args.requests]]
    params = [
        SamplingParams(
            temperature=args.temperature, seed=seed, max_tokens=args.max_tokens, ignore_eos=True
        )
        for seed in range(len(prompts))
    ]
    options = {
        "plain": {"draft_tokens": 0},
        "every draft": {"draft_tokens": args.draft_tokens},
        "chosen drafts": {
            "draft_tokens": args.draft_tokens,
            "verify_rows": args.verify_rows,
        },
    }
    expected: list[list[int]] | None = None
    summary = {}
    for name, chosen in options.items():
        llm = LLM("bundled", device=args.device, dtype=args.dtype, **chosen)
        results = llm.generate(prompts, params)
        tokens = [result.outputs[0].token_ids for result in results]
        expected = tokens if expected is None else expected
        if tokens != expected:
            different = sum(a != b for a, b in zip(tokens, expected, strict=True))
            print(f"{name}: {different} requests differ from plain decoding", file=sys.stderr)
            return 1
        usage = Usage.of(results)
        summary[name] = {"rows": usage.rows, "committed_per_row": usage.committed / usage.rows}
        spread = ", ".join(f"{n}: {c}" for n, c in sorted(usage.rows_per_request.items()))
        print(
            f"{llm.config.device} {name:<14}{usage.rows:6d} rows, "
            f"{usage.committed / usage.rows:.2f} tokens per row; requests by rows  {spread}"
        )
    print(f"tokens identical in {len(prompts)} requests")
    print(json.dumps({"benchmark": "dynamic_verify", **vars(args), "variants": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
