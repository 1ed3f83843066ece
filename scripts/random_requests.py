"""Random requests on the bundled model: each has to get what it gets alone, and nothing may stay.

Requests join while others run, with every sampling option, several continuations, stops and
log-probabilities; many begin alike; some are cancelled, the recurrent states of some are turned
into NaN. With `--pages` some are set back for want of pages. What each gets alone is decoded on a
CPU, plainly, one request after the other (`--alone FILE` keeps it; `--apart` says of how many, the
others are decoded plainly in batches, and alone where that differs). A request may differ from that
only where noise of 1e-4 on its logits makes the plain one differ in the same way: a near-tie, which
is counted. On a GPU no step may wait for the device. None may wait longer than one that came later.

    python scripts/random_requests.py --requests 1000 --device cuda
    python scripts/random_requests.py --requests 10000 --page-size 8 --pages 80 --apart 300
    compute-sanitizer --tool memcheck python scripts/random_requests.py --requests 50 --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.engine import CompletionOutput, resolve
from hybridspec.engine.engine import Engine
from hybridspec.engine.request import Request
from hybridspec.models import HybridModel
from hybridspec.runtime import GdnMemory

NOISE = 1e-4  # on logits; fp32 products of other kernels differ by about a tenth of it
TRIES = 24
BLOCK = 50  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and what happens to it.

    Attributes:
        prompt: its tokens.
        params: its parameters.
        fate: "run", "cancel" or "nan".
        after: steps behind its first token, for the other two.
    """

    prompt: list[int]
    params: SamplingParams
    fate: str
    after: int


@dataclass(frozen=True, slots=True)
class Got:
    """What the continuations of a request got.

    Attributes:
        tokens: of each.
        reasons: why each ended.
        logprobs: of each token of each, empty if nobody asked.
    """

    tokens: list[list[int]]
    reasons: list[str]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, request: Request) -> Got:
        """Read a finished request."""
        outputs = request.output().outputs
        return cls(
            [list(one.token_ids) for one in outputs],
            [str(one.finish_reason) for one in outputs],
            [_logprobs(one) for one in outputs],
        )


def _logprobs(one: CompletionOutput) -> list[float]:
    if one.logprobs is None:
        return []
    pairs = zip(one.token_ids, one.logprobs, strict=True)
    return [report[token].logprob for token, report in pairs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=24, help="most that run together")
    parser.add_argument("--max-tokens", type=int, default=24, help="most new tokens of a request")
    parser.add_argument("--longest", type=int, default=500, help="most prompt tokens")
    parser.add_argument("--drafters", nargs="+", default=["mtp", "lookup"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", type=Path, help="file with what each request gets alone")
    parser.add_argument("--apart", type=int, help="requests decoded alone (default: all)")
    parser.add_argument("--pages", type=int, help="pages; the longest request has to fit")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--only-alone", action="store_true", help="write that file, nothing else")
    parser.add_argument("--most-ties", type=int, default=0, help="near-ties that are allowed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def random_case(
    rng: random.Random, texts: Sequence[str], llm: LLM, args: argparse.Namespace, has_logprobs: bool
) -> Case:
    """Draw a request; each option is on in about every fourth."""
    text = rng.choice(texts)
    start = rng.choice([0, 0, rng.randrange(len(text) // 2)])
    tokenizer, vocab = llm.tokenizer, llm.model_config.vocab_size
    assert tokenizer is not None
    end = start + min(rng.choice([3, 20, 64, 65, 150, 500]), args.longest)
    prompt = tokenizer.encode(text[start:end])

    def token() -> int:
        return rng.randrange(vocab)

    choices: dict[str, Any] = {
        "top_k": lambda: rng.choice([1, 5, 40]),
        "top_p": lambda: rng.choice([0.5, 0.9]),
        "min_p": lambda: rng.choice([0.02, 0.2]),
        "min_tokens": lambda: rng.randrange(args.max_tokens // 2),
        "stop": lambda: rng.sample(["\n", " ", "self", "e", "):"], 2),
        "include_stop_str_in_output": lambda: True,
        "stop_token_ids": lambda: [token() for _ in range(3)],
        "n": lambda: rng.choice([2, 3]),
        "repetition_penalty": lambda: rng.choice([0.7, 1.1, 1.8]),
        "frequency_penalty": lambda: rng.choice([-1.0, 0.3, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.5, 0.6, 2.0]),
        "logit_bias": lambda: {token(): rng.choice([-100.0, -2.5, 3.0]) for _ in range(4)},
        "bad_words": lambda: [[token()], [token(), token()], "the"],
        "allowed_token_ids": lambda: sorted({token() for _ in range(120)}),
        "logprobs": lambda: rng.choice([0, 20, -1]),
        "prompt_logprobs": lambda: rng.choice([0, 5]),
        "draft_tokens": lambda: rng.randrange(args.draft_tokens + 1),
        "skip_special_tokens": lambda: False,
        "truncate_prompt_tokens": lambda: rng.choice([1, 30]),
    }
    chosen = {name: make() for name, make in choices.items() if rng.random() < 0.25}
    if not has_logprobs:
        chosen.pop("logprobs", None)
    most = rng.randrange(1, args.max_tokens + 1)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        seed=rng.randrange(2**63),
        max_tokens=most,
        ignore_eos=rng.random() < 0.8,
        **{**chosen, "min_tokens": min(chosen.get("min_tokens", 0), most)},
    )
    fate = rng.choices(["run", "cancel", "nan"], [88, 9, 3])[0]
    return Case(prompt=prompt, params=params, fate=fate, after=rng.randrange(6))


def make_cases(args: argparse.Namespace, llm: LLM) -> list[Case]:
    """Draw all requests; the same for every device and number of them that run together."""
    rng = random.Random(args.seed)
    texts = [prompt.text for kind in ("code", "docs") for prompt in held_out_prompts(kind)]
    # Steps of requests that want log-probabilities are not captured: every other block has none.
    wants = [i // BLOCK % 2 == 1 for i in range(args.requests)]
    return [random_case(rng, texts, llm, args, has_logprobs=one) for one in wants]


def decoded(llm: LLM, *cases: Case) -> list[Got]:
    """Decode requests side by side, plainly."""
    plainly = [replace(case.params, draft_tokens=None) for case in cases]
    pairs = zip([case.prompt for case in cases], plainly, strict=True)
    engine = llm._engine
    requests = [engine.make_request(*pair) for pair in pairs]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return [Got.of(request) for request in requests]


def all_alone(args: argparse.Namespace, cases: Sequence[Case], plain: LLM) -> list[Got]:
    """Decode every request by itself, or read what came of that before."""
    drawn_by = [args.seed, args.max_tokens, args.draft_tokens, args.longest]
    if args.alone is not None and args.alone.exists():
        kept = json.loads(args.alone.read_text())
        has = f"{len(kept['found'])} requests drawn by {kept['drawn_by']}"
        if kept["drawn_by"] != drawn_by or len(kept["found"]) < len(cases):
            raise SystemExit(f"alone: {args.alone} has {has}, expected {len(cases)} of {drawn_by}")
        return [Got(*one) for one in kept["found"][: len(cases)]]
    found = [decoded(plain, case)[0] for case in cases[: args.apart]]
    for i in range(len(found), len(cases), BLOCK):
        found += decoded(plain, *cases[i : i + BLOCK])
    if args.alone is not None:
        rows = [[one.tokens, one.reasons, one.logprobs] for one in found]
        args.alone.write_text(json.dumps({"drawn_by": drawn_by, "found": rows}))
    return found


@contextlib.contextmanager
def no_sync(is_on: bool) -> Iterator[None]:
    """Raise where torch waits for the device."""
    if is_on:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_on:
            torch.cuda.set_sync_debug_mode("default")


def watch_steps(llm: LLM, steps: Counter[str]) -> None:
    """Count decode steps, captured and not; on a GPU let none of them wait for it."""
    runner = llm._engine.runner
    decode, is_device = runner.decode, llm._engine.pools.device.type == "cuda"

    def watched(requests: Sequence[Request]) -> None:
        asks = runner._batch(requests).asks
        is_eager = runner.graphs is None or asks.num_logprobs is not None
        steps["eager" if is_eager else "captured"] += 1
        with no_sync(is_device and asks.overflow is None):
            decode(requests)

    runner.decode = watched  # type: ignore[method-assign]


@torch.inference_mode()
def run_together(llm: LLM, cases: Sequence[Case], rng: random.Random) -> list[Request]:
    """Run requests that join at random, and do to each what is its fate."""
    engine = llm._engine
    requests = [engine.make_request(case.prompt, case.params) for case in cases]
    waiting = list(zip(cases, requests, strict=True))
    fates: list[tuple[Case, Request]] = []
    while waiting or engine.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 2, 5]), len(waiting))):
            case, request = waiting.pop(0)
            engine.submit(request)
            fates += [(case, request)] * (case.fate != "run")
        engine.step()
        live = [one.arrival for one in (*engine.scheduler.prefilling, *engine.scheduler.running)]
        late = [one.arrival for one in engine.scheduler.waiting]
        assert not live or not late or max(live) < min(late), "one waits for those behind it"
        for case, request in list(fates):
            if len(request.stats.committed_per_step) < case.after or not request.num_generated:
                continue
            fates.remove((case, request))
            if case.fate == "cancel":
                engine.drop(request.continuations)
            elif request in engine.scheduler.running:
                for memory in engine.pools.of_kind(GdnMemory):
                    memory.state[request.slot] = torch.nan
    return requests


def is_near_tie(plain: LLM, case: Case, index: int, tokens: Sequence[int]) -> bool:
    """Whether noise on the logits makes the plain request begin with these tokens."""
    right = HybridModel.logits

    def noisy(self: HybridModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = right(self, hidden)
        return logits + NOISE * torch.randn_like(logits)

    HybridModel.logits = noisy  # type: ignore[method-assign]
    try:
        for _ in range(TRIES):
            if decoded(plain, case)[0].tokens[index][: len(tokens)] == list(tokens):
                return True
    finally:
        HybridModel.logits = right  # type: ignore[method-assign]
    return False


def compare(plain: LLM, case: Case, got: Got, right: Got, place: int) -> tuple[int, list[str]]:
    """Compare a request with itself alone; returns near-ties, and what is wrong."""
    ties, wrong = 0, []
    for index, (mine, its) in enumerate(zip(got.tokens, right.tokens, strict=True)):
        reason, name = got.reasons[index], f"request {place}, continuation {index}"
        allowed = {"run": (), "cancel": ("abort",), "nan": ("error",)}[case.fate]
        same = its[: len(mine)] if reason in allowed else its
        if mine != same:
            pairs = enumerate(zip(mine, its, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), len(mine))
            if is_near_tie(plain, case, index, mine[: first + 1]):
                ties += 1
                continue
            wrong.append(f"{name}: differs from token {first} on ({case.params})")
        elif reason not in (*allowed, right.reasons[index]):
            wrong.append(f"{name}: ended by {reason}, alone by {right.reasons[index]}")
        both = zip(got.logprobs[index], right.logprobs[index], strict=False)
        gaps = [abs(a - b) for a, b in both]
        if mine == same and max(gaps, default=0.0) > 1e-3:
            wrong.append(f"{name}: a log-probability differs by {max(gaps):.1e}")
    return ties, wrong


def limit_pages(engine: Engine, num_pages: int) -> None:
    """Give an engine that runs nothing yet so many pages, for good."""
    allocator = engine.allocator
    if allocator.can_grow:
        num_slots = allocator.max_slots + allocator.prefixes.num_states
        engine.pools.grow_slots(num_slots).grow_pages(num_pages)
        allocator.can_grow = False
        allocator.__post_init__()
    del allocator._free_pages[:-num_pages]


def run_drafter(
    args: argparse.Namespace, drafter: str, plain: LLM, cases: Sequence[Case], rights: Sequence[Got]
) -> dict[str, Any]:
    """Run all requests with one drafter; returns what is to be said of it."""
    llm = LLM(
        "bundled",
        device=args.device,
        dtype="float32",
        drafter=drafter,
        draft_tokens=args.draft_tokens,
        max_model_len=512,
        max_num_seqs=args.max_num_seqs,
        memory_fraction=0.3,
        enable_prefix_caching=args.prefix_caching,
    )
    engine, steps, rng = llm._engine, Counter[str](), random.Random(args.seed)
    watch_steps(llm, steps)
    if args.pages is not None:
        limit_pages(engine, args.pages)
    requests = run_together(llm, cases, rng)
    grown = 0
    if engine.pools.device.type == "cuda":  # on a CPU pools shrink and grow
        # Layouts of eager steps are kept by their sizes: all were there by now.
        before = torch.cuda.memory_allocated(engine.pools.device)
        run_together(llm, cases[: max(len(cases) // 10, 1)], rng)
        grown = torch.cuda.memory_allocated(engine.pools.device) - before
    ties, wrong, ends = 0, [], Counter[int]()
    for place, (case, request, right) in enumerate(zip(cases, requests, rights, strict=True)):
        new_ties, new_wrong = compare(plain, case, Got.of(request), right, place)
        # What was decoded in a batch may be the one that differs.
        if (new_ties or new_wrong) and place >= (args.apart or len(cases)):
            [right] = decoded(plain, case)
            new_ties, new_wrong = compare(plain, case, Got.of(request), right, place)
        ties, wrong = ties + new_ties, wrong + new_wrong
        for one in request.continuations:
            if one.finish_reason in ("stop", "length") and one.stats.committed_per_step:
                ends[one.stats.committed_per_step[-1]] += 1
    live, counters = engine.allocator.num_live, engine.counters()
    num_held = engine.pools.num_pages - engine.allocator.num_free_pages
    if live or num_held or grown > 0:
        wrong.append(f"{live} slots and {num_held} pages are held, memory grew by {grown} bytes")
    every = [one for request in requests for one in request.continuations]
    return {
        "drafter": drafter,
        "device": llm.config.device,
        "steps": dict(steps),
        "ended_by": dict(Counter(str(one.finish_reason) for one in every)),
        "tokens_of_the_last_step": dict(sorted(ends.items())),
        "preemptions": counters.num_preemptions,
        "prompt_tokens": counters.prefix_queries,
        "reused_tokens": counters.prefix_hits,
        "near_ties": ties,
        "wrong": wrong,
    }


def main() -> int:
    args = arguments()
    resolve.PAGE_SIZE = args.page_size
    options = {"max_model_len": 512, "enable_prefix_caching": False}
    plain = LLM("bundled", device="cpu", draft_tokens=0, **options)  # type: ignore[arg-type]
    cases = make_cases(args, plain)
    rights = all_alone(args, cases, plain)
    if args.only_alone:
        return 0
    runs = [run_drafter(args, drafter, plain, cases, rights) for drafter in args.drafters]
    for run in runs:
        print(*run["wrong"][:20], sep="\n")
        print({name: value for name, value in run.items() if name != "wrong"})
    is_right = all(not run["wrong"] and run["near_ties"] <= args.most_ties for run in runs)
    report = {
        "check": "random_requests",
        "requests": len(cases),
        "continuations": sum(len(right.tokens) for right in rights),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "is_right": is_right,
        "runs": runs,
    }
    if args.json:
        args.json.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
