"""The bundled model on a device against a CPU: the same greedy tokens, or a counted near-tie.

In fp32 the tokens have to be the CPU's, with drafts and without. In 16 bits a text may go another
way where two tokens are nearly as likely: each such place is counted with its gap, the difference
of both tokens' log-probabilities there by the CPU in fp32, and the gap is bounded.

    python scripts/same_tokens.py --prompts 500 --device cuda
    python scripts/same_tokens.py --prompts 200 --device cuda --head 384 --prefix-caching
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts

MAX_LEN = 2048
GAP_BOUNDS = {"float32": 1e-4, "bfloat16": 0.3}  # natural logarithms


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--head", type=int, default=0, help="characters that prompts share")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtypes", nargs="+", choices=GAP_BOUNDS, default=list(GAP_BOUNDS))
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--cpu-tokens", type=Path, help="file with the CPU's tokens")
    parser.add_argument("--only-cpu", action="store_true", help="write that file, nothing else")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_prompts(count: int, head: int) -> list[str]:
    """Return different pieces of the held-out texts, each behind what its text begins with."""
    texts = [prompt.text for kind in ("code", "docs") for prompt in held_out_prompts(kind)]
    pieces = []
    for i in range(count):
        text, turn = texts[i % len(texts)], i // len(texts)
        start = 17 * turn
        pieces.append(text[:head] + text[start : start + 120 - 9 * (turn % 8)])
    return pieces


def generate(llm: LLM, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def cpu_tokens(args: argparse.Namespace, plain: LLM, prompts: Sequence[str]) -> list[list[int]]:
    """Decode all prompts on a CPU, or read what came of that before."""
    file = args.cpu_tokens
    if file is not None and file.exists():
        kept: dict[str, list[int]] = json.loads(file.read_text())
        return [kept[prompt][: args.max_tokens] for prompt in prompts]
    tokens = generate(plain, prompts, args.max_tokens)
    if file is not None:
        file.write_text(json.dumps(dict(zip(prompts, tokens, strict=True))))
    return tokens


def gap_at(plain: LLM, prompt: str, right: Sequence[int], mine: Sequence[int]) -> float:
    """How far apart the two tokens are where the texts part."""
    assert plain.tokenizer is not None
    first = next(i for i, (a, b) in enumerate(zip(right, mine, strict=True)) if a != b)
    ids = [*plain.tokenizer.encode(prompt), *right[:first]]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    [output] = plain.generate(prompt_token_ids=ids, sampling_params=params)[0].outputs
    assert output.logprobs is not None
    report = output.logprobs[0]
    return abs(report[right[first]].logprob - report[mine[first]].logprob)


def compare(
    args: argparse.Namespace, plain: LLM, prompts: Sequence[str], rights: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Run every dtype with every number of drafts."""
    rows = []
    for dtype in args.dtypes:
        for drafts in args.drafts:
            llm = LLM(
                "bundled",
                device=args.device,
                dtype=dtype,
                draft_tokens=drafts,
                max_model_len=MAX_LEN,
                max_num_seqs=64,
                memory_fraction=0.3,
                enable_prefix_caching=args.prefix_caching,
            )
            tokens = generate(llm, prompts, args.max_tokens)
            gaps = [
                gap_at(plain, prompt, right, mine)
                for prompt, right, mine in zip(prompts, rights, tokens, strict=True)
                if right != mine
            ]
            rows.append(
                {
                    "device": llm.config.device,
                    "dtype": dtype,
                    "drafts": drafts,
                    "prompts": len(prompts),
                    "reused_tokens": llm._engine.counters().prefix_hits,
                    "different": len(gaps),
                    "largest_gap": max(gaps, default=0.0),
                    "bound": GAP_BOUNDS[dtype],
                    "gaps": sorted(gaps, reverse=True),
                }
            )
            print({name: value for name, value in rows[-1].items() if name != "gaps"}, flush=True)
    return rows


def main() -> int:
    args = arguments()
    prompts = make_prompts(args.prompts, args.head)
    plain = LLM("bundled", device="cpu", draft_tokens=0, max_model_len=MAX_LEN)
    rights = cpu_tokens(args, plain, prompts)
    if args.only_cpu:
        return 0
    rows = compare(args, plain, prompts, rights)
    report = {
        "check": "same_tokens",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "tokens": sum(map(len, rights)),
        "rows": rows,
    }
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0 if all(row["largest_gap"] <= row["bound"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
