"""All figures of the documents that take a GPU, one after another, each into a file of its own.

Checks come first; every benchmark compares before it times. Whatever fails is named at the end, and
the others run all the same. Much of the time is compilation where kernel caches are empty; names
choose a part.

    python tools/gpu_figures.py results              # results/same_tokens.json, .log and so on
    python tools/gpu_figures.py results --only engine prompts policy --limit 300
    python tools/gpu_figures.py --list
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# name: script and flags. What the flags do not say are the settings of the documents.
RUNS = {
    "same_tokens": "scripts/same_tokens.py --prompts 500",
    "same_tokens_head": "scripts/same_tokens.py --prompts 250 --head 384 --prefix-caching",
    "random_requests": "scripts/random_requests.py --requests 1000 --most-ties 50",
    "random_requests_reuse": "scripts/random_requests.py --requests 1000 --most-ties 50 "
    "--prefix-caching --page-size 8 --pages 128",
    "same_bits": "scripts/same_bits.py",
    "gdn_verify": "benchmarks/gdn_verify.py",
    "gdn_raw": "benchmarks/gdn_raw.py",
    "gdn_drift": "benchmarks/gdn_drift.py",
    "attention_verify": "benchmarks/attention_verify.py",
    "choose_tokens": "benchmarks/choose_tokens.py",
    "experts": "benchmarks/experts.py",
    "ordered_ops": "benchmarks/ordered_ops.py",
    "engine": "benchmarks/engine_throughput.py --modes plain fixed snapshots",
    "engine_peers": "benchmarks/engine_throughput.py --modes plain transformers --requests 1 32",
    "engine_vocab": "benchmarks/engine_throughput.py --modes plain fixed --requests 1 "
    "--vocab 248320",
    "engine_draft_vocab": "benchmarks/engine_throughput.py --modes fixed --requests 1 "
    "--vocab 248320 --draft-vocab 32768",
    "engine_sampled": "benchmarks/engine_throughput.py --modes fixed --requests 32 "
    "--vocab 248320 --temperature 0.8 --top-p 0.95",
    "engine_moe": "benchmarks/engine_throughput.py --geometry 35b-a3b --modes plain "
    "--requests 1 32",
    "prompts": "benchmarks/prompts_under_load.py",
    "policy": "benchmarks/dynamic_policy_engine.py",
    "exact": "benchmarks/exact_cost.py",
    "serving": "benchmarks/serve_overhead.py --geometry 9b --device cuda --streams 32",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"))
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--limit", type=int, default=1200, help="seconds of one run")
    parser.add_argument("--list", action="store_true", help="print names and commands")
    return parser.parse_args()


def command_of(name: str) -> list[str]:
    """Return the command of a run, without the file that it writes."""
    script, *flags = shlex.split(RUNS[name])
    if script.startswith("scripts/"):
        flags += ["--device", "cuda"]
    return [sys.executable, str(ROOT / script), *flags]


def run(name: str, folder: Path, limit: int) -> bool:
    """Run one, print its last lines and return whether it succeeded."""
    started = time.perf_counter()
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    with log.open("w") as file:
        try:
            command = [*command_of(name), "--json", str(result)]
            code = subprocess.run(command, stdout=file, stderr=file, timeout=limit).returncode
            outcome = "ok" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit} s"
    print(f"{name}: {outcome}, {time.perf_counter() - started:.0f} s, {log}", flush=True)
    lines = [line for line in log.read_text().splitlines() if line and not line.startswith("{")]
    print(*(f"    {line[:150]}" for line in lines[-6:]), sep="\n", flush=True)
    return outcome == "ok"


def main() -> int:
    args = arguments()
    if args.list:
        print(*(f"{name:22} {text}" for name, text in RUNS.items()), sep="\n")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in args.only if not run(name, args.folder, args.limit)]
    if failed:
        print("not succeeded:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
