"""Public functions of the causal convolution: checks, output allocation, operator call."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.errors import UnsupportedError
from hybridspec.ops._checks import Dims, check, check_dtype, check_last_stride
from hybridspec.ops._library import LIBRARY
from hybridspec.ops.causal_conv1d import reference

__all__ = ["prefill", "verify"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def verify(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_verify_tokens: int,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve the rows of a decode step and append all of them to the ring."""
    out = _prepare(x, weight, conv_ring, seq_len, cu_seqlens, slots, bias, activation, out)
    _check_capacity(conv_ring, weight.shape[1], max_verify_tokens, "max_verify_tokens")
    torch.ops.hybridspec.causal_conv1d_verify(
        x, weight, conv_ring, seq_len, cu_seqlens, slots, max_verify_tokens, bias, activation, out,
        _choose(backend),
    )  # fmt: skip
    return out


def prefill(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    *,
    max_seqlen: int,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve long rows and keep the last width - 1 inputs of each request."""
    out = _prepare(x, weight, conv_ring, seq_len, cu_seqlens, slots, bias, activation, out)
    _check_capacity(conv_ring, weight.shape[1], 0, "max_seqlen")
    torch.ops.hybridspec.causal_conv1d_prefill(
        x, weight, conv_ring, seq_len, cu_seqlens, slots, max_seqlen, bias, activation, out,
        _choose(backend),
    )  # fmt: skip
    return out


def _choose(backend: str) -> str:
    if backend not in ("auto", "reference"):
        raise UnsupportedError(f"backend: expected 'auto' or 'reference', got {backend!r}")
    return "reference"


def _prepare(
    x: Tensor,
    weight: Tensor,
    conv_ring: Tensor,
    seq_len: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> Tensor:
    """Check shapes and dtypes, and return the output tensor."""
    dims: Dims = {}
    check("x", x, "N D", dims)
    check("weight", weight, "D width", dims)
    check("conv_ring", conv_ring, "S R D", dims)
    check("seq_len", seq_len, "S", dims)
    check("slots", slots, "B", dims)
    check("cu_seqlens", cu_seqlens, str(dims["B"] + 1), dims)
    check_last_stride("x", x)
    check_last_stride("conv_ring", conv_ring)
    for name, tensor in (("x", x), ("weight", weight), ("conv_ring", conv_ring)):
        check_dtype(name, tensor, *_FLOATS)
    for name, tensor in (("seq_len", seq_len), ("cu_seqlens", cu_seqlens), ("slots", slots)):
        check_dtype(name, tensor, *_INTEGERS)
    if bias is not None:
        check("bias", bias, "D", dims)
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check("out", out, "N D", dims)
    check_dtype("out", out, x.dtype)
    return out


def _check_capacity(conv_ring: Tensor, width: int, max_rows: int, name: str) -> None:
    capacity = conv_ring.shape[1]
    if capacity & (capacity - 1) or capacity < width - 1 + max_rows:
        raise ValueError(
            f"conv_ring: expected a power of two of at least width - 1 + {name} = "
            f"{width - 1 + max_rows} rows, got {capacity}"
        )


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor(a!) conv_ring, Tensor seq_len, Tensor cu_seqlens, "
    "Tensor slots, int max_rows, Tensor? bias, str? activation, Tensor(b!) out, str backend"
)


def _verify(*args) -> None:
    reference.verify(*args[:-1])


def _prefill(*args) -> None:
    reference.prefill(*args[:-1])


for _name, _implementation in (("verify", _verify), ("prefill", _prefill)):
    LIBRARY.define(f"causal_conv1d_{_name}({_ARGUMENTS}) -> ()")
    LIBRARY.impl(f"causal_conv1d_{_name}", _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"hybridspec::causal_conv1d_{_name}", lambda *args: None, lib=LIBRARY
    )
