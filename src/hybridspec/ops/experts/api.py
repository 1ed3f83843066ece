"""The public function of the mixture of experts: checks and operator call."""

from __future__ import annotations

from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._checks import FLOATS, Dims, check, check_option, check_tensor
from hybridspec.ops._library import Backend, register
from hybridspec.ops.experts import cpu, grouped, launch
from hybridspec.ops.experts.call import Matrices

__all__ = ["explain", "mix"]


def mix(
    x: Tensor,
    scores: Tensor,
    matrices: Matrices,
    out: Tensor,
    *,
    experts_per_row: int,
    is_normalized: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Add to each row what its experts make of it; only `out` is modified.

    With p = softmax of the first E scores, over the largest `experts_per_row` of them, of equal
    ones the first:

        out += sum_e w_e mlp_e(x) + sigmoid(last score) mlp_shared(x)
        w_e = p_e, divided by their sum if `is_normalized`;  mlp(x) = down (silu(gate x) * up x)

    Args:
        x: rows, [N, D]; last stride 1; in.
        scores: of every routed expert, and of the gate of the shared one, [N, E + 1], dtype of
            `x`; last stride 1; in.
        matrices: weights, dtype of `x`; kernels need a last stride of 1; in.
        out: [N, D], dtype of `x`; last stride 1; in-out.
        experts_per_row: how many routed experts a row has, 1..E.
        is_normalized: whether their weights sum to one.
        backend: "auto", "triton" (few rows), "grouped" (many rows, bfloat16) or "reference", which
            reads on the host how many rows each expert has.

    Returns:
        `out`.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride, number or backend.

    Numerics:
        Products accumulate in fp32 (fp64). Probabilities and weights are fp32 (fp64). What lies
        between an expert's products is rounded to the dtype of `x`; so are the experts' outputs
        but in "triton"; the sum is rounded once, with `out` in it. Experts are added in falling
        order of their scores, the shared one last.

    Source:
        Sparsely gated mixtures (Shazeer et al. 2017, arXiv:1701.06538); the gated shared expert of
        the Qwen2-MoE, Qwen3-Next and Qwen3.5 checkpoints.
    """
    _op(x, scores, matrices, out, experts_per_row, is_normalized, backend=backend)
    return out


def explain(
    x: Tensor, scores: Tensor, matrices: Matrices, out: Tensor, experts_per_row: int
) -> dict[str, str | None]:
    """Return for each backend, by preference, why it does not support a call, or None."""
    return _op.explain(x, scores, matrices, out, experts_per_row, True)


def _check(
    x: Tensor,
    scores: Tensor,
    matrices: Matrices,
    out: Tensor,
    per_row: int,
    is_normalized: bool,
) -> None:
    dims: Dims = {}
    check_tensor("x", x, "N D", dims, *FLOATS)
    check("gate_up", matrices.gate_up, "E 2F D", dims)
    check("shared_gate_up", matrices.shared_gate_up, "2G D", dims)
    for name in ("2F", "2G"):
        if dims[name] % 2:
            part = "gate_up" if name == "2F" else "shared_gate_up"
            raise ValueError(f"{part}: expected an even number of rows, got {dims[name]}")
        dims[name[1:]] = dims[name] // 2
    check("down", matrices.down, "E D F", dims)
    check("shared_down", matrices.shared_down, "D G", dims)
    dims["E+1"] = dims["E"] + 1
    check_tensor("scores", scores, "N E+1", dims, x.dtype)
    check_tensor("out", out, "N D", dims, x.dtype)
    for name, matrix in zip(Matrices._fields, matrices, strict=True):
        if matrix.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of x {x.dtype}, got {matrix.dtype}")
    check_option("experts_per_row", per_row, int, low=1, high=dims["E"])
    check_option("is_normalized", is_normalized, bool)


_op = register(
    "experts.mix",
    {
        "triton": Backend(launch.explain, launch.mix),
        "grouped": Backend(grouped.explain, grouped.mix),
        "reference": Backend(always, cpu.mix),
    },
    _check,
)
