"""FlashInfer's verification over raw rings: names, guards, cursors, results; the file by path."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
from torch import Tensor

from helpers.gdn_cases import Dtypes, Geometry, assert_same_bits
from helpers.gdn_oracle import Tokens, recurrence
from helpers.no_sync import no_sync
from helpers.raw_cases import REGIMES, RawCall, RawCase
from helpers.tolerances import error
from hybridspec.compat import flashinfer

LIST = (
    "A_log, a, dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=None, k=None, v=None, "
    "b=None, initial_state_source=None, initial_state_indices=None, k_cache=None, v_cache=None, "
    "a_cache=None, b_cache=None, hist_len=None, cache_base=None, flush_min=None, "
    "restart_hist_on_flush=True, use_qk_l2norm_in_kernel=True, scale=None, output=None"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MODES = {"bf16": BF16, "fp16": F16, "fp32": F32}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_signature() -> None:
    function = flashinfer.gated_delta_rule_mtp_vcache_flush
    parameters = inspect.signature(function).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(written) == LIST
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


class Call:
    """Four requests of T rows, in FlashInfer's layout; a raw call has the tensors."""

    def __init__(
        self,
        device: str = "cpu",
        rows: int = 4,
        history: tuple[int, ...] = (12, 0, 5, 9),
        slots: tuple[int, ...] = (4, 1, 0, 3),
        **changes: object,
    ) -> None:
        most = 16 - rows
        geometry = Geometry(1, 2, 128, 64, max_window=most)
        options = {"dtypes": Dtypes(BF16, F32, BF16), "geometry": geometry} | changes
        case = RawCase(
            "compat", (rows,) * 4, tuple(min(n, most) for n in history), (26, 3, 30, 21), slots,
            by_row=True, **options,
        )  # fmt: skip
        self.call, self.rows = RawCall(case, device), rows
        self.hist_len, self.cache_base = self.call.ring[5].clone(), self.call.ring[4].clone()
        self.hist_len[:] = torch.tensor(case.history)
        self.cache_base[:] = torch.tensor(case.starts)
        self.indices = torch.tensor(slots, dtype=torch.int32, device=device)

    def run(self, **changes: object) -> Tensor:
        call, ring = self.call, self.call.ring
        q, k, v, a, b = (part.unflatten(0, (4, self.rows)) for part in call.rows)
        arguments = {
            "A_log": call.A_log, "a": a, "dt_bias": call.dt_bias, "q": q, "k": k, "v": v, "b": b,
            "initial_state_source": call.state, "initial_state_indices": self.indices,
            "k_cache": ring.k, "v_cache": ring.v, "a_cache": ring.a, "b_cache": ring.b,
            "hist_len": self.hist_len, "cache_base": self.cache_base,
        }  # fmt: skip
        return flashinfer.gated_delta_rule_mtp_vcache_flush(**(arguments | changes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("state", MODES)
def test_outputs_states_rings_and_cursors(state: str, regime: str, device: str) -> None:
    call = Call(device, regime=regime, dtypes=Dtypes(BF16, MODES[state], BF16))
    expected = [call.call.expected(i) for i in range(4)]
    before = [pool.clone() for pool in (call.call.state, *call.call.ring[:4])]
    out = call.run(flush_min=9)
    assert out.dtype == BF16 and out.shape == (4, 4, 2, 64)
    assert call.hist_len.tolist() == [0, 0, 5, 0]
    assert call.cache_base.tolist() == [(26 + 12) % 32, 3, 30, (21 + 9) % 32]
    folds, history, starts = (True, False, False, True), (12, 0, 5, 9), (26, 3, 30, 21)
    for i, (y, folded) in enumerate(expected):
        slot = call.call.slots[i]
        assert error(out[i].cpu(), y) < 1e-2
        if folds[i]:
            bound = {BF16: 8e-3, F16: 1e-3, F32: 1e-4}[MODES[state]]
            assert error(call.call.state[slot].cpu(), folded) < bound
        else:
            assert_same_bits(call.call.state[slot], before[0][slot])
        new = [(starts[i] + history[i] + t) % 32 for t in range(4)]
        old = [row for row in range(32) if row not in new]
        for log, was, given in zip(call.call.ring[:4], before[1:], call.call.rows[1:], strict=True):
            appended = given[4 * i : 4 * i + 4].transpose(0, 1)
            assert_same_bits(log[slot][:, new], appended.to(log.dtype))
            assert_same_bits(log[slot][:, old], was[slot][:, old])


@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows(rows: int) -> None:
    call = Call(rows=rows)
    expected = [call.call.expected(i)[0] for i in range(4)]
    out = call.run()
    assert max(error(out[i], y) for i, y in enumerate(expected)) < 1e-2
    most = 16 - rows  # the default flushes the longest windows alone
    assert call.hist_len.tolist() == [n if n < most else 0 for n in call.call.case.history]


@pytest.mark.parametrize("device", DEVICES)
def test_a_session_equals_the_recurrence(device: str) -> None:
    """Many steps with rejections, windows that wrap, all rows sometimes committed."""
    call = Call(device, history=(0, 0, 0, 0))
    call.cache_base.zero_()
    generator = torch.Generator().manual_seed(3)
    tokens: list[list[list[Tensor]]] = [[] for _ in range(4)]
    first = call.call.state[list(call.call.slots)].double().cpu()
    for step in range(12):
        call.call.rows = call.call._rows(16, BF16)
        before = call.hist_len.clone()
        out = call.run(flush_min=9)
        folded = before.cpu() >= 9
        taken = torch.randint(0, 5, (4,), generator=generator) if step % 4 else torch.full((4,), 4)
        for i in range(4):
            new = [[part[4 * i + t].cpu() for part in call.call.rows] for t in range(4)]
            parts = [torch.stack(part) for part in zip(*tokens[i], *new, strict=True)]
            A_log, dt_bias = call.call.A_log.cpu(), call.call.dt_bias.cpu()
            y, _, states = recurrence(Tokens(*parts, A_log, dt_bias), first[i])
            assert error(out[i].cpu(), y[-4:]) < 1.5e-2
            if folded[i]:
                slot = call.call.slots[i]
                assert error(call.call.state[slot].cpu(), states[-5]) < 1e-4
            tokens[i] += new[: int(taken[i])]
        call.hist_len += taken.to(call.hist_len)
        assert int(call.hist_len.max()) <= 12
    assert int(call.cache_base.max()) > 0


def test_padding_is_left_alone() -> None:
    call = Call(slots=(4, -1, -3, 3))
    call.call.rows = [part.nan_to_num() for part in call.call.rows]
    hist = call.hist_len.clone()
    wide = torch.full((4, 6, 2, 64), 7.0, dtype=BF16)
    given = wide[:, 1:5]
    out = call.run(flush_min=1, output=given)
    assert out is given and (out[1:3] == 7).all() and (wide[:, [0, 5]] == 7).all()
    assert call.hist_len.tolist() == [0, int(hist[1]), int(hist[2]), 0]
    assert call.cache_base.tolist()[1:3] == [3, 30]
    call.hist_len.copy_(hist)
    assert (call.run(flush_min=13)[1:3] == 0).all()


def test_the_default_slots_and_the_default_base() -> None:
    call, other = (Call(slots=(0, 1, 2, 3)) for _ in range(2))
    call.cache_base.zero_()
    for log in (*call.call.ring[:4], *other.call.ring[:4]):
        log.nan_to_num_()
    given = call.run(flush_min=13, restart_hist_on_flush=False)
    changes = {"initial_state_indices": None, "cache_base": None, "restart_hist_on_flush": False}
    torch.testing.assert_close(other.run(flush_min=13, **changes), given, rtol=1e-3, atol=1e-3)


def test_without_restart_the_cursors_stay() -> None:
    call, other = Call(), Call()
    hist, base = call.hist_len.clone(), call.cache_base.clone()
    out = call.run(flush_min=9, restart_hist_on_flush=False)
    assert torch.equal(call.hist_len, hist) and torch.equal(call.cache_base, base)
    torch.testing.assert_close(out, other.run(flush_min=9), rtol=0, atol=0)
    torch.testing.assert_close(call.call.state, other.call.state, rtol=0, atol=0, equal_nan=True)


def test_one_more_than_the_longest_window_never_flushes() -> None:
    call = Call()
    before = call.call.state.clone()
    call.run(flush_min=13)
    assert_same_bits(call.call.state, before)
    assert call.hist_len.tolist() == [12, 0, 5, 9]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cache_base": None}, "caller-owned cache_base"),
        ({"flush_min": 0}, "flush_min"),
        ({"flush_min": 14}, "flush_min"),
        ({"flush_min": 9.0}, "flush_min"),
        ({"hist_len": int32(12, 0, 13, 0)}, "hist_len out of legal range"),
        ({"hist_len": int32(12, 0, -1, 0)}, "hist_len out of legal range"),
        ({"cache_base": int32(0, 32, 0, 0)}, "cache_base out of legal range"),
        ({"cache_base": torch.zeros(8, dtype=torch.int32)[::2]}, "contiguous"),
        ({"hist_len": torch.zeros(8, dtype=torch.int32)[::2]}, "contiguous"),
        ({"hist_len": None}, "hist_len"),
        ({"v_cache": None}, "v_cache"),
        ({"q": None}, "q: expected a tensor"),
        ({"a_cache": torch.zeros(7, 2, 32, dtype=BF16)}, "a_cache: expected dtype"),
        ({"v_cache": torch.zeros(7, 2, 16, 64, dtype=BF16)}, "v_cache"),
        ({"k_cache": torch.zeros(7, 1, 16, 128, dtype=BF16)}, "k_cache: expected 32 ring rows"),
        ({"output": torch.zeros(4, 3, 2, 64)}, "output"),
    ],
)  # fmt: skip
def test_guards(changes: dict, text: str) -> None:
    with pytest.raises(flashinfer.CallerError, match=text) as caught:
        Call().run(**changes)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, AssertionError)


def test_lengths_are_checked_without_restart_too() -> None:
    hist = int32(12, 0, 13, 0)
    with pytest.raises(ValueError, match="hist_len out of legal range"):
        Call().run(hist_len=hist, restart_hist_on_flush=False)


@pytest.mark.parametrize("changes", [{"softplus_beta": 2.0}, {"softplus_threshold": 10.0}])
def test_what_only_accepts_its_default(changes: dict) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(changes))):
        Call().run(**changes)


def test_more_rows_than_are_served() -> None:
    wide = torch.zeros(4, 9, 1, 128, dtype=BF16)
    with pytest.raises(NotImplementedError, match="T=9"):
        Call().run(q=wide)


@pytest.mark.gpu
def test_no_sync_where_the_caller_moves_the_cursors() -> None:
    call = Call("cuda")
    call.run(restart_hist_on_flush=False)
    with no_sync():
        call.run(restart_hist_on_flush=False)


def test_the_file_loads_by_its_path() -> None:
    """As vLLM's open adapter for these kernels does."""
    spec = importlib.util.spec_from_file_location("loaded_by_path", flashinfer.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.W_RING, module.RING_SLOTS) == (16, 32)
    assert getattr(module, "IO_TORCH", BF16) == BF16
    T, H, HV, K, V = 4, 1, 2, 16, 16
    ring = [torch.zeros(3, H, 32, K), torch.zeros(3, HV, 32, V), torch.zeros(3, HV, 32)]
    rows = [torch.randn(2, T, *size) for size in ((H, K), (H, K), (HV, V), (HV,), (HV,))]
    q, k, v, a, b = rows
    whole = torch.full((2, T, HV, V + 8), 5.0)
    view = whole[..., 4 : 4 + V]
    out = module.gated_delta_rule_mtp_ucache_flush(
        A_log=torch.zeros(HV), a=a, dt_bias=torch.zeros(HV), q=q, k=k, v=v, b=b,
        initial_state_source=torch.zeros(3, HV, V, K),
        initial_state_indices=torch.tensor([2, 0], dtype=torch.int32),
        k_cache=ring[0], u_cache=ring[1], g_cache=ring[2],
        hist_len=torch.zeros(2, dtype=torch.int32), cache_base=torch.zeros(2, dtype=torch.int32),
        flush_min=17 - T, restart_hist_on_flush=False, output=view,
    )  # fmt: skip
    assert out is view and (whole[..., :4] == 5).all() and (whole[..., -4:] == 5).all()
    tokens = Tokens(*(part[0] for part in rows), torch.zeros(HV), torch.zeros(HV))
    assert error(out[0], recurrence(tokens, torch.zeros(HV, V, K))[0]) < 1e-5
