"""Triton kernel of the convolution over prompt rows: convolve, then keep the last inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.ops.causal_conv1d.triton_verify import convolve

__all__ = ["prefill_kernel"]


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_tiles"])
def prefill_kernel(
    # inputs: x [N, D]; weight [D, WIDTH]; bias [D] or None; in-out: conv_ring [S, R, D]
    x_ptr, weight_ptr, bias_ptr, conv_ring_ptr,
    # output [N, D]
    out_ptr,
    # metadata: seq_len [S]; cu_seqlens [B + 1]; slots [B]
    seq_len_ptr, cu_seqlens_ptr, slots_ptr,
    num_rows, num_requests,
    x_stride_n, weight_stride_d, weight_stride_w, conv_ring_stride_s, conv_ring_stride_r,
    out_stride_n, num_tiles,
    D: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """One program per tile of a request's rows and block of channels.

    The first tile alone reads the ring, and it alone stores there, when it has read.
    """
    tl.static_assert(ROWS >= WIDTH - 1)
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    tile = (pid // BLOCKS) % num_tiles
    request = pid // BLOCKS // num_tiles
    d_offs = (pid % BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_mask = d_offs < D

    first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
    rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    mask = (rows < length)[:, None] & d_mask[None, :]
    out_ptrs = out_ptr + (first + rows)[:, None] * out_stride_n + d_offs[None, :]
    zeros = tl.zeros([BLOCK_D], out_ptr.dtype.element_ty)
    for row in range(rows_end + pid // BLOCKS, num_rows, num_requests * num_tiles):
        tl.store(out_ptr + row * tl.cast(out_stride_n, tl.int64) + d_offs, zeros, mask=d_mask)
    if slot < 0:
        tl.store(out_ptrs, tl.zeros([ROWS, BLOCK_D], out_ptr.dtype.element_ty), mask=mask)
        return
    if tile * ROWS >= length:
        return

    position = tl.load(seq_len_ptr + slot).to(tl.int32)
    conv_ring_ptr += slot * conv_ring_stride_s
    x_ptrs = x_ptr + (first + rows)[:, None] * x_stride_n + d_offs[None, :]
    result = convolve(
        x_ptrs, weight_ptr, bias_ptr, conv_ring_ptr, rows, position, d_offs, mask, d_mask,
        x_stride_n, weight_stride_d, weight_stride_w, conv_ring_stride_r, RING, WIDTH, IS_SILU,
    )  # fmt: skip

    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    if tile == 0:
        tl.debug_barrier()  # a small ring stores where other threads have just read
        kept = length - 1 - tl.arange(0, ROWS)
        kept_mask = ((kept >= 0) & (tl.arange(0, ROWS) < WIDTH - 1))[:, None] & d_mask[None, :]
        last = tl.load(
            x_ptr + (first + kept)[:, None] * x_stride_n + d_offs[None, :],
            mask=kept_mask,
            other=0.0,
        )
        tl.store(
            conv_ring_ptr
            + ((position + kept) & (RING - 1))[:, None] * conv_ring_stride_r
            + d_offs[None, :],
            last.to(conv_ring_ptr.dtype.element_ty),
            mask=kept_mask,
        )
