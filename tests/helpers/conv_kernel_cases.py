"""Ragged batches that the convolution's kernel must get right, on any device."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers.conv_cases import ConvBatch, expected_output, expected_ring, make_conv_batch
from hybridspec.ops import causal_conv1d

__all__ = ["BATCHES", "PROMPTS", "check_kernel", "check_prefill", "check_split"]

BATCHES = {
    "one row": {"lengths": [1], "positions": [9], "slots": [2]},
    "start": {"lengths": [1, 2, 3, 4], "positions": [0, 1, 2, 3], "slots": [5, 0, 3, 1]},
    "ragged": {"lengths": [4, 0, 8, 1], "positions": [14, 3, 30, 16], "slots": [0, 1, 4, 2]},
    "padding": {"lengths": [2, 3, 1], "positions": [7, 0, 2], "slots": [-1, 3, -1], "tail_rows": 3},
    "width 2": {"lengths": [5, 2], "positions": [0, 40], "slots": [0, 1], "width": 2},
    "bias": {"lengths": [3], "positions": [15], "slots": [0], "has_bias": True},
    "channels": {"lengths": [2, 1], "positions": [3, 8], "slots": [1, 0], "num_channels": 300},
}

PROMPTS = {
    **BATCHES,
    "prompt": {"lengths": [70], "positions": [0], "slots": [3]},
    "later chunk": {"lengths": [33, 16, 17], "positions": [21, 64, 5], "slots": [4, 0, 2]},
    "short prompts": {"lengths": [1, 2, 40], "positions": [1, 0, 0], "slots": [2, 5, 1]},
    "ring of the history": {
        "lengths": [35, 2], "positions": [18, 9], "slots": [1, 3], "capacity": 4, "width": 5,
    },
}  # fmt: skip


def check_kernel(
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    activation: str | None,
    device: str,
    bound: float,
) -> None:
    """Run the kernel on a batch and compare outputs and every bit of the ring."""
    x_dtype, ring_dtype = dtypes
    batch = make_conv_batch(**BATCHES[name], dtype=x_dtype, ring_dtype=ring_dtype)
    right, ring = expected_output(batch, activation), expected_ring(batch)
    moved = _moved(batch, device)
    out = causal_conv1d.verify(
        *moved.tensors, max_verify_tokens=max(1, batch.longest), bias=moved.bias,
        activation=activation, backend="triton",
    )  # fmt: skip
    torch.testing.assert_close(out.double().cpu(), right, rtol=bound, atol=bound)
    torch.testing.assert_close(moved.conv_ring.cpu(), ring, rtol=0, atol=0, equal_nan=True)


def check_prefill(
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    activation: str | None,
    device: str,
    bound: float,
) -> None:
    """Run the prompts' kernel on a batch and compare outputs and every bit of the ring."""
    x_dtype, ring_dtype = dtypes
    batch = make_conv_batch(**PROMPTS[name], dtype=x_dtype, ring_dtype=ring_dtype)
    kept = batch.weight.shape[1] - 1
    right, ring = expected_output(batch, activation), expected_ring(batch, num_kept=kept)
    moved = _moved(batch, device)
    out = causal_conv1d.prefill(
        *moved.tensors, max_seqlen=batch.longest, bias=moved.bias, activation=activation,
        backend="triton",
    )  # fmt: skip
    torch.testing.assert_close(out.double().cpu(), right, rtol=bound, atol=bound)
    torch.testing.assert_close(moved.conv_ring.cpu(), ring, rtol=0, atol=0, equal_nan=True)


def check_split(dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """Run eight rows in one step and in eight: a ring that rounds must round fresh rows too."""
    x_dtype, ring_dtype = dtypes
    make = {"lengths": [8], "positions": [13], "slots": [2]}
    whole, parts = (
        _moved(make_conv_batch(**make, dtype=x_dtype, ring_dtype=ring_dtype), device)
        for _ in range(2)
    )
    right = causal_conv1d.verify(*whole.tensors, max_verify_tokens=8, backend="triton")
    found = []
    for row in parts.x.split(1):
        bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
        one = replace(parts, x=row, cu_seqlens=bounds)
        found.append(causal_conv1d.verify(*one.tensors, max_verify_tokens=1, backend="triton"))
        parts.seq_len[2] += 1
    torch.testing.assert_close(torch.cat(found), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.conv_ring, whole.conv_ring, rtol=0, atol=0, equal_nan=True)


def _moved(batch: ConvBatch, device: str) -> ConvBatch:
    """The same batch on a device; x and the ring stay strided."""

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 8), torch.nan, device=device)
        view = wide[..., 3:-5]
        view.copy_(tensor)
        return view

    return replace(
        batch,
        x=strided(batch.x),
        conv_ring=strided(batch.conv_ring),
        weight=batch.weight.to(device),
        bias=None if batch.bias is None else batch.bias.to(device),
        seq_len=batch.seq_len.to(device),
        cu_seqlens=batch.cu_seqlens.to(device),
        slots=batch.slots.to(device),
    )
