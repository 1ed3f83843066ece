"""Time the GDN verify step on a GPU beside a kernel that only reads the states.

Every call is compared with the reference in fp64 on a few requests before it is timed. Pools, rings
and cursors are put back from copies before every replay, outside the timed region; folding requests
are scattered, and their share is asserted. Of the figures, the multiple of the state read counts.

    python benchmarks/gdn_verify.py --json benchmarks/results/gdn_verify_h200.json
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from harness import (
    BEST_READ_RATE,
    Variant,
    need_gpu,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.compat import flashinfer as compat
from hybridspec.ops import gated_delta_rule
from hybridspec.ops import ring as ring_ops
from hybridspec.ops.gated_delta_rule.int8_state import GROUP_SIZE, SCALE_DTYPE, quantise, widen
from hybridspec.ops.gated_delta_rule.launch import verify_bytes
from hybridspec.ops.ring import RingView

BF16, F16, F32, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
# name: activations, state, ring
MODES = {
    "bf16": (BF16, BF16, BF16),
    "fp16_io": (F16, F16, F16),
    "fp16_state": (BF16, F16, BF16),
    "ring_fp16": (BF16, BF16, F16),
    "fp16_state_cache": (BF16, F16, F16),
    "fp32_state": (BF16, F32, BF16),
    "fp32_state_ring": (BF16, F32, F32),
    "fp32": (F32, F32, F32),
    "int8_state": (BF16, I8, BF16),
}
GEOMETRIES = {"16/64": (16, 64), "16/48": (16, 48), "16/32": (16, 32), "16/16": (16, 16)}
MIXED = (1, 2, 3, 4, 4, 5, 6, 7)
TOLERANCES = {BF16: 1e-2, F16: 4e-3, F32: 1e-5, I8: 1e-2}
HEAD_DIM, CAPACITY, CHECKED = 128, 32, 8


@dataclass(frozen=True)
class Setting:
    """One row of the table; `rows` 0 is the mixed batch 1, 2, 3, 4, 4, 5, 6, 7."""

    batch: int
    share: float
    rows: int = 4
    history: int = 12
    mode: str = "bf16"
    geometry: str = "16/64"
    base: int = -1
    max_window: int = 16

    @property
    def fold_history(self) -> int:
        return self.max_window + 1 - self.rows if self.rows else 9


class Call:
    """The tensors of a setting, their copies, and the calls to time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        generator = torch.Generator("cuda").manual_seed(0)
        self.heads, self.value_heads = heads, value_heads = GEOMETRIES[setting.geometry]
        act, state, ring = MODES[setting.mode]
        batch, slots = setting.batch, setting.batch + 1
        self.lengths = [setting.rows] * batch
        if not setting.rows:
            self.lengths = list(itertools.islice(itertools.cycle(MIXED), batch))
        num_rows = sum(self.lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.rows = [
            normal(num_rows, *shape).to(act)
            for shape in (
                (heads, HEAD_DIM), (heads, HEAD_DIM), (value_heads, HEAD_DIM), (value_heads,),
                (value_heads,),
            )
        ]  # fmt: skip
        self.params = [normal(value_heads) * 0.3, normal(value_heads) * 0.3]
        pool = torch.empty(slots, value_heads, HEAD_DIM, HEAD_DIM, dtype=state, device="cuda")
        factors = []
        if state == I8:
            shape = (*pool.shape[:3], HEAD_DIM // GROUP_SIZE)
            factors = [torch.empty(shape, dtype=SCALE_DTYPE, device="cuda")]
        for slot in range(slots):
            drawn = normal(value_heads, HEAD_DIM, HEAD_DIM)
            if factors:
                quantise(drawn, pool[slot], factors[0][slot])
            else:
                pool[slot] = drawn
        k = F.normalize(normal(slots, heads, CAPACITY, HEAD_DIM), dim=-1).to(ring)
        u = normal(slots, value_heads, CAPACITY, HEAD_DIM).to(ring)
        starts = torch.randint(0, CAPACITY, (slots,), generator=generator, device="cuda")
        if setting.base >= 0:
            starts.fill_(setting.base)
        lengths = torch.full((slots,), setting.history, device="cuda")
        order = torch.randperm(slots, generator=generator, device="cuda")
        self.slots = order[:batch].to(torch.int32)
        num_folds = round(batch * setting.share)
        folding = torch.randperm(batch, generator=generator, device="cuda")[:num_folds]
        lengths[self.slots[folding].long()] = setting.fold_history
        age = (torch.arange(CAPACITY, device="cuda") - starts[:, None]) % CAPACITY
        gaps = 0.2 * torch.rand(
            slots, value_heads, CAPACITY, generator=generator, device="cuda"
        ).cumsum(2)
        cum = -gaps.gather(2, age[:, None].expand_as(gaps))
        self.pristine = [pool, k, u, cum, *factors]
        self.working = [part.clone() for part in self.pristine]
        self.cursors = [starts.to(torch.int32), lengths.to(torch.int32)]
        self.initial_cursors = [cursor.clone() for cursor in self.cursors]
        bounds = [0, *itertools.accumulate(self.lengths)]
        self.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        self.verified = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.marks = torch.zeros(batch, dtype=torch.int8, device="cuda")
        self.is_fold = self.marks.clone()
        ring_ops.decide_folds(
            self.cursors[1], self.slots, self.verified, self.marks, max_window=setting.max_window
        )
        assert int(self.marks.sum()) == num_folds, "the benchmark does not fold as it says"
        self.num_committed = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.seq_len = torch.zeros(slots, dtype=torch.int32, device="cuda")
        self.out = torch.full_like(self.rows[2], torch.nan)
        self.by_row = [cursor[self.slots.long()].contiguous() for cursor in self.cursors]
        self.initial_by_row = [cursor.clone() for cursor in self.by_row]

    def ring(self, k: torch.Tensor, u: torch.Tensor, cum: torch.Tensor) -> RingView:
        return RingView(
            k=k, u=u, cum_log_decay=cum, ring_start=self.cursors[0], history_len=self.cursors[1]
        )

    def restore(self) -> None:
        """Put back everything that a step changes."""
        skipped = 0 if self.setting.share else 1
        for part, copy in list(zip(self.working, self.pristine, strict=True))[skipped:]:
            part.copy_(copy)
        for current, initial in (
            (self.cursors, self.initial_cursors),
            (self.by_row, self.initial_by_row),
        ):
            for cursor, copy in zip(current, initial, strict=True):
                cursor.copy_(copy)
        self.verified.copy_(self.cu_seqlens.diff())
        self.is_fold.copy_(self.marks)

    def verify(self, backend: str = "auto") -> None:
        state, k, u, cum, *factors = self.working
        gated_delta_rule.verify(
            *self.rows, *self.params, state, self.ring(k, u, cum), self.cu_seqlens, self.slots,
            max_verify_tokens=max(self.lengths), is_fold=self.is_fold, out=self.out,
            state_scale=factors[0] if factors else None, backend=backend,
        )  # fmt: skip

    def verify_and_commit(self) -> None:
        self.verify()
        ring_ops.commit(
            self.seq_len, *self.cursors, self.slots, self.is_fold, self.verified,
            self.num_committed, ring_capacity=CAPACITY,
        )  # fmt: skip

    def flashinfer_arguments(self, *, restarts: bool) -> dict:
        q, k, v, a, b = (part.unflatten(0, (self.setting.batch, -1)) for part in self.rows)
        state, k_cache, u_cache, g_cache = self.working
        return {
            "A_log": self.params[0], "a": a, "dt_bias": self.params[1], "q": q, "k": k, "v": v,
            "b": b, "initial_state_source": state, "initial_state_indices": self.slots,
            "k_cache": k_cache, "u_cache": u_cache, "g_cache": g_cache,
            "hist_len": self.by_row[1], "cache_base": self.by_row[0],
            "output": self.out.unflatten(0, (self.setting.batch, -1)),
            "restart_hist_on_flush": restarts,
        }  # fmt: skip

    def check(self, run: Callable[[], object], name: str) -> None:
        """Raise unless a few requests agree with the reference in fp64."""
        self.restore()
        self.out.fill_(torch.nan)
        run()
        index = torch.linspace(0, self.setting.batch - 1, CHECKED).long().unique().tolist()
        bounds = self.cu_seqlens.tolist()
        taken = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in index]).cuda()
        slots = self.slots[index].long()
        state, k, u, cum = (part.double() for part in wide(self.pristine, slots))
        starts, lengths = (cursor[slots] for cursor in self.initial_cursors)
        ring = RingView(k=k, u=u, cum_log_decay=cum, ring_start=starts, history_len=lengths)
        cu_seqlens = torch.tensor(
            [0, *itertools.accumulate(self.lengths[i] for i in index)], dtype=torch.int32
        ).cuda()
        expected = gated_delta_rule.verify(
            *(part[taken].double() for part in self.rows), *self.params, state, ring, cu_seqlens,
            torch.arange(len(index), dtype=torch.int32, device="cuda"),
            max_verify_tokens=max(self.lengths), is_fold=self.marks[index], backend="reference",
        )  # fmt: skip
        bound = max(TOLERANCES[dtype] for dtype in MODES[self.setting.mode])
        found = [self.out[taken], *wide(self.working, slots)]
        for part, right in zip(found, (expected, state, k, u, cum), strict=True):
            error = (part.double() - right).norm() / right.norm()
            if not error <= bound:
                raise AssertionError(f"{name}: wrong by {error:.2e} in {self.setting}")

    def num_bytes(self) -> int:
        act, state, ring = MODES[self.setting.mode]
        slots = self.slots.long()
        return verify_bytes(
            self.initial_cursors[1][slots].tolist(), self.lengths, self.marks.bool().tolist(),
            num_heads=self.heads, num_value_heads=self.value_heads, key_dim=HEAD_DIM,
            value_dim=HEAD_DIM, act=act, state=state, ring=ring,
        )  # fmt: skip


def wide(pools: list[torch.Tensor], slots: torch.Tensor) -> list[torch.Tensor]:
    """State, keys, corrections and decays of slots; an 8-bit state as the values it stands for."""
    state, *rest = (part[slots] for part in pools)
    if state.dtype == I8:
        state = widen(state, rest.pop(), torch.float64)
    return [state, *rest]


def peers(call: Call) -> dict[str, Callable[[], object]]:
    """Return other implementations that are importable and serve the setting."""
    found: dict[str, Callable[[], object]] = {}
    setting = call.setting
    if importlib.util.find_spec("flashinfer") and setting.rows in (4, 8) and setting.mode == "bf16":
        from flashinfer.gdn_kernels import gdn_decode_bf16_wy_ucache_flush as peer

        arguments = call.flashinfer_arguments(restarts=False)
        found["flashinfer"] = lambda: peer.gated_delta_rule_mtp_ucache_flush(**arguments)
    if importlib.util.find_spec("fla") and setting.rows == 1 and not setting.share:
        found["flash-linear-attention"] = decode_in_place(call)
    return found


def decode_in_place(call: Call) -> Callable[[], object]:
    """Return decoding with flash-linear-attention's kernel that rewrites states, checked once."""
    from fla.ops.gated_delta_rule.fused_recurrent import (
        fused_recurrent_gated_delta_rule_fwd_kernel as kernel,
    )

    batch, block_v = call.setting.batch, 8  # the block that its own launch chooses
    q, k, v, a, b = call.rows
    state, out = call.pristine[0][:batch].clone(), torch.empty_like(v)

    def run() -> None:
        kernel[(HEAD_DIM // block_v * batch * call.value_heads,)](
            q=q, k=k, v=v, g=a, gk=None, gv=None, beta=b, A_log=call.params[0],
            dt_bias=call.params[1], o=out, h0=state, ht=state, cu_seqlens=None,
            scale=HEAD_DIM**-0.5, T=1, H=call.heads, HV=call.value_heads, K=HEAD_DIM, V=HEAD_DIM,
            BK=HEAD_DIM, BV=block_v, IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True,
            APPLY_BETA_SIGMOID=True, ALLOW_NEG_EIGVAL=False, STATE_V_FIRST=True, num_warps=1,
            num_stages=3,
        )  # fmt: skip

    run()
    ratio = call.value_heads // call.heads
    query, key = (F.normalize(x[0].double(), dim=-1).repeat_interleave(ratio, 0) for x in (q, k))
    decay = torch.exp(-call.params[0].exp() * F.softplus(a[0].float() + call.params[1])).double()
    expected = call.pristine[0][0].double() * decay[:, None, None]
    corrections = v[0].double() - (expected @ key[..., None]).squeeze(-1)
    expected += (b[0].double().sigmoid()[:, None] * corrections)[..., None] * key[:, None]
    outputs = (expected @ query[..., None]).squeeze(-1) * HEAD_DIM**-0.5
    for actual, right in ((state[0], expected), (out[0], outputs)):
        assert (actual.double() - right).norm() <= 1e-2 * right.norm(), "the peer is wrong"
    return run


def measure(setting: Setting, iterations: int, *, with_commit: bool) -> list[dict]:
    """Check, then time all variants of a setting in one interleaved run."""
    call = Call(setting)
    sink = torch.empty(1, device="cuda")
    pool = call.pristine[0]
    if pool.dtype == I8:  # compared with reading states of 16 bits
        pool = torch.zeros(pool.shape, dtype=BF16, device="cuda")
    num_elements = pool[: setting.batch].numel()
    runs: dict[str, Callable[[], object]] = {"hybridspec": call.verify}
    if setting.mode in ("bf16", "fp16_io", "fp32_state"):  # where "auto" takes another kernel
        runs["triton"] = lambda: call.verify("triton")
    if with_commit:
        runs["hybridspec + commit"] = call.verify_and_commit
    if setting.rows and setting.mode != "int8_state":
        for name, restarts in (("compat", False), ("compat + restart", True)):
            if restarts and not with_commit:
                continue
            arguments = call.flashinfer_arguments(restarts=restarts)
            runs[name] = lambda arguments=arguments: compat.gated_delta_rule_mtp_ucache_flush(
                **arguments
            )
    for name, run in runs.items():
        call.check(run, name)
    runs |= peers(call)
    variants = [Variant("state read", lambda: read_pool(pool, num_elements, sink))]
    variants += [Variant(name, run, call.restore) for name, run in runs.items()]
    timings, num_bytes = time_interleaved(variants, iterations), call.num_bytes()
    read = timings["state read"].median
    rows = []
    for name, timing in timings.items():
        row = vars(setting) | {"variant": name} | {k: round(v, 2) for k, v in vars(timing).items()}
        row["x_state_read"] = round(timing.median / read, 3)
        if name != "state read":
            row["bytes"] = num_bytes
            row["tb_per_s"] = round(num_bytes / timing.median / 1e6, 3)
            floor = 1e6 * num_bytes / BEST_READ_RATE
            row["floor_us"] = round(floor, 2)
            row["share_of_floor"] = round(floor / timing.median, 3)
        rows.append(row)
    return rows


def cycle(mode: str = "bf16") -> list[Setting]:
    """Plain decoding over one cycle of the ring: windows of 1 to 16 rows, then the fold."""
    return [Setting(256, 0.0, 1, history, mode) for history in range(1, 16)] + [
        Setting(256, 1.0, 1, 16, mode)
    ]


def default_settings() -> list[Setting]:
    """What the documents quote."""
    settings = [
        Setting(batch, share) for batch in (8, 32, 64, 128, 256) for share in (0.0, 0.2, 0.4, 0.8)
    ]
    settings += [Setting(1, 0.0), Setting(1, 1.0)]
    for batch in (8, 32, 256):
        settings += [Setting(batch, 0.0, history=0), Setting(batch, 0.0, history=8)]
        settings += [Setting(batch, 0.0, 8, 8), Setting(batch, 1.0, 8, 9)]
        settings += [Setting(batch, 0.0, 0, 8), Setting(batch, 0.0, 1, 8)]
    settings += [Setting(256, 0.0, base=base) for base in (0, 26)]
    settings += [Setting(64, 0.4, mode=mode) for mode in list(MODES)[1:]]
    settings += [Setting(256, f, mode=m) for m in ("fp32_state", "int8_state") for f in (0.0, 0.4)]
    settings += cycle() + cycle("fp32_state")
    settings += [Setting(256, 0.4, geometry=name) for name in list(GEOMETRIES)[1:]]
    return settings


def parse_arguments() -> argparse.Namespace:
    modes = "\n".join(
        f"  {name:18}" + " / ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        for name, dtypes in MODES.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"modes (activations / state / ring):\n{modes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", type=int, nargs="+", help="requests")
    parser.add_argument("--share", type=float, nargs="+", default=[0.0], help="share that folds")
    parser.add_argument("--rows", type=int, default=4, help="T; 0: mixed lengths (default 4)")
    parser.add_argument("--history", type=int, default=12, help="live rows (default 12)")
    parser.add_argument("--mode", choices=MODES, default="bf16")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="16/64", help="H/HV")
    parser.add_argument("--base", type=int, default=-1, help="first ring row; -1: random")
    parser.add_argument("--iters", type=int, default=60, help="replays (default 60)")
    parser.add_argument("--with-commit", action="store_true", help="time commits too")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    need_gpu()
    settings = default_settings()
    if options.batch:
        settings = [
            Setting(
                batch, share, options.rows, options.history, options.mode, options.geometry,
                options.base,
            )
            for batch in options.batch
            for share in options.share
        ]  # fmt: skip
    rows: list[dict] = []
    for setting in settings:
        for row in measure(setting, options.iters, with_commit=options.with_commit):
            rows.append(row)
            print(
                f"B {row['batch']:4} T {row['rows']} history {row['history']:2} "
                f"{row['share']:4.0%} {row['mode']:16} {row['geometry']} base {row['base']:2} "
                f"{row['variant']:20} {row['median']:8.1f} us ({row['p20']:.1f}..{row['p80']:.1f}) "
                f"{row['x_state_read']:6.3f} x read"
                + (f"  {row['share_of_floor']:.2f} of floor" if "bytes" in row else "")
            )
        torch.cuda.empty_cache()
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
