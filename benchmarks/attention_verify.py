"""Time attention of a verify step on a GPU: Triton over pages beside FlashAttention-3 over caches.

Every call is compared with fp64 on a few requests before it is timed: outputs, and the rows that it
stored. Triton appends new keys and values in the same call. FlashAttention-3 (fa3-fwd) reads
contiguous caches by `cache_batch_idx` and is timed both ways: only attending, with the new rows in
place already, and appending them.

    python benchmarks/attention_verify.py --json benchmarks/results/attention_verify_h200.json
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from harness import (
    BEST_READ_RATE,
    Variant,
    need_gpu,
    read_pool,
    time_interleaved,
    write_rows,
)
from hybridspec.ops.paged_attention import Batch, Pages, Rows, launch, verify

PAGE_SIZES = (16, 128)
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
CHECKED, READ_BLOCK = 6, 16384
BARS = {"row": 1.10, "random": 1.25}


@dataclass(frozen=True)
class Setting:
    """One shape; `rows` and `context` are those of each request, or ranges that it draws from."""

    name: str
    batch: int
    context: int
    rows: int
    num_query_heads: int
    num_heads: int
    head_dim: int
    shortest: int = 0
    fewest: int = 0
    dtype: str = "bfloat16"

    def lengths(self, generator: random.Random) -> tuple[list[int], list[int]]:
        """Draw the positions stored before the step and the new rows of each request."""
        shortest, fewest = self.shortest or self.context, self.fewest or self.rows
        new = [generator.randint(fewest, self.rows) for _ in range(self.batch)]
        total = [generator.randint(shortest, self.context) for _ in range(self.batch)]
        return [max(n - t, 0) for n, t in zip(total, new, strict=True)], new


ROWS = (
    Setting("row", 1, 65536, 4, 16, 2, 256),
    Setting("row", 8, 8192, 4, 16, 2, 256),
    Setting("row", 32, 8192, 4, 16, 2, 256),
    Setting("row", 32, 8192, 8, 16, 2, 256),
    Setting("row", 64, 16384, 4, 16, 2, 256),
    Setting("row", 32, 8192, 4, 32, 8, 128),
)
# Many short requests, as a server has them: 16 / 4 heads of 256, a 9B model's.
SHORT = tuple(
    Setting("short", batch, context, rows, 16, 4, 256)
    for batch, context in ((32, 256), (128, 256), (256, 256), (256, 512), (256, 1024))
    for rows in (1, 4)
)


def random_settings(number: int, seed: int) -> list[Setting]:
    """Draw shapes: lengths differ up to fourfold, a request has from 1 to T rows."""
    generator = random.Random(seed)
    heads = [(16, 2), (32, 8), (64, 8), (24, 4), (8, 8), (16, 1), (28, 4)]
    settings: list[Setting] = []
    while len(settings) < number:
        batch = 2 ** generator.randint(0, 8)
        context = int(2 ** generator.uniform(10, 16))
        query_heads, kv_heads = generator.choice(heads)
        head_dim = generator.choice([64, 96, 128, 128, 192, 256, 256])
        if not 2**25 <= batch * context * kv_heads * head_dim * 4 <= 2**32:
            continue
        settings.append(
            Setting(
                "random", batch, context, generator.choice([1, 2, 4, 4, 6, 8]), query_heads,
                kv_heads, head_dim, shortest=context // 4, fewest=1,
            )
        )  # fmt: skip
    return settings


class Call:
    """The tensors of a setting: one contiguous cache, and the same keys in scattered pages."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting = setting
        generator = torch.Generator("cuda").manual_seed(seed)
        self.positions, self.num_tokens = setting.lengths(random.Random(seed))
        dtype = getattr(torch, setting.dtype)
        batch, slots = setting.batch, setting.batch + 1
        bounds = [0, *itertools.accumulate(self.num_tokens)]
        num_rows, largest = bounds[-1], max(PAGE_SIZES)
        needed = max(p + n for p, n in zip(self.positions, self.num_tokens, strict=True))
        capacity = -(-needed // largest) * largest

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

        heads, size = setting.num_heads, setting.head_dim
        self.q = normal(num_rows, setting.num_query_heads, size)
        self.k, self.v = normal(num_rows, heads, size), normal(num_rows, heads, size)
        self.caches = torch.empty(2, slots, capacity, heads, size, device="cuda", dtype=dtype)
        for cache in self.caches.flatten(0, 1):
            cache.normal_(generator=generator)
        order = torch.randperm(slots, generator=generator, device="cuda")
        self.slots = order[:batch].to(torch.int32)
        self.seq_len = torch.zeros(slots, dtype=torch.int32, device="cuda")
        self.seq_len[self.slots.long()] = torch.tensor(
            self.positions, dtype=torch.int32, device="cuda"
        )
        self.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        self.lengths = self.seq_len[self.slots.long()]
        self.all_lengths = self.lengths + self.cu_seqlens.diff()
        self.out = torch.empty_like(self.q)
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        # Largest pages scattered; smaller ones are scattered anew, each with its own copy.
        self.pages = {page_size: self._scatter(page_size, generator) for page_size in PAGE_SIZES}
        self._append_to_caches()

    def _scatter(self, page_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return pools [2, P, page_size, Hkv, D] and a page table with the keys of the caches."""
        slots = self.caches.shape[1]
        cut = self.caches.unflatten(2, (-1, page_size)).flatten(1, 2)
        places = torch.randperm(cut.shape[1], generator=generator, device="cuda")
        pools = torch.empty_like(cut)
        for pool, source in zip(pools, cut, strict=True):
            pool[places] = source
        return pools, places.to(torch.int32).view(slots, -1)

    def _append_to_caches(self) -> None:
        """Store the new rows where FlashAttention-3 expects them when it only attends."""
        for i, (position, begin, end) in enumerate(
            zip(self.positions, *self._bounds(), strict=True)
        ):
            slot = int(self.slots[i])
            for cache, new in zip(self.caches, (self.k, self.v), strict=True):
                cache[slot, position : position + end - begin] = new[begin:end]

    def _bounds(self) -> tuple[list[int], list[int]]:
        bounds = self.cu_seqlens.tolist()
        return bounds[:-1], bounds[1:]

    def triton(
        self,
        page_size: int,
        config: launch.LaunchConfig | None = None,
        *,
        backend: str = "triton",
    ) -> None:
        pools, table = self.pages[page_size]
        arguments = (
            self.q, self.k, self.v, *pools, table, self.seq_len, self.cu_seqlens, self.slots,
        )  # fmt: skip
        if config is None:
            verify(*arguments, max_verify_tokens=self.setting.rows, out=self.out, backend=backend)
        else:
            rows = Rows(self.q, self.k, self.v, self.out, self.setting.head_dim**-0.5)
            batch = Batch(self.cu_seqlens, self.slots, self.setting.rows)
            launch.verify(rows, Pages(*pools, table, self.seq_len), batch, config=config)

    def flash_attention(self, *, appends: bool) -> Tensor:
        from fa3_fwd_interface import flash_attn_with_kvcache

        new = {"k": self.k, "v": self.v, "cu_seqlens_k_new": self.cu_seqlens} if appends else {}
        return flash_attn_with_kvcache(
            self.q, *self.caches, **new,
            cache_seqlens=self.lengths if appends else self.all_lengths,
            cache_batch_idx=self.slots, cu_seqlens_q=self.cu_seqlens,
            max_seqlen_q=self.setting.rows, causal=True,
        )  # fmt: skip

    def expected(self, index: int) -> tuple[Tensor, Tensor]:
        """fp64 output of one request, and the same in the dtype of the call; computed once."""
        if index not in self.known:
            self.known[index] = self._attend(index)
        return self.known[index]

    def _attend(self, index: int) -> tuple[Tensor, Tensor]:
        setting, slot = self.setting, int(self.slots[index])
        begin, end = (bounds[index] for bounds in self._bounds())
        length = self.positions[index] + end - begin
        results = []
        for dtype in (torch.float64, self.q.dtype):
            q = self.q[begin:end].to(dtype).transpose(0, 1)
            k, v = (
                cache[slot, :length].to(dtype).transpose(0, 1).repeat_interleave(
                    setting.num_query_heads // setting.num_heads, 0
                )
                for cache in self.caches
            )  # fmt: skip
            mask = torch.ones(end - begin, length, dtype=torch.bool, device="cuda")
            results.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask.tril(length - end + begin)
                ).transpose(0, 1)
            )
        return results[0], results[1]

    def check(self, run: Callable[[], Tensor | None], name: str) -> None:
        """Raise unless a few requests are as near to fp64 as PyTorch in the same dtype, twice."""
        self.out.fill_(torch.nan)
        result = run()
        out = self.out if result is None else result
        if not out.isfinite().all():
            raise AssertionError(f"{name}: not finite in {self.setting}")
        index = torch.linspace(0, self.setting.batch - 1, CHECKED).long().unique().tolist()
        for i in index:
            right, plain = self.expected(i)
            found = out[self.cu_seqlens[i] : self.cu_seqlens[i + 1]]
            error = (found.double() - right).abs().max()
            allowed = 2 * (plain.double() - right).abs().max()
            if not error <= allowed:
                raise AssertionError(f"{name}: {error:.2e} > {allowed:.2e} in {self.setting}")

    def check_pages(self, page_size: int) -> None:
        """Raise unless all rows were stored where the page table says."""
        (k_pages, v_pages), table = self.pages[page_size]
        for i, (position, begin, end) in enumerate(
            zip(self.positions, *self._bounds(), strict=True)
        ):
            places = torch.arange(position, position + end - begin, device="cuda")
            pages = table[self.slots[i].long()][places // page_size].long()
            for pool, new in ((k_pages, self.k), (v_pages, self.v)):
                if not torch.equal(pool[pages, places % page_size], new[begin:end]):
                    raise AssertionError(f"request {i} not stored in {self.setting}")

    def num_bytes(self) -> int:
        setting = self.setting
        return launch.verify_bytes(
            self.positions, self.num_tokens, num_query_heads=setting.num_query_heads,
            num_heads=setting.num_heads, head_dim=setting.head_dim, itemsize=self.q.itemsize,
        )  # fmt: skip


def other_launches(setting: Setting) -> dict[str, launch.LaunchConfig]:
    """Launches with other blocks and programs, page size 16."""
    if setting.name == "random":
        return {}
    device = torch.cuda.get_device_properties(0)
    group = setting.num_query_heads // setting.num_heads
    chosen = launch.choose_launch(
        (device.major, device.minor), device.multi_processor_count, 1, setting.rows * group,
        setting.head_dim, getattr(torch, setting.dtype).itemsize,
    )  # fmt: skip
    return {
        f"blocks of {keys}, {stages} stages, {factor} programs": replace(
            chosen, block_n=keys, num_stages=stages, num_programs=factor * chosen.num_programs
        )
        for keys, stages, factor in ((64, 3, 1), (32, 3, 2), (64, 2, 2))
    }


def measure(setting: Setting, iterations: int) -> list[dict]:
    """Check, then time all variants of a setting in one interleaved run."""
    call = Call(setting)
    sink = torch.empty(1, device="cuda")
    runs: dict[str, Callable[[], Tensor | None]] = {
        f"triton, page {page_size}": lambda page_size=page_size: call.triton(page_size)
        for page_size in PAGE_SIZES
    }
    runs["pieces, page 16"] = lambda: call.triton(16, backend="pieces")
    for name, config in other_launches(setting).items():
        runs[name] = lambda config=config: call.triton(16, config)
    runs["fa3, attention only"] = lambda: call.flash_attention(appends=False)
    runs["fa3 with append"] = lambda: call.flash_attention(appends=True)
    for name, run in runs.items():
        call.check(run, name)
    for page_size in PAGE_SIZES:
        call.check_pages(page_size)
    num_bytes = call.num_bytes()
    num_elements = min(num_bytes // 2, call.caches.numel()) // READ_BLOCK * READ_BLOCK
    variants = [Variant("read", lambda: read_pool(call.caches, num_elements, sink))]
    variants += [Variant(name, run) for name, run in runs.items()]
    timings = time_interleaved(variants, iterations)
    peer = timings["fa3, attention only"].median
    rows = []
    for name, timing in timings.items():
        row = asdict(setting) | {"variant": name}
        row |= {key: round(value, 2) for key, value in vars(timing).items()}
        row["x_fa3"] = round(timing.median / peer, 3)
        if name != "read":
            row["bytes"] = num_bytes
            row["tb_per_s"] = round(num_bytes / timing.median / 1e6, 3)
            row["share_of_floor"] = round(1e12 * row["tb_per_s"] / BEST_READ_RATE, 3)
        rows.append(row)
    return rows


def compile_setting(setting: Setting) -> None:
    """Compile the kernels of a setting into Triton's cache, with short contexts."""
    call = Call(replace(setting, context=256, shortest=0))
    for page_size in PAGE_SIZES:
        call.triton(page_size)
    call.triton(16, backend="pieces")
    for config in other_launches(setting).values():
        call.triton(16, config)
    torch.cuda.synchronize()


def compile_all(settings: list[Setting], jobs: int) -> None:
    """Compile in several processes; one alone would take minutes."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_setting, settings))


def verdicts(rows: list[dict]) -> list[str]:
    """Compare with the bars: with FlashAttention-3 doing the same or less, pages of 16 with 128."""
    shapes: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in Setting.__dataclass_fields__)
        shapes.setdefault(key, {})[row["variant"]] = row["median"]
    small, large = (f"triton, page {size}" for size in PAGE_SIZES)
    lines = []
    for peer in ("fa3 with append", "fa3, attention only"):
        for kind, bar in BARS.items():
            ratios = [times[small] / times[peer] for key, times in shapes.items() if key[0] == kind]
            if ratios:
                lines.append(f"{kind}: at most {max(ratios):.3f} x {peer} (bar {bar})")
    worst = max(times[small] / times[large] for times in shapes.values())
    return [*lines, f"page 16: at most {worst:.3f} x page 128 (bar 1.03)"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", type=int, default=20, help="random shapes (default 20)")
    parser.add_argument("--seed", type=int, default=7, help="of the random shapes (default 7)")
    parser.add_argument("--iters", type=int, default=60, help="replays (default 60)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile (default 8)")
    parser.add_argument("--only", choices=["row", "short", "random"], help="shapes of this kind")
    parser.add_argument("--limit", type=int, help="only the first shapes")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    need_gpu()
    rows: list[dict] = []
    settings = [*ROWS, *SHORT, *random_settings(options.random, options.seed)]
    if options.only:
        settings = [setting for setting in settings if setting.name == options.only]
    settings = settings[: options.limit]
    compile_all(settings, options.jobs)
    for setting in settings:
        for row in measure(setting, options.iters):
            rows.append(row)
            print(
                f"{row['name']:6} B {row['batch']:3} L {row['context']:6} T {row['rows']} heads "
                f"{row['num_query_heads']}/{row['num_heads']} of {row['head_dim']:3} "
                f"{row['variant']:20} {row['median']:8.1f} us ({row['p20']:.1f}..{row['p80']:.1f}) "
                f"{row['x_fa3']:6.3f} x fa3"
                + (f"  {row['tb_per_s']:.2f} TB/s" if "bytes" in row else "")
            )
        torch.cuda.empty_cache()
    print(*verdicts(rows), sep="\n")
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
