"""Evaluates an exported demo model: bits per byte and how many drafts of its head are accepted.

    python tools/evaluate_demo_model.py --model src/hybridspec/bundled/qwen3_5-stdlib-3.6m \\
        --prompts src/hybridspec/bundled/prompts --data demo-data --out evaluation.json

Drafts are made from every position of the model's own continuations at once (each from the head's
own drafted tokens), then verification is replayed: it starts after the prompt, accepts the longest
prefix of the drafts that equals the continuation, commits one token more, and goes on from there.
At a temperature, draft and target at a position share one Gumbel noise vector.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from demo_model.decode import choose, generate
from demo_model.export import FILE_TOKEN_ID, load_folder
from demo_model.model import DemoModel

NUM_NEW_TOKENS = 256
NUM_DRAFTS = 8
LOOP_NGRAM = 16
LOOP_SHARE = 0.5


def read_lines(path: Path) -> list[dict]:
    """Reads JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def bits_per_byte(model: DemoModel, texts: list[bytes], *, window: int, batch: int = 8) -> dict:
    """Bits per byte of whole texts, cut into windows that start empty; every byte counts once.

    A text begins with the file token; a later window begins with the last byte of the one before,
    so that each byte is predicted. The second figure tells how the model does past position 1024.
    """
    rows = []
    for text in texts:
        tokens = [FILE_TOKEN_ID, *text]
        starts = range(0, len(tokens) - 1, window)
        rows += [tokens[start : start + window + 1] for start in starts]
    rows.sort(key=len)
    total = late = num_bytes = num_late = 0.0
    for first in range(0, len(rows), batch):
        group = rows[first : first + batch]
        length = 64 * math.ceil((max(map(len, group)) - 1) / 64)
        padded = [row + [-100] * (length + 1 - len(row)) for row in group]
        tokens = torch.tensor(padded, device=model.cos.device)
        logits = model.logits(model(tokens[:, :-1].clamp_min(0)))
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), tokens[:, 1:], reduction="none", ignore_index=-100
        )
        counted = tokens[:, 1:] >= 0
        total, num_bytes = total + losses.sum().item(), num_bytes + counted.sum().item()
        late = late + losses[:, 1024:].sum().item()
        num_late = num_late + counted[:, 1024:].sum().item()
    figures = {"bits_per_byte": total / num_bytes / math.log(2), "bytes": int(num_bytes)}
    if num_late:
        figures["bits_per_byte_past_1024"] = late / num_late / math.log(2)
    return figures


@torch.no_grad()
def draft_everywhere(
    model: DemoModel, tokens: Tensor, num_drafts: int, temperature: float, noise: Tensor | None
) -> Tensor:
    """Drafts `[B, T - 1, num_drafts]`: entry i continues tokens[: i + 2] and starts at place i + 2.

    Noise `[B, T + num_drafts, vocab]` is indexed by the place that a token takes.
    """
    length = tokens.shape[1]
    padded = torch.nn.functional.pad(tokens, (0, -length % 64))
    hidden = model(padded)[:, : length - 1]
    reads, keys, drafts = tokens[:, 1:], None, []
    for step in range(num_drafts):
        hidden, keys = model.chain_step(step, reads, hidden, keys)
        here = None if noise is None else noise[:, step + 2 : step + 1 + length]
        reads = choose(model.logits(hidden), temperature, here)
        drafts.append(reads)
    return torch.stack(drafts, dim=-1)


def replay(tokens: list[int], drafts: list[list[int]], first: int, k: int) -> list[int]:
    """Numbers of accepted drafts, verify by verify, over places first.. of one continuation."""
    accepted, known = [], first + 1
    while known + k < len(tokens):
        row, count = drafts[known - 2], 0
        while count < k and row[count] == tokens[known + count]:
            count += 1
        accepted.append(count)
        known += count + 1
    return accepted


def repeated_share(text: Sequence[int]) -> float:
    """Share of the 16-grams of a continuation that occurred in it before."""
    grams = [tuple(text[i : i + LOOP_NGRAM]) for i in range(len(text) - LOOP_NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams)


def acceptance(rows: list[dict], prompt_length: int) -> dict:
    """Acceptance figures over continuations `{"tokens", "drafts", "repeated"}`."""
    figures = {
        "continuations": len(rows),
        "repeated_16grams": sum(row["repeated"] for row in rows) / max(len(rows), 1),
        "committed_per_verify": {},
    }
    if not rows:
        return figures
    for k in range(1, NUM_DRAFTS + 1):
        counts = [n for r in rows for n in replay(r["tokens"], r["drafts"], prompt_length, k)]
        figures["committed_per_verify"][k] = 1.0 + sum(counts) / len(counts)
        if k == NUM_DRAFTS:
            figures["accepted_given_previous"] = [
                sum(n > j for n in counts) / max(sum(n >= j for n in counts), 1) for j in range(k)
            ]
    return figures


def evaluate_prompts(
    model: DemoModel,
    prompts: list[bytes],
    temperature: float,
    seed: int,
    batch: int,
    num_new_tokens: int,
) -> dict:
    """Continues prompts, drafts along the continuations and counts, with and without loops."""
    rows, length = [], len(prompts[0])
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, len(prompts), batch):
        tokens = torch.tensor([list(p) for p in prompts[first : first + batch]])
        noise = None
        if temperature > 0:
            places = length + num_new_tokens + NUM_DRAFTS
            uniform = torch.rand(len(tokens), places, model.config.vocab_size, generator=generator)
            noise = -(-uniform.clamp(1e-9, 1 - 1e-7).log()).log().to(model.cos.device)
        with torch.no_grad():
            tokens = tokens.to(model.cos.device)
            tokens = generate(model, tokens, num_new_tokens, temperature, noise)
        drafts = draft_everywhere(model, tokens, NUM_DRAFTS, temperature, noise).tolist()
        for row, row_drafts in zip(tokens.tolist(), drafts, strict=True):
            repeated = repeated_share(row[length:])
            rows.append({"tokens": row, "drafts": row_drafts, "repeated": repeated})
    plain = [row for row in rows if row["repeated"] <= LOOP_SHARE]
    result = {"all": acceptance(rows, length), "without_loops": acceptance(plain, length)}
    result["looping_share"] = 1.0 - len(plain) / len(rows)
    samples = [bytes(t for t in row["tokens"][length:] if t < 256) for row in rows[:3]]
    result["samples"] = [text.decode("utf-8", "replace") for text in samples]
    return result


def evaluate(
    folder: Path,
    prompts: Path,
    data: Path,
    *,
    device: str,
    batch: int,
    seed: int,
    num_new_tokens: int,
) -> dict:
    """All figures of the model card."""
    model = load_folder(folder, device)
    result = {}
    for kind in ("code", "docs"):
        texts = [row["text"].encode() for row in read_lines(data / f"heldout_{kind}.jsonl")]
        result[kind] = bits_per_byte(model, texts, window=model.config.max_positions)
        result[kind]["window_1024"] = bits_per_byte(model, texts, window=1024)["bits_per_byte"]
        pieces = [
            text[i : i + NUM_NEW_TOKENS]
            for text in texts
            for i in range(0, len(text) - NUM_NEW_TOKENS, NUM_NEW_TOKENS)
        ]
        shares = [repeated_share(piece) for piece in pieces]
        result[kind]["repeated_16grams_of_the_text"] = sum(shares) / len(shares)
        starts = [row["text"].encode() for row in read_lines(prompts / f"{kind}.jsonl")]
        for name, temperature in (("greedy", 0.0), ("temperature_0.8", 0.8)):
            result[kind][name] = evaluate_prompts(
                model, starts, temperature, seed, batch, num_new_tokens
            )
        print(kind, json.dumps(result[kind], indent=1), flush=True)
    return result


def main() -> None:
    """Runs the evaluation and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--prompts", type=Path, required=True, help="code.jsonl and docs.jsonl")
    parser.add_argument("--data", type=Path, required=True, help="folder of prepared data")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW_TOKENS, help="of a continuation")
    args = parser.parse_args()
    result = evaluate(
        args.model,
        args.prompts,
        args.data,
        device=args.device,
        batch=args.batch,
        seed=args.seed,
        num_new_tokens=args.new_tokens,
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
