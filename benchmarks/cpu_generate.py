"""Plain, speculative and transformers' decoding of the bundled model on a CPU, interleaved.

Every variant continues the same held-out code prompts greedily; the outputs must be equal before
anything is timed. Times are wall clock around the whole call, prefill included. The figures that
count are the ratios of one round, taken over all prompts; the median over rounds is reported.

    python benchmarks/cpu_generate.py --json benchmarks/results/cpu_generate.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hybridspec
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import bundled_model_path, held_out_prompts
from measured_commit import measured_commit

Generate = Callable[[list[int]], list[int]]


def transformers_generate(max_tokens: int) -> Generate:
    """Greedy generate of transformers on the same folder, fp32."""
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError:
        raise SystemExit(
            "needs transformers (pip install transformers), or --no-transformers"
        ) from None

    model = AutoModelForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32).eval()

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return generate


def engine_generate(draft_tokens: int, max_tokens: int) -> tuple[LLM, Generate]:
    """Greedy generate of this engine."""
    llm = LLM("bundled", draft_tokens=draft_tokens, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(prompt: list[int]) -> list[int]:
        [result] = llm.generate(prompt_token_ids=prompt, sampling_params=params)
        return result.outputs[0].token_ids

    return llm, generate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="held-out code prompts (default 8)")
    parser.add_argument("--max-tokens", type=int, default=200, help="new tokens (default 200)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="drafts a step (default 3)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    plain_llm, plain = engine_generate(0, args.max_tokens)
    spec_llm, speculative = engine_generate(args.draft_tokens, args.max_tokens)
    variants = {"plain": plain, "speculative": speculative}
    if not args.no_transformers:
        variants["transformers"] = transformers_generate(args.max_tokens)
    texts = [prompt.text for prompt in held_out_prompts("code")[: args.prompts]]
    prompts = [plain_llm.tokenizer.encode(text) for text in texts]

    expected = [plain(prompt) for prompt in prompts]  # also the warm-up
    for name, generate in variants.items():
        if [generate(prompt) for prompt in prompts] != expected:
            print(f"{name}: tokens differ from plain decoding; nothing is timed", file=sys.stderr)
            return 1
    stats = spec_llm.generate(
        prompt_token_ids=prompts,
        sampling_params=SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True),
    )
    steps = [count for result in stats for count in result.stats.committed_per_step]

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(args.rounds):
        totals = dict.fromkeys(variants, 0.0)
        for prompt in prompts:  # interleaved prompt by prompt, so that noise hits all alike
            for name, generate in variants.items():
                start = time.perf_counter()
                generate(prompt)
                totals[name] += time.perf_counter() - start
        for name, total in totals.items():
            seconds[name].append(total)
        print(f"round {round_index + 1}/{args.rounds}", file=sys.stderr)

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True))

    tokens = args.max_tokens * len(prompts)
    result = {
        "benchmark": "cpu_generate",
        "hybridspec": hybridspec.__version__,
        "commit": measured_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": args.threads,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": args.max_tokens,
        "draft_tokens": args.draft_tokens,
        "rounds": args.rounds,
        "committed_per_step": sum(steps) / len(steps),
        "tokens_per_second": {
            name: tokens / statistics.median(values) for name, values in seconds.items()
        },
        "speculative_over_plain": ratio("plain", "speculative"),
    }
    if "transformers" in variants:
        import transformers

        result["transformers"] = transformers.__version__
        result["plain_over_transformers"] = ratio("transformers", "plain")
    for name, rate in result["tokens_per_second"].items():
        print(f"{name:<14}{rate:8.1f} tokens/s")
    print(f"tokens committed per step {result['committed_per_step']:.2f}")
    print(f"speculative / plain       {result['speculative_over_plain']:.2f}x")
    if "transformers" in variants:
        print(f"plain / transformers      {result['plain_over_transformers']:.2f}x")
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
