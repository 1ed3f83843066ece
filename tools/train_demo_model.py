"""Trains the demo model on one GPU in minutes and exports it.

    python tools/prepare_demo_data.py --docs python-doc --out demo-data --prompts prompts
    python tools/train_demo_model.py --data-dir demo-data --out trained
    python tools/evaluate_demo_model.py --model trained/model --prompts prompts --data demo-data

The whole step (forward, backward, clipping, AdamW) is one CUDA graph: launched kernel by kernel, a
model this small waits for the host. On a CPU the same code runs uncompiled, for a few steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from demo_model import chain_attention, delta_rule
from demo_model.export import FILE_TOKEN_ID, export_folder
from demo_model.model import DemoConfig, DemoModel

# Chance of each kind of text for a window.
MIXTURE = {"code": 0.38, "docs": 0.30, "tests": 0.32}


def load_text(folder: Path, device: str) -> tuple[Tensor, list[tuple[int, int]]]:
    """All training bytes in one tensor, and where each kind of `MIXTURE` begins and ends."""
    parts = [(folder / f"{kind}.bin").read_bytes() for kind in MIXTURE]
    spans, end = [], 0
    for part in parts:
        spans.append((end, end + len(part)))
        end += len(part)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device), spans


def draw_windows(
    spans: list[tuple[int, int]], steps: int, batch: int, length: int, seed: int
) -> Tensor:
    """Start of every window of every step, `[steps, batch]`."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor(list(MIXTURE.values()))
    kinds = torch.multinomial(shares, steps * batch, replacement=True, generator=generator)
    spans = torch.tensor(spans)[kinds]
    places = torch.rand(steps * batch, generator=generator, dtype=torch.float64)
    starts = spans[:, 0] + (places * (spans[:, 1] - spans[:, 0] - length)).long()
    return starts.view(steps, batch)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: DemoModel, lr: Tensor) -> torch.optim.AdamW:
    """AdamW that decays matrices only, embeddings aside."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    on_gpu = lr.is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)


class Step:
    """One optimiser step over the windows that start at `starts`; captured as a graph on CUDA."""

    def __init__(self, model: DemoModel, text: Tensor, args: argparse.Namespace) -> None:
        """Prepares static inputs."""
        device = text.device
        self.model, self.text, self.args = model, text, args
        self.lr = torch.tensor(args.lr, device=device)
        self.starts = torch.zeros(args.batch, dtype=torch.int64, device=device)
        self.losses = torch.zeros(1 + args.draft_steps, device=device)
        length = args.context + 1 + args.draft_steps
        self.places = torch.arange(length, device=device)
        self.optimizer = make_optimizer(model, self.lr)
        self.graph = None

    def run(self, starts: Tensor, lr: float) -> None:
        """Trains on one batch."""
        self.starts.copy_(starts)
        self.lr.fill_(lr)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._train()

    def capture(self) -> None:
        """Records the step; the recording itself trains nothing."""
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._train()

    def _train(self) -> None:
        tokens = self.text[self.starts[:, None] + self.places].long()
        tokens = tokens.masked_fill(tokens == 0, FILE_TOKEN_ID)
        loss, losses = self.model.training_loss(
            tokens, num_draft_steps=self.args.draft_steps, draft_weight=self.args.draft_weight
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.copy_(losses)


def train(args: argparse.Namespace) -> dict:
    """Trains, exports to `args.out / "model"` and returns the figures of the run."""
    torch.manual_seed(args.seed)
    on_gpu = args.device.startswith("cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = DemoModel(DemoConfig(), dtype=dtype).to(args.device)
    if on_gpu and args.compile:
        for part in (model, delta_rule, chain_attention):
            part.compile_functions()
    text, spans = load_text(args.data_dir, args.device)
    length = args.context + 1 + args.draft_steps
    windows = draw_windows(spans, args.steps, args.batch, length, args.seed).to(args.device)
    step = Step(model, text, args)
    began = captured = time.perf_counter()
    side = torch.cuda.Stream() if on_gpu else None
    log = []
    for i in range(args.steps):
        lr = learning_rate(i, args.steps, args.lr, args.warmup)
        if on_gpu and i < 3:
            # Kernels are compiled and libraries set up in these steps, which a graph cannot record.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step.run(windows[i], lr)
            torch.cuda.current_stream().wait_stream(side)
            continue
        if on_gpu and i == 3:
            step.capture()
            captured = time.perf_counter()
            print(f"ready to replay after {captured - began:.0f} s", flush=True)
        step.run(windows[i], lr)
        if i % args.log_every == 0 or i == args.steps - 1:
            bits = [loss / math.log(2) for loss in step.losses.tolist()]
            seconds = time.perf_counter() - captured
            log.append({"step": i, "seconds": round(seconds, 2), "bits": bits})
            print(f"{i} {seconds:.1f} s  " + " ".join(f"{b:.3f}" for b in bits), flush=True)
        if i % args.save_every == args.save_every - 1:
            export_folder(model, args.out / "model")
    export_folder(model, args.out / "model")
    figures = {
        "steps": args.steps,
        "tokens": args.steps * args.batch * args.context,
        "seconds_before_replay": captured - began,
        "seconds": time.perf_counter() - captured,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "log": log,
    }
    if on_gpu:
        figures["peak_memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return figures


def main() -> None:
    """Trains with the given settings; the defaults made the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--draft-steps", type=int, default=5)
    parser.add_argument("--draft-weight", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    figures = train(args)
    (args.out / "training.json").write_text(json.dumps(figures) + "\n")
    print(json.dumps({name: value for name, value in figures.items() if name != "log"}))


if __name__ == "__main__":
    main()
