"""exact="bitwise" held to its word: whole engines with drafts against plain decoding.

Requests join at random, some are cancelled, some preempted. Drafts come from the head, from a
request's own text, or from what plain decoding said, a tenth of them spoilt; batches, budgets of
rows and numbers of drafts differ, prompts are processed in chunks beside those that decode or begin
where a chunk of another ended, steps are captured and not. Every logit of every committed token,
and what is kept of a request at its end (checkpoint, rows of the window, inputs of the
convolution), must have the bits that plain decoding gave them. They are compared by digests
(`digests.py`). The fast mode runs as a control: there something has to differ.

With `--kept FILE` plain decoding's digests are read from a file, or written if there is none, so
that processes can be compared; `--part I --parts N` runs a share of the settings.

    python scripts/same_bits.py --device cuda --json report.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from digests import HEADER, KEPT, KnownDrafter, Recorder
from hybridspec import LLM, SamplingParams
from hybridspec.bundled import held_out_prompts
from hybridspec.engine import engine as engine_module
from hybridspec.engine import resolve
from hybridspec.engine.exactness import ALIGNED_WINDOW
from hybridspec.engine.request import Request
from hybridspec.models import ModelConfig
from hybridspec.speculate import choose, step
from random_requests import limit_pages

BATCHES = (64, 5, 16, 1, 33, 2, 64, 8)
LENGTHS = (3, 20, 64, 65, 150, 300, 700, 1300)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.1},
)
SPOILT, CANCELLED = 0.1, 0.1
STATES = 16  # that are kept of prefixes
COUNTS = ("logits", "differing", "states", "differing_states", "folded_in_one")

Case = tuple[list[int], SamplingParams]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an engine runs the requests.

    Attributes:
        name: for the table.
        drafts: drafts k.
        drafter: "mtp", "lookup" or "known": taken from plain decoding.
        batch: most requests at a time.
        is_mixed: whether each request wants a number of drafts of its own.
        has_few_pages: whether there are pages for two long requests only, so that some are
            preempted.
        options: of the engine.
    """

    name: str
    drafts: int = 0
    drafter: str = "mtp"
    batch: int
    is_mixed: bool = False
    has_few_pages: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plain:
    """What plain decoding gave each request: tokens, a digest for each, and of what was kept."""

    tokens: list[list[int]]
    logits: list[list[int]]
    states: list[list[int]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help="bundled, or a folder")
    parser.add_argument("--dummy-weights", action="store_true", help="of a folder of sizes alone")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--state-dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=140, help="most new tokens of a request")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="most prompt tokens")
    parser.add_argument("--chunk", type=int, default=512, help="prompt rows of a forward")
    parser.add_argument("--page-size", type=int, default=resolve.PAGE_SIZE, help="tokens of a page")
    parser.add_argument("--drafts", type=int, nargs="+", default=list(range(1, 8)))
    parser.add_argument("--kept", type=Path, help="file with what plain decoding gave")
    parser.add_argument("--only-plain", action="store_true", help="write that file, nothing else")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def all_settings(args: argparse.Namespace) -> list[Setting]:
    """What is compared with plain decoding; the last one is the control."""
    batches, most = itertools.cycle(BATCHES), max(args.drafts)
    found = [Setting(name="plain, other neighbours", batch=7)]
    for drafts in args.drafts:
        found += [
            Setting(name="head", drafts=drafts, batch=next(batches)),
            Setting(name="known", drafts=drafts, drafter="known", batch=next(batches)),
        ]
    known: dict[str, Any] = {"drafts": most, "drafter": "known"}
    budget, eager, fast = {"verify_rows": 24}, {"enforce_eager": True}, {"exact": "tokens"}
    reused = {"enable_prefix_caching": True, "prefix_states": STATES}
    found += [
        Setting(name="head, budget of rows", drafts=most, batch=16, options=budget),
        Setting(name="known, budget of rows", batch=16, options=budget, **known),
        Setting(name="known, each its own k", batch=64, is_mixed=True, **known),
        Setting(name="lookup", drafts=most, drafter="lookup", batch=33),
        Setting(name="plain, eager", batch=5, options=eager),
        Setting(name="known, eager", batch=33, options=eager, **known),
        Setting(name="known, reused prefixes", batch=16, options=reused, **known),
        Setting(name="known, few pages", batch=16, options=reused, has_few_pages=True, **known),
    ]
    mine = found[args.part :: args.parts]
    return [*mine, Setting(name="control: fast", batch=16, options=fast, **known)]


def make_cases(args: argparse.Namespace, vocab: int) -> list[Case]:
    """Draw prompts and parameters; the same for every setting."""
    rng = random.Random(args.seed)
    texts = [prompt.text for kind in ("code", "docs") for prompt in held_out_prompts(kind)]
    text = "".join(texts).encode()  # of the bundled model every byte is a token
    lengths, cases = [length for length in LENGTHS if length <= args.longest], []
    for i in range(args.requests):
        length = lengths[i % len(lengths)]
        start = rng.choice([0, 0, 7, rng.randrange(len(text) - length)])  # so that some begin alike
        prompt = list(text[start : start + length])
        if args.model != "bundled":
            words = random.Random(start)
            prompt = [words.randrange(vocab) for _ in range(length)]
        params = SamplingParams(
            **rng.choice(KINDS),
            seed=rng.randrange(2**63),
            max_tokens=rng.randrange(args.max_tokens // 2, args.max_tokens + 1),
            ignore_eos=True,
        )
        cases.append((prompt, params))
    return cases


class Check:
    """Requests, and engines that run them one after the other.

    Attributes:
        args: the command line's.
        cases: prompts and parameters.
        recorder: where steps leave digests.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        vocab = ModelConfig.from_folder(resolve.model_folder(args.model)).vocab_size
        self.cases = make_cases(args, vocab)
        self.positions = args.longest + args.max_tokens + 8
        device = torch.zeros(0, device=resolve._device(args.device)).device
        slots = max(BATCHES) + STATES
        self.recorder = Recorder(slots, self.positions, vocab, len(self.cases), device)
        self._models: dict[str, Any] = {}

    def run(self, setting: Setting, state: str, plain: Plain | None, seed: int) -> dict[str, Any]:
        """Run a setting, requests in their order and all at once where nothing is known yet.

        Returns:
            What plain decoding gave if `plain` is None, else a row of the table.
        """
        with self._engine(setting, state) as llm:
            rng = random.Random(seed)
            if setting.has_few_pages:
                limit_pages(llm._engine, 5 * -(-self.positions // resolve.PAGE_SIZE) // 2)
            requests = self._requests(llm, setting, plain, rng)
            known = [[] if plain is None else plain.tokens[i] for i in range(len(self.cases))]
            self.recorder.follow(llm._engine, requests, [spoilt(rng, one) for one in known])
            run_together(llm, requests, rng, is_plain=plain is None)
            found = self.recorder.found(requests)
            if plain is None:
                logits, states = zip(*(found[i] for i in range(len(found))), strict=True)
                tokens = [requests[i].token_ids for i in range(len(found))]
                return {"tokens": tokens, "logits": logits, "states": states}
            counters = llm.counters()
            outcomes = list(enumerate(counters.outcomes))
            return {
                "state": state,
                "setting": setting.name,
                "drafts": setting.drafts,
                "batch": setting.batch,
                "captured": llm._engine.runner.graphs is not None,
                "drafted": sum(k * sum(row) for k, row in outcomes),
                "accepted": sum(j * n for _, row in outcomes for j, n in enumerate(row)),
                "reused": counters.prefix_hits,
                "preempted": counters.num_preemptions,
                "requests": len(requests),
                **compare(requests, found, plain),
            }

    def _requests(
        self, llm: LLM, setting: Setting, plain: Plain | None, rng: random.Random
    ) -> dict[int, Request]:
        """Make requests by their number, in the order in which they come."""
        numbers = list(range(len(self.cases)))
        if plain is not None:
            rng.shuffle(numbers)
            del numbers[8 * setting.batch :]
        requests = {}
        for i in numbers:
            prompt, params = self.cases[i]
            if setting.is_mixed:
                params = replace(params, draft_tokens=rng.randrange(setting.drafts + 1))
            requests[i] = llm._engine.make_request(prompt, params)
        return requests

    @contextlib.contextmanager
    def _engine(self, setting: Setting, state: str) -> Iterator[LLM]:
        """Make an engine whose steps leave digests."""
        args, recorder, make = self.args, self.recorder, engine_module.make_drafter
        gc.collect()  # the engine before it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        def drafter(*parts: Any) -> Any:
            return KnownDrafter(recorder.known) if setting.drafter == "known" else make(*parts)

        with (
            mock.patch.object(engine_module, "load_model", self._loader()),
            mock.patch.object(engine_module, "make_drafter", drafter),
            mock.patch.object(choose, "choose_tokens", recorder.choose_tokens),
            mock.patch.object(step, "choose_and_accept", recorder.choose_and_accept),
        ):
            yield LLM(
                args.model,
                dummy_weights=args.dummy_weights,
                device=args.device,
                dtype=args.dtype,
                state_dtype=state,
                draft_tokens=setting.drafts,
                drafter="mtp" if setting.drafter == "mtp" else "lookup",
                max_num_seqs=setting.batch,
                max_num_batched_tokens=args.chunk,
                max_model_len=self.positions,
                **{"exact": "bitwise", "enable_prefix_caching": False, **setting.options},
            )

    def _loader(self) -> Any:
        """Return what loads a model, or takes the one that was loaded before."""
        load, models = engine_module.load_model, self._models

        def loaded(folder: Path, **options: Any) -> Any:
            key = repr(sorted(options["backends"].items()))
            if key not in models:
                models.clear()
                models[key] = load(folder, **options)
            return models[key]

        return loaded


@torch.inference_mode()
def run_together(
    llm: LLM, requests: dict[int, Request], rng: random.Random, *, is_plain: bool
) -> None:
    """Run requests to their ends, all at once, or such that they join at random and some leave."""
    engine, waiting = llm._engine, list(requests.values())
    doomed = {
        request: rng.randrange(2, 40)
        for request in waiting
        if not is_plain and rng.random() < CANCELLED
    }
    while waiting or engine.has_work:
        count = len(waiting) if is_plain else rng.choice([0, 1, 2, 5, 9])
        for request in waiting[:count]:
            engine.submit(request)
        del waiting[:count]
        engine.step()
        for request, after in list(doomed.items()):
            if request.num_generated >= after:
                engine.drop([request])
                del doomed[request]


def spoilt(rng: random.Random, tokens: Sequence[int]) -> list[int]:
    """Return tokens, a few of which are others."""
    return [token ^ 1 if rng.random() < SPOILT else token for token in tokens]


def compare(
    requests: dict[int, Request], found: dict[int, tuple[list[int], list[int]]], plain: Plain
) -> dict[str, Any]:
    """Count what is compared and what differs; behind the first other token nothing is.

    A full window is folded by the next step of its request, which may be in flight when its end
    becomes known, or not: where it was in one of both runs only, states are not comparable.
    """
    counts: dict[str, Any] = dict.fromkeys((*COUNTS, "other_texts"), 0)
    parts: Counter[str] = Counter()
    for i, request in requests.items():
        logits, states = found[i]
        assert 0 not in logits, "a token without a digest"
        both = zip(request.token_ids, plain.tokens[i], strict=False)
        same = next((j for j, (a, b) in enumerate(both) if a != b), len(logits))
        pairs = list(zip(logits, plain.logits[i], strict=False))[: same + 1]
        counts["logits"] += len(pairs)
        counts["differing"] += sum(a != b for a, b in pairs)
        counts["other_texts"] += same < len(logits)
        if not states or same < len(logits):
            continue
        others = plain.states[i]
        if states[0] == others[0] and {states[1], others[1]} == {0, ALIGNED_WINDOW}:
            counts["folded_in_one"] += 1
            continue
        counts["states"] += 1
        counts["differing_states"] += states != others
        names = (*HEADER, *KEPT * ((len(states) - len(HEADER)) // len(KEPT)))
        pairs = list(zip(names, zip(states, others, strict=True), strict=True))
        parts.update({name for name, (mine, other) in pairs if mine != other})
    return counts | {"differing_parts": dict(parts)}


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put together what was compared; it is right if only the control differs."""
    controls = [row for row in rows if row["setting"].startswith("control")]
    held = [row for row in rows if not row["setting"].startswith("control")]
    totals = {key: sum(row[key] for row in held) for key in COUNTS}
    is_right = not totals["differing"] and not totals["differing_states"]
    return {
        "check": "same_bits",
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "part": args.part,
        "is_right": is_right and any(row["differing"] for row in controls),
        **totals,
        "rows": rows,
    }


def main() -> int:
    args = arguments()
    resolve.PAGE_SIZE = args.page_size
    check, plain, rows = Check(args), dict[str, Plain](), list[dict[str, Any]]()
    if args.kept is not None and args.kept.exists():
        plain = {name: Plain(**one) for name, one in json.loads(args.kept.read_text()).items()}
    for state in args.state_dtypes:
        if state not in plain:
            first = Setting(name="plain", batch=max(BATCHES))
            plain[state] = Plain(**check.run(first, state, None, args.seed))
            if args.kept is not None:
                args.kept.write_text(json.dumps({name: vars(one) for name, one in plain.items()}))
        for number, setting in enumerate([] if args.only_plain else all_settings(args)):
            started = time.perf_counter()
            row = check.run(setting, state, plain[state], args.seed + number)
            row["seconds"] = round(time.perf_counter() - started, 1)
            rows.append(row)
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
            if args.json:
                args.json.write_text(json.dumps(report(args, rows)) + "\n")
    result = report(args, rows)
    print(json.dumps(result))
    return 0 if result["is_right"] or args.only_plain else 1


if __name__ == "__main__":
    sys.exit(main())
