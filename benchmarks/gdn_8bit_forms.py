"""How exact decoding stays with checkpoints in different 8-bit forms; needs no GPU, may have one.

Two requests of eight heads, memory from 10 to 10,000 tokens. A step verifies T rows and commits a
random 0 to T of them; a window folds where T rows more would exceed 16, and the checkpoint is then
rounded to the form. Rings are bf16, all else fp32. For each form: the error of the outputs against
fp64 decoding, relative to their norm, over all tokens, divided by that of a bf16 state which is
rounded after every token; the same for each head. The last two rows run through `verify` itself,
on a GPU through its kernel and with bf16 activations; the others advance the state token by token.

    python benchmarks/gdn_8bit_forms.py --json benchmarks/results/gdn_8bit_forms_cpu.json
    python benchmarks/gdn_8bit_forms.py --device cuda --first
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE, quantise, widen
from hybridspec.ops.ring import RingView
from measured_commit import measured_commit

REQUESTS, HEADS, WINDOW = 2, 8, 16
SETTINGS = (
    {},
    {"size": 8},
    {"size": 1},
    {"dim": 64},
    {"keys": "with a mean"},
    {"keys": "with outliers"},
    {"beta_scale": 2.0},
)
Form = Callable[[Tensor], Tensor]


def grouped(count: int, *, is_random: bool = False, clip: float = 1.0) -> Form:
    """Return integers to +-127 with one fp32 scale for each of `count` groups of a row."""
    generator = torch.Generator("cpu").manual_seed(1)

    def form(state: Tensor) -> Tensor:
        groups = state.unflatten(-1, (count, -1))
        scale = groups.abs().amax(-1, keepdim=True) * clip / 127
        ratio = groups / scale.clamp_min(1e-30)
        if is_random:
            noise = torch.rand(ratio.shape, generator=generator, device="cpu")
            integers = (ratio + noise.to(ratio.device)).floor()
        else:
            integers = ratio.round()
        return (integers.clamp(-127, 127) * scale).flatten(-2)

    return form


def best_clip(state: Tensor) -> Tensor:
    """Return the clipped form of each row with the least squared error."""
    tried = torch.stack([grouped(1, clip=c)(state) for c in (1.0, 0.95, 0.9, 0.8, 0.7)])
    best = (tried - state).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.take_along_dim(best, 0)[0]


def with_offset(state: Tensor) -> Tensor:
    """Return 256 levels from the least to the largest value of each row."""
    low, high = state.amin(-1, keepdim=True), state.amax(-1, keepdim=True)
    scale = ((high - low) / 255).clamp_min(1e-30)
    return ((state - low) / scale).round() * scale + low


def rotated(state: Tensor) -> Tensor:
    """Return the form with one scale, rounded behind a Hadamard matrix along K."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < state.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix = matrix / state.shape[-1] ** 0.5
    return grouped(1)(state @ matrix) @ matrix


def float8(state: Tensor) -> Tensor:
    """Return e4m3 values with one fp32 scale for each row."""
    scale = (state.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
    return (state / scale).to(torch.float8_e4m3fn).float() * scale


def chosen(state: Tensor) -> Tensor:
    """Return the form that the operators use."""
    scale = state.new_empty((*state.shape[:-1], state.shape[-1] // GROUP_SIZE), dtype=SCALE_DTYPE)
    integers = torch.empty_like(state, dtype=torch.int8)
    quantise(state, integers, scale)
    return widen(integers, scale, state.dtype)


FORMS: dict[str, Form] = {
    "fp32 (rings alone)": lambda state: state,
    "bf16, rounded by folds": lambda state: state.bfloat16().float(),
    "fp8 e4m3, scale a row": float8,
    "int8, scale a row": grouped(1),
    "the same, stochastic": grouped(1, is_random=True),
    "the same, clipped at 0.9": grouped(1, clip=0.9),
    "the same, best clip": best_clip,
    "the same, rotated": rotated,
    "int8, scale and offset a row": with_offset,
    "int8, scale for 64": lambda state: grouped(state.shape[-1] // 64)(state),
    "int8, scale for 32": lambda state: grouped(state.shape[-1] // 32)(state),
    "int8, scale for 16": lambda state: grouped(state.shape[-1] // 16)(state),
    "int8, bf16 scale for 32 (chosen)": chosen,
}


def unit(x: Tensor) -> Tensor:
    """Scale rows to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def random_rows(length: int, dim: int, keys: str, generator: torch.Generator) -> list[Tensor]:
    """Return q, k, v, a, b [requests, length, heads, ...], rounded to bf16."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    q, k, v = (normal(REQUESTS, length, HEADS, dim) for _ in range(3))
    if keys == "with a mean":
        mean = normal(HEADS, dim)
        q, k = q + mean, k + mean
    if keys == "with outliers":
        factor = torch.ones(dim, device="cpu")
        factor[::16] = 6.0
        q, k = q * factor, k * factor
    gates = (normal(REQUESTS, length, HEADS) for _ in range(2))
    device = torch.get_default_device()
    return [part.bfloat16().float().to(device) for part in (q, k, v, *gates)]


class Exact:
    """Decodes token by token; `state` [..., requests, heads, V, K] may be many states."""

    def __init__(self, state: Tensor, A_log: Tensor, beta_scale: float) -> None:
        self.state, self.A, self.beta_scale = state, A_log.to(state.dtype).exp(), beta_scale

    def advance(self, rows: list[Tensor], ring: torch.dtype | None = None) -> Tensor:
        """Take in one token of every request; return outputs.

        Args:
            rows: q, k, v, a, b [requests, heads, ...].
            ring: dtype to which u and k are rounded before they are added to the state.
        """
        q, k, v, a, b = (part.to(self.state.dtype) for part in rows)
        q, k = unit(q), unit(k)
        self.state.mul_((-self.A * F.softplus(a)).exp()[..., None, None])
        told = (self.state @ k[..., None]).squeeze(-1)
        u = self.beta_scale * b.sigmoid()[..., None] * (v - told)
        y = (self.state @ q[..., None]).squeeze(-1) + u * (q * k).sum(-1, keepdim=True)
        if ring is not None:
            u, k = u.to(ring).to(u.dtype), k.to(ring).to(k.dtype)
        self.state.add_(u[..., None] * k[..., None, :])
        return y


class ThroughVerify:
    """Decodes through the operators."""

    def __init__(self, dtype: torch.dtype, dim: int, A_log: Tensor, beta_scale: float) -> None:
        shape = (REQUESTS, HEADS, dim, dim)
        self.state = torch.zeros(shape, dtype=dtype)
        self.scale = None
        if dtype == torch.int8:
            self.scale = torch.zeros(*shape[:3], dim // GROUP_SIZE, dtype=SCALE_DTYPE)
        ints = torch.zeros(3, REQUESTS, dtype=torch.int32)
        self.seq_len = ints[0]
        self.ring = RingView(
            k=torch.zeros(REQUESTS, HEADS, 32, dim, dtype=torch.bfloat16),
            u=torch.zeros(REQUESTS, HEADS, 32, dim, dtype=torch.bfloat16),
            cum_log_decay=torch.zeros(REQUESTS, HEADS, 32),
            ring_start=ints[1],
            history_len=ints[2],
            max_window=WINDOW,
        )
        self.A_log, self.beta_scale = A_log, beta_scale

    def step(self, rows: list[Tensor], count: Tensor) -> Tensor:
        """Verify rows [requests, T, ...] and commit count[b] of each; return all outputs."""
        size, ring = rows[0].shape[1], self.ring
        if rows[0].is_cuda:
            rows = [part.bfloat16() for part in rows]
        slots = torch.arange(REQUESTS, dtype=torch.int32)
        verified, is_fold = torch.full_like(slots, size), slots.to(torch.int8)
        ring_ops.decide_folds(ring.history_len, slots, verified, is_fold, max_window=WINDOW)
        out = gated_delta_rule.verify(
            *(part.flatten(0, 1) for part in rows), self.A_log, torch.zeros(HEADS), self.state,
            ring, size * torch.arange(REQUESTS + 1, dtype=torch.int32), slots,
            max_verify_tokens=size, is_fold=is_fold, scale=1.0, beta_scale=self.beta_scale,
            state_scale=self.scale,
        )  # fmt: skip
        ring_ops.commit(
            self.seq_len, ring.ring_start, ring.history_len, slots, is_fold, verified, count,
            ring_capacity=32,
        )  # fmt: skip
        return out.view(REQUESTS, size, HEADS, -1)


@torch.no_grad()
def run(
    tokens: int, *, dim: int = 128, size: int = 4, keys: str = "normal", beta_scale: float = 1.0
) -> list[dict]:
    """Return a row of figures for each form."""
    generator = torch.Generator("cpu").manual_seed(0)
    A_log = torch.linspace(-9.0, -2.0, HEADS)
    rows = random_rows(tokens + size, dim, keys, generator)
    shape = (REQUESTS, HEADS, dim, dim)
    exact = Exact(torch.zeros(shape, dtype=torch.float64), A_log, beta_scale)
    rounded = Exact(torch.zeros(shape), A_log, beta_scale)
    forms = Exact(torch.zeros(len(FORMS), *shape), A_log, beta_scale)
    accepted = [count_steps(tokens, size, generator) for _ in range(REQUESTS)]
    wrong = torch.zeros(len(FORMS) + 3, HEADS, dtype=torch.float64)
    right = torch.zeros(HEADS, dtype=torch.float64)
    outputs = []
    for t in range(tokens):
        row = [part[:, t] for part in rows]
        for b, (_, folds) in enumerate(accepted):
            if t in folds:
                for state, form in zip(forms.state, FORMS.values(), strict=True):
                    state[b] = form(state[b])
        y, each = exact.advance(row), forms.advance(row, torch.bfloat16)
        rounded.advance(row)
        rounded.state = rounded.state.bfloat16().float()
        from_rounded = (rounded.state @ unit(row[0])[..., None]).squeeze(-1)
        errors = torch.cat((each, from_rounded[None])).double() - y
        wrong[: len(FORMS) + 1] += errors.square().sum((1, 3))
        right += y.square().sum((0, 2))
        outputs.append(y)
    truth = torch.stack(outputs, 1)
    names = [*FORMS, "bf16, rounded every token"]
    for i, dtype in enumerate((torch.bfloat16, torch.int8)):
        name = {torch.bfloat16: "bf16", torch.int8: "the chosen form"}[dtype]
        names.append(f"{name}, through verify")
        wrong[len(FORMS) + 1 + i] = verify_errors(
            ThroughVerify(dtype, dim, A_log, beta_scale), rows, truth, [c for c, _ in accepted]
        )
    error, by_head = (wrong.sum(1) / right.sum()).sqrt(), (wrong / right).sqrt()
    base = len(FORMS)
    setting = {"dim": dim, "rows": size, "keys": keys, "beta_scale": beta_scale, "tokens": tokens}
    folds_after = tokens * REQUESTS / sum(len(folds) for _, folds in accepted)
    return [
        {
            **setting,
            "tokens_per_fold": round(folds_after, 2),
            "form": name,
            "error": error[i].item(),
            "ratio": (error[i] / error[base]).item(),
            "ratio_by_memory": {
                str(round(1.24 / decay)): round(ratio, 3)
                for decay, ratio in zip(
                    A_log.exp().tolist(), (by_head[i] / by_head[base]).tolist(), strict=True
                )
            },
        }
        for i, name in enumerate(names)
    ]


def count_steps(tokens: int, size: int, generator: torch.Generator) -> tuple[list[int], set[int]]:
    """Draw how many rows each step commits; return that, and the tokens before which it folds."""
    counts: list[int] = []
    folds, position, live = set(), 0, 0
    while position < tokens:
        if live + size > WINDOW:
            folds.add(position)
            live = 0
        count = int(torch.randint(0, size + 1, (), generator=generator, device="cpu"))
        counts.append(min(count, tokens - position))
        live, position = live + counts[-1], position + counts[-1]
    return counts, folds


def verify_errors(
    decoder: ThroughVerify, rows: list[Tensor], truth: Tensor, counts: list[list[int]]
) -> Tensor:
    """Return squared errors of the committed rows' outputs, by head."""
    size = rows[0].shape[1] - truth.shape[1]
    position, total = [0] * REQUESTS, torch.zeros(HEADS, dtype=torch.float64)
    for index in range(max(map(len, counts))):
        count = [some[index] if index < len(some) else 0 for some in counts]
        fed = [
            torch.stack([part[b, p : p + size] for b, p in enumerate(position)]) for part in rows
        ]
        out = decoder.step(fed, torch.tensor(count, dtype=torch.int32))
        for b, n in enumerate(count):
            errors = out[b, :n].double() - truth[b, position[b] : position[b] + n]
            total += errors.square().sum((0, 2))
            position[b] += n
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of a request")
    parser.add_argument("--first", action="store_true", help="the first setting only")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    rows = []
    for setting in SETTINGS[:1] if options.first else SETTINGS:
        found = run(options.tokens, **setting)
        print(f"\n{setting or 'K = V = 128, T = 4'}, {found[0]['tokens_per_fold']} tokens a fold")
        for row in found:
            by_memory = " ".join(f"{ratio:.2f}" for ratio in row["ratio_by_memory"].values())
            print(
                f"{row['form']:34} {row['error']:.2e} {row['ratio']:.3f} | {by_memory}", flush=True
            )
        rows += found
    result = {
        "commit": measured_commit(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
