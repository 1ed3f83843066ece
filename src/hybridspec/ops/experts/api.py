"""The public functions of the mixture of experts: checks and operator calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridspec.ops._backends import always
from hybridspec.ops._checks import (
    FLOATS,
    WIDE,
    Dims,
    check,
    check_dtype,
    check_option,
    check_tensor,
)
from hybridspec.ops._library import Backend, register
from hybridspec.ops.experts import cpu, grouped, launch, launch_row
from hybridspec.ops.experts.call import Matrices
from hybridspec.ops.norms import rms_norm

__all__ = ["explain", "explain_norm_and_mix", "mix", "norm_and_mix"]


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
        backend: "auto", "triton" (few rows), "grouped" (many rows, bfloat16), "ordered" (the
            kernels of "triton" for any number of rows, so that no row's bits depend on others) or
            "reference", which reads on the host how many rows each expert has.

    Returns:
        `out`.

    Raises:
        TypeError: for a dtype that is not supported.
        UnsupportedError: if the requested backend does not support the call.
        ValueError: for a wrong shape, stride, number or backend.

    Numerics:
        Products accumulate in fp32 (fp64). Probabilities and weights are fp32 (fp64). What lies
        between an expert's products is rounded to the dtype of `x`; so are the experts' outputs
        in "grouped" and "reference"; the sum is rounded once, with `out` in it. Experts are added
        in falling order of their scores, the shared one last.

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


def norm_and_mix(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    matrices: Matrices,
    *,
    meeting: Tensor,
    experts_per_row: int,
    is_normalized: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Add to each row what its experts make of its norm; only `x` and `meeting` are modified.

        y = rms_norm(x),  scores = y router^T;  then as `mix`, with x as `out`

    Args:
        x: rows, [N, D]; last stride 1; in-out.
        norm_weight: as in `ops.norms.rms_norm`, [D], fp32 or fp64; in.
        eps: added to the mean square.
        router: rows of the routed experts, then that of the shared one's gate, [E + 1, D], dtype
            of `x`; last stride 1; in.
        matrices: as in `mix`; in.
        meeting: where programs of one launch wait for each other and share work out, [2], int32,
            zero before the first call; of one call at a time; scratch.
        experts_per_row: how many routed experts a row has, 1..E.
        is_normalized: whether their weights sum to one.
        backend: "auto", "cuda" (one row, one launch), "composed" (a norm, a product and `mix`) or
            "reference".

    Returns:
        `x`.

    Raises:
        TypeError, UnsupportedError, ValueError: as `mix`.

    Numerics:
        y and the scores are rounded to the dtype of `x`; otherwise as `mix`. In "cuda" an expert's
        output is not rounded, and products are summed in an order of their own, so that a score
        may fall on the other side of a rounding.

    Source:
        See `mix`, and `ops.norms.rms_norm`.
    """
    _whole(
        x, norm_weight, router, matrices, meeting, eps, experts_per_row, is_normalized,
        backend=backend,
    )  # fmt: skip
    return x


def explain_norm_and_mix(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, experts_per_row: int
) -> dict[str, str | None]:
    """Say of each backend, in order of preference, why it cannot serve a call, or None."""
    meeting = x.new_zeros(2, dtype=torch.int32)
    return _whole.explain(x, norm_weight, router, matrices, meeting, 0.0, experts_per_row, True)


def _compose(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, meeting: Tensor,
    eps: float, per_row: int, is_normalized: bool,
) -> None:  # fmt: skip
    y = rms_norm(x, norm_weight, eps)
    mix(
        y, F.linear(y, router), matrices, x, experts_per_row=per_row, is_normalized=is_normalized
    )  # fmt: skip


def _check_whole(
    x: Tensor, norm_weight: Tensor, router: Tensor, matrices: Matrices, meeting: Tensor,
    eps: float, per_row: int, is_normalized: bool,
) -> None:  # fmt: skip
    dims = _check_matrices(x, matrices, per_row, is_normalized)
    check_dtype("norm_weight", norm_weight, *WIDE)
    check("norm_weight", norm_weight, "D", dims)
    check_tensor("router", router, "E+1 D", dims, x.dtype)
    check_tensor("meeting", meeting, "2", dims, torch.int32)


def _check(
    x: Tensor,
    scores: Tensor,
    matrices: Matrices,
    out: Tensor,
    per_row: int,
    is_normalized: bool,
) -> None:
    dims = _check_matrices(x, matrices, per_row, is_normalized)
    check_tensor("scores", scores, "N E+1", dims, x.dtype)
    check_tensor("out", out, "N D", dims, x.dtype)


def _check_matrices(x: Tensor, matrices: Matrices, per_row: int, is_normalized: bool) -> Dims:
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
    for name, matrix in zip(Matrices._fields, matrices, strict=True):
        if matrix.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of x {x.dtype}, got {matrix.dtype}")
    check_option("experts_per_row", per_row, int, low=1, high=dims["E"])
    check_option("is_normalized", is_normalized, bool)
    return dims


_op = register(
    "experts.mix",
    {
        "triton": Backend(launch.explain_few, launch.mix),
        "grouped": Backend(grouped.explain, grouped.mix),
        "ordered": Backend(launch.explain, launch.mix),
        "reference": Backend(always, cpu.mix),
    },
    _check,
)


_whole = register(
    "experts.norm_and_mix",
    {
        "cuda": Backend.preparing(launch_row.explain, launch_row.prepare),
        "composed": Backend(always, _compose),
        "reference": Backend(always, cpu.norm_and_mix),
    },
    _check_whole,
)
