"""What serving costs over `LLM.generate`: the same prompts through both, interleaved.

The server runs in a process of its own, the clients here; the offline engine runs here as well, at
other times. Tokens a second of a round are those of all streams, from the first request's start to
the last one's end. The figure that counts is the ratio within a round; its median is reported, and
beside it the same ratio of processor seconds, which a busy machine disturbs less, and those of the
server's event loop, which are all that it does besides running the engine.

With `--one-core` each round does both once more, the server on one core, the offline engine on the
same one at its time, and the clients on another: what the event loop takes is then missing for the
engine, and what the clients take is not.

    python benchmarks/serve_overhead.py --one-core --json benchmarks/results/serve_overhead_cpu.json
    python benchmarks/serve_overhead.py --geometry 9b --device cuda --streams 32

With a geometry the weights are made up, prompts are random tokens, and drafts are accepted by
force (`--acceptance`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hybridspec
from geometries import GEOMETRIES, write_geometry, write_tokenizer
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.serve.app import Server, create_app
from hybridspec.serve.load import Load, Target, run_load, summary
from hybridspec.serve.options import ServeOptions
from measured_commit import measured_commit

VOCAB = 32768  # of a geometry
PROMPT = 128  # tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help="folder or id (default bundled)")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="in place of a model")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.85, 0.7, 0.55])
    parser.add_argument("--drafts", type=int, default=3, help="drafts a step (default 3)")
    parser.add_argument("--device", default="cpu", help="of both engines (default cpu)")
    parser.add_argument("--streams", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--max-tokens", type=int, default=200, help="new tokens (default 200)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--one-core", action="store_true", help="also with the server on one core")
    parser.add_argument("--serve", action="store_true", help="be the server of such a measurement")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


def load_model(args: argparse.Namespace) -> LLM:
    """The engine, the same in both processes."""
    options: dict[str, Any] = {
        "device": args.device,
        "draft_tokens": args.drafts,
        "enable_prefix_caching": False,  # every round has the same prompts
    }
    if args.geometry is None:
        return LLM(args.model, **options)
    with tempfile.TemporaryDirectory() as name:
        folder = write_geometry(Path(name), args.geometry, VOCAB)
        write_tokenizer(folder, VOCAB)
        return LLM(
            folder,
            dummy_weights=True,
            acceptance=args.acceptance[: args.drafts] or None,
            max_model_len=PROMPT + args.max_tokens + 16,
            max_num_seqs=args.streams,
            memory_fraction=0.4,  # two engines share the GPU
            **options,
        )


def serve(args: argparse.Namespace) -> int:
    """Serve until the end of standard input; print where."""
    app = create_app(lambda: load_model(args), ServeOptions(model_name="measured"))
    server = Server(app, host="127.0.0.1", port=0, drain_s=5)

    def watch() -> None:
        while server.address is None:
            time.sleep(0.01)
        print("http://{}:{}".format(*server.address), flush=True)
        sys.stdin.read()
        server.end()

    threading.Thread(target=watch, daemon=True).start()
    server.run()
    return int(server.failure is not None)


@contextlib.contextmanager
def starting_server() -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, which loads its model meanwhile."""
    command = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


def wait_for(process: subprocess.Popen[str]) -> Target:
    """Wait until a server has loaded its model; return where it is."""
    target = Target(url=process.stdout.readline().strip())
    while not asyncio.run(is_ready(target)):
        if process.poll() is not None:
            raise SystemExit("the server ended")
        time.sleep(0.2)
    return target


async def is_ready(target: Target) -> bool:
    body = {"prompt": "a", "max_tokens": 1}
    [timing], _ = await run_load(target, Load(bodies=[body], concurrency=1), lambda _: None)
    return timing.error is None


def processor_seconds(pid: int) -> tuple[float, float]:
    """What a process has used of the processor, and its first thread, which is the event loop."""
    used = []
    for file in (f"/proc/{pid}/stat", f"/proc/{pid}/task/{pid}/stat"):
        fields = Path(file).read_text().rpartition(")")[2].split()
        used.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return used[0], used[1]


def make_prompts(args: argparse.Namespace) -> list[Any]:
    if args.geometry is not None:
        rng = random.Random(0)
        return [[rng.randrange(1, VOCAB) for _ in range(PROMPT)] for _ in range(args.streams)]
    texts = [prompt.text for prompt in held_out_prompts("code")]
    return [texts[i % len(texts)] for i in range(args.streams)]


@contextlib.contextmanager
def on_cores(pid: int, cores: set[int]) -> Iterator[None]:
    """Keep a process with all its threads on some cores."""
    before = os.sched_getaffinity(pid)
    _keep(pid, cores)
    try:
        yield
    finally:
        _keep(pid, before)


def _keep(pid: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cores)


class Both:
    """The two ways for the same prompts.

    Args:
        args: of the command line.
        server: serves the model.
    """

    def __init__(self, args: argparse.Namespace, server: subprocess.Popen[str]) -> None:
        self.llm, self.target, self.pid = load_model(args), wait_for(server), server.pid
        self.num_tokens = args.streams * args.max_tokens
        prompts = make_prompts(args)
        name = "prompts" if args.geometry is None else "prompt_token_ids"
        self.offline = {
            name: prompts,
            "sampling_params": SamplingParams(
                temperature=0, max_tokens=args.max_tokens, ignore_eos=True
            ),
        }
        fields = {"temperature": 0, "ignore_eos": True, "max_tokens": args.max_tokens}
        bodies = [{**fields, "prompt": prompt} for prompt in prompts]
        self.load = Load(bodies=bodies, concurrency=args.streams)

    def on_one_core(self) -> dict[str, float]:
        """Measure with the server on one core, the offline engine on it too, clients elsewhere."""
        first, *others = sorted(os.sched_getaffinity(0))
        if not others:
            raise SystemExit("--one-core: expected at least two cores")
        with on_cores(self.pid, {first}):
            return self.measure(offline_cores={first}, client_cores=set(others))

    def measure(
        self, *, offline_cores: set[int] | None = None, client_cores: set[int] | None = None
    ) -> dict[str, float]:
        """Measure both ways once, offline first."""
        every = os.sched_getaffinity(0)
        with on_cores(os.getpid(), offline_cores or every):
            start, used = time.perf_counter(), time.process_time()
            self.llm.generate(**self.offline)
            offline_s, offline_used = time.perf_counter() - start, time.process_time() - used
        before = processor_seconds(self.pid)
        with on_cores(os.getpid(), client_cores or every):
            timings, served_s = asyncio.run(run_load(self.target, self.load, lambda _: None))
        after = processor_seconds(self.pid)
        found = summary(timings, served_s)
        if found["failed"] or found["generated_tokens"] != self.num_tokens:
            raise SystemExit(f"requests failed: {found['errors']}")
        served_used = after[0] - before[0]
        return {
            "offline_tokens_per_s": self.num_tokens / offline_s,
            "served_tokens_per_s": found["tokens_per_s"],
            "served_over_offline": found["tokens_per_s"] * offline_s / self.num_tokens,
            "offline_processor_s": offline_used,
            "served_processor_s": served_used,
            "processor_served_over_offline": served_used / max(offline_used, 0.01),
            "event_loop_processor_s": after[1] - before[1],
            "first_token_ms": found["first_token_ms"]["p50"],
            "between_chunks_ms": found["between_chunks_ms"]["p50"],
        }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Both ways in turn, behind a round that warms up; a row for each round."""
    rows: dict[str, list[dict[str, float]]] = {}
    with starting_server() as server:
        both = Both(args, server)
        forms = {"any_core": both.measure} | (
            {"one_core": both.on_one_core} if args.one_core else {}
        )
        for number in range(args.rounds + 1):
            for name, form in forms.items():
                row = form()
                line = " ".join(f"{key} {value:.3f}" for key, value in row.items())
                print(name, line, file=sys.stderr)
                if number > 0:
                    rows.setdefault(name, []).append(row)
    return rows


def main() -> int:
    args = arguments()
    if args.serve:
        return serve(args)
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in measure(args).items()
    }
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    result = {
        "benchmark": "serve_overhead",
        "hybridspec": hybridspec.__version__,
        "commit": measured_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": gpu or args.device,
        "model": args.geometry or args.model,
        "acceptance": None if args.geometry is None else args.acceptance[: args.drafts],
        "drafts": args.drafts,
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        **medians.pop("any_core"),
        **medians,
    }
    for name, found in {"any core": result, **medians}.items():
        print(f"{name.replace('_', ' ')}: offline {found['offline_tokens_per_s']:.1f} tokens/s, "
              f"served {found['served_tokens_per_s']:.1f}; served / offline "
              f"{found['served_over_offline']:.3f}, of processor seconds "
              f"{found['processor_served_over_offline']:.3f}")  # fmt: skip
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
