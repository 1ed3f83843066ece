"""A norm, a router and its experts in one call; the kernel for one row, lane by lane on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import cuda_on_cpu
from helpers.expert_cases import Case
from helpers.norm_cases import surrounded
from helpers.tolerances import KERNEL_FACTOR, assert_close
from hybridspec.errors import UnsupportedError
from hybridspec.ops.experts import Matrices, launch_row, naive, norm_and_mix

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
EPS = 1e-3


SMALL = Case(5, 7, 3, 40, 24, 56, is_normalized=False)
# Of the kernel: more units than warps, more columns than warps, more experts than lanes.
ROWS = {
    "plain": Case(1, 12, 3, 512, 256, 256),
    "experts of two chunks, not normalized": Case(1, 34, 8, 256, 512, 256, is_normalized=False),
    "a wide shared expert": Case(1, 3, 1, 256, 256, 512),
    "all experts": Case(1, 4, 4, 256, 256, 256, is_normalized=False),
}


class Call:
    """Tensors of a call; matrices lie in larger ones, with NaN around them."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        c = self.case = case
        shapes = (
            (c.experts, 2 * c.inner, c.size), (c.experts, c.size, c.inner),
            (2 * c.shared_inner, c.size), (c.size, c.shared_inner),
        )  # fmt: skip
        parts = [surrounded(shape, dtype, device, i) for i, shape in enumerate(shapes)]
        self.router = surrounded((c.experts + 1, c.size), dtype, device, 4)
        for part in (*parts, self.router):
            part.mul_(part.shape[-1] ** -0.5)
        self.matrices = Matrices(*parts)
        self.x = surrounded((c.rows, c.size), dtype, device, 5 + seed)
        generator = torch.Generator().manual_seed(seed)
        wide = F64 if dtype is F64 else F32
        self.weight = torch.rand(c.size, generator=generator).to(device, wide) + 0.5
        self.meeting = torch.zeros(2, dtype=torch.int32, device=device)

    def expected(self) -> Tensor:
        """By the definitions, on a CPU, in fp64; the norm and the scores rounded as they are."""
        wide = self.x.double().cpu()
        y = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weight.double().cpu()
        y = y.to(self.x.dtype)
        scores = (y.double() @ self.router.double().cpu().t()).to(self.x.dtype)
        matrices = Matrices(*(part.cpu() for part in self.matrices))
        naive.mix(y, scores, matrices, wide, self.case.per_row, self.case.is_normalized)
        return wide

    def run(self, backend: str) -> Tensor:
        """Change a copy of the rows."""
        return norm_and_mix(
            self.x.clone(), self.weight, EPS, self.router, self.matrices, meeting=self.meeting,
            experts_per_row=self.case.per_row, is_normalized=self.case.is_normalized,
            backend=backend,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["composed", "reference"])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_composed(dtype: torch.dtype, backend: str) -> None:
    call = Call(SMALL, dtype)
    assert_close(call.run(backend), call.expected(), dtype)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_row, "load_kernel", cuda_on_cpu.load_kernel)
    monkeypatch.setattr(launch_row, "_multiprocessors", lambda _: 3)
    monkeypatch.setattr(launch_row, "THREADS", 128)


def launched(call: Call) -> Tensor:
    """Change a copy of the row by the kernel."""
    c, x = call.case, call.x.clone()
    assert launch_row.explain_tensors(x, call.weight, call.router, call.matrices, c.per_row) is None
    arguments = (x, call.weight, call.router, call.matrices, call.meeting)
    given = (*arguments, EPS, c.per_row, c.is_normalized)
    launch_row.prepare(*given)(*given)
    return x


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ROWS)
def test_kernel(name: str) -> None:
    for seed in range(2 if name == "plain" else 1):
        call = Call(ROWS[name], BF16, seed=seed)
        assert_close(launched(call), call.expected(), BF16, factor=KERNEL_FACTOR)
        # Blocks have met twice, and the next launch finds the counter as this one did.
        assert call.meeting.tolist() == [0, 0]


@pytest.mark.usefixtures("on_cpu")
def test_kernel_routes_as_the_reference() -> None:
    """Of equal scores the first, zeros of both signs among them."""
    call = Call(ROWS["experts of two chunks, not normalized"], BF16)
    call.router[1::2] = call.router[0]
    call.router[2::4] = 0.0
    call.router[4::8] = -0.0
    assert_close(launched(call), call.expected(), BF16, factor=KERNEL_FACTOR)


@pytest.mark.usefixtures("on_cpu")
def test_kernel_shows_nan() -> None:
    call = Call(ROWS["plain"], BF16)
    call.x[0, 7] = torch.nan
    assert launched(call).isnan().all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("spoil", ["router", "weight", "x", *Matrices._fields])
def test_teeth_everything_counts(spoil: str) -> None:
    case = ROWS["all experts"]
    right, other = launched(Call(case, BF16)), Call(case, BF16)
    part = getattr(other, spoil) if hasattr(other, spoil) else getattr(other.matrices, spoil)
    part[..., :64] *= -1.0
    assert (launched(other) - right).abs().max() > 0.05


REFUSED = (
    ({"rows": 2}, "x has 2 rows, it takes one"),
    ({"size": 384}, "sizes are 384, 256 and 256, it takes multiples of 256"),
    ({"experts": 9, "per_row": 9}, "a row has 9 experts of 256, and one of 256"),
)


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=str)
def test_what_the_kernel_refuses(changes: dict[str, int], text: str) -> None:
    call = Call(ROWS["plain"]._replace(**changes), BF16)
    tensors = (call.x, call.weight, call.router, call.matrices)
    assert text in (launch_row.explain_tensors(*tensors, call.case.per_row) or "")
    with pytest.raises(UnsupportedError, match="not on a CUDA device"):
        call.run("cuda")


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("x", torch.zeros(5, 41), ValueError, r"gate_up: .*\[7, 48, 41\], got \[7, 48, 40\]"),
        ("weight", torch.zeros(41), ValueError, r"norm_weight: .*\[40\], got \[41\]"),
        ("weight", torch.zeros(40).half(), TypeError, "norm_weight: expected dtype"),
        ("router", torch.zeros(7, 40), ValueError, r"router: .*\[8, 40\], got \[7, 40\]"),
        ("router", torch.zeros(8, 40).half(), TypeError, "router: expected dtype float32"),
        ("meeting", torch.zeros(2), TypeError, "meeting: expected dtype int32"),
    ],
    ids=["x", "weight", "weight dtype", "router", "router dtype", "meeting"],
)
def test_errors(name: str, value: Tensor, error: type[Exception], text: str) -> None:
    call = Call(SMALL, F32)
    setattr(call, name, value)
    with pytest.raises(error, match=text):
        call.run("auto")


def test_opcheck() -> None:
    call = Call(SMALL, F32)
    op = torch.ops.hybridspec.experts_norm_and_mix.default
    tensors = (call.x.clone(), call.weight, call.router, *call.matrices, call.meeting)
    torch.library.opcheck(op, (*tensors, EPS, 3, False, "auto"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_kernel_on_a_gpu(name: str) -> None:
    for seed in range(3):
        call = Call(ROWS[name], BF16, "cuda", seed=seed)
        for _ in range(2):
            out = call.run("cuda").cpu()
            assert_close(out, call.expected(), BF16, factor=KERNEL_FACTOR)
        assert call.meeting.tolist() == [0, 0]


@pytest.mark.gpu
def test_captured() -> None:
    """A replay finds the counter as the one before left it."""
    call = Call(Case(1, 16, 8, 2048, 512, 512), BF16, "cuda")
    right = call.run("cuda")
    x, graph = call.x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_and_mix(
            x, call.weight, EPS, call.router, call.matrices, meeting=call.meeting,
            experts_per_row=8, backend="cuda",
        )  # fmt: skip
    for _ in range(3):
        x.copy_(call.x)
        graph.replay()
        assert torch.equal(x, right)
