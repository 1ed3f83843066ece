"""Many requests under one row budget: what confidence-chosen rows commit, and that tokens stay.

Decodes the same held-out prompts in one batch three times: plainly, with every draft verified, and
with the most probable drafts within the budget. Counts rows, not seconds: what a row costs depends
on the device and on the load. With `--attention-backend fa3` the first run attends over pages, with
the Triton kernel, and the others have caches as FlashAttention-3 wants them; a request may part
from the plain run where two tokens nearly tie, which is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hybridspec import LLM, RequestOutput, SamplingParams
from hybridspec.bundled import held_out_prompts

# Natural logarithms; a unit of bf16 at logits between 16 and 32.
NEAR_TIE = 0.125


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
    parser.add_argument("--attention-backend", choices=["auto", "fa3"], default="auto")
    args = parser.parse_args()
    if args.attention_backend == "fa3":  # which knows 16 bits only, and gaps are of greedy tokens
        args.dtype, args.temperature = "bfloat16", 0.0
    return args


def variants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Engine options of the runs, the one that the others are compared with first."""
    common = {"device": args.device, "dtype": args.dtype, "max_model_len": 1024}
    every, chosen = (
        {**common, "draft_tokens": args.draft_tokens, "verify_rows": rows}
        for rows in (None, args.verify_rows)
    )
    plain = {**common, "draft_tokens": 0}
    if args.attention_backend == "auto":
        return {"plain": plain, "every draft": every, "chosen drafts": chosen}
    fa3 = {"kv_layout": "contiguous", "attention_backend": "fa3"}
    return {
        "plain, pages": plain,
        "plain, fa3": {**plain, **fa3},
        "every draft, fa3": {**every, **fa3},
        "chosen drafts, fa3": {**chosen, **fa3},
    }


def gap_at(plain: LLM, right: RequestOutput, mine: RequestOutput) -> float:
    """How much more likely the plain run's token is where two greedy texts part."""
    a, b = right.outputs[0].token_ids, mine.outputs[0].token_ids
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    ids = [*right.prompt_token_ids, *a[:first]]
    [output] = plain.generate(prompt_token_ids=ids, sampling_params=params)[0].outputs
    assert output.logprobs is not None
    return abs(output.logprobs[0][a[first]].logprob - output.logprobs[0][b[first]].logprob)


def main() -> int:
    args = arguments()
    prompts = [prompt.text for prompt in held_out_prompts("code")[: args.requests]]
    params = [
        SamplingParams(
            temperature=args.temperature, seed=seed, max_tokens=args.max_tokens, ignore_eos=True
        )
        for seed in range(len(prompts))
    ]
    plain: LLM | None = None
    expected: list[RequestOutput] = []
    summary: dict[str, dict[str, Any]] = {}
    num_ties = 0
    for name, chosen in variants(args).items():
        llm = LLM("bundled", memory_fraction=0.5, **chosen)
        results = llm.generate(prompts, params)
        plain, expected = plain or llm, expected or results
        parted = [
            (right, mine)
            for right, mine in zip(expected, results, strict=True)
            if right.outputs[0].token_ids != mine.outputs[0].token_ids
        ]
        is_greedy = args.temperature == 0
        gaps = [gap_at(plain, *pair) for pair in parted] if is_greedy else []
        bound = 0.0 if args.attention_backend == "auto" else NEAR_TIE
        if len(gaps) < len(parted) or max(gaps, default=0.0) > bound:
            print(
                f"{name}: {len(parted)} requests differ from plain decoding, gaps {gaps}",
                file=sys.stderr,
            )
            return 1
        num_ties += len(gaps)
        usage = Usage.of(results)
        summary[name] = {
            "rows": usage.rows,
            "committed_per_row": usage.committed / usage.rows,
            "is_captured": llm._engine.runner.graphs is not None,
            "attention": llm.describe().backends["paged_attention"][0],
            "near_ties": gaps,
        }
        spread = ", ".join(f"{n}: {c}" for n, c in sorted(usage.rows_per_request.items()))
        print(
            f"{llm.config.device} {name:<19}{usage.rows:6d} rows, "
            f"{usage.committed / usage.rows:.2f} tokens per row; requests by rows  {spread}"
        )
    if args.attention_backend == "auto":
        print(f"tokens identical in {len(prompts)} requests")
    else:
        print(f"tokens of {len(prompts)} requests are those over pages, {num_ties} near-ties aside")
    print(json.dumps({"benchmark": "dynamic_verify", **vars(args), "variants": summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
