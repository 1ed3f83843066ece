"""Triton kernel of the decode-step convolution: read the ring's tail, convolve, append."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["convolve", "verify_kernel"]


@triton.jit
def convolve(
    # pointers to x at `rows`, to the parameters, to the ring of the slot
    x_ptrs, weight_ptr, bias_ptr, conv_ring_ptr,
    rows, position, d_offs, mask, d_mask,
    x_stride_n, weight_stride_d, weight_stride_w, conv_ring_stride_r,
    RING: tl.constexpr, WIDTH: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of some rows of a request, [ROWS, BLOCK_D]; the ring holds what precedes them."""
    result = tl.zeros(x_ptrs.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        source = rows + (tap - WIDTH + 1)
        weight = tl.load(
            weight_ptr + d_offs * weight_stride_d + tap * weight_stride_w, mask=d_mask, other=0.0
        ).to(tl.float32)
        new = tl.load(
            x_ptrs + (tap - WIDTH + 1) * x_stride_n, mask=mask & (source >= 0)[:, None], other=0.0
        )
        new = new.to(conv_ring_ptr.dtype.element_ty).to(tl.float32)
        is_stored = (source < 0) & (position + source >= 0)
        stored = tl.load(
            conv_ring_ptr
            + ((position + source) & (RING - 1))[:, None] * conv_ring_stride_r
            + d_offs[None, :],
            mask=mask & is_stored[:, None],
            other=0.0,
        ).to(tl.float32)
        result += (new + stored) * weight[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + d_offs, mask=d_mask, other=0.0).to(tl.float32)[None, :]
    if IS_SILU:
        result *= tl.sigmoid(result)
    return result


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def verify_kernel(
    # inputs: x [N, D]; weight [D, WIDTH]; bias [D] or None; in-out: conv_ring [S, R, D]
    x_ptr, weight_ptr, bias_ptr, conv_ring_ptr,
    # output [N, D]
    out_ptr,
    # metadata: seq_len [S]; cu_seqlens [B + 1]; slots [B]
    seq_len_ptr, cu_seqlens_ptr, slots_ptr,
    num_rows, num_requests,
    x_stride_n, weight_stride_d, weight_stride_w, conv_ring_stride_s, conv_ring_stride_r,
    out_stride_n,
    D: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    request = pid // BLOCKS
    d_offs = (pid % BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_mask = d_offs < D

    first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
    num_tokens = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
    rows_end = tl.load(cu_seqlens_ptr + num_requests).to(tl.int32)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    tokens = tl.arange(0, TOKENS)
    mask = (tokens < num_tokens)[:, None] & d_mask[None, :]
    out_ptrs = out_ptr + (first + tokens)[:, None] * out_stride_n + d_offs[None, :]
    zeros = tl.zeros([BLOCK_D], out_ptr.dtype.element_ty)
    for row in range(rows_end + request, num_rows, num_requests):
        tl.store(out_ptr + row * tl.cast(out_stride_n, tl.int64) + d_offs, zeros, mask=d_mask)
    if slot < 0:
        tl.store(out_ptrs, tl.zeros([TOKENS, BLOCK_D], out_ptr.dtype.element_ty), mask=mask)
        return
    if num_tokens <= 0:
        return

    position = tl.load(seq_len_ptr + slot).to(tl.int32)
    conv_ring_ptr += slot * conv_ring_stride_s
    x_ptrs = x_ptr + (first + tokens)[:, None] * x_stride_n + d_offs[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)

    result = convolve(
        x_ptrs, weight_ptr, bias_ptr, conv_ring_ptr, tokens, position, d_offs, mask, d_mask,
        x_stride_n, weight_stride_d, weight_stride_w, conv_ring_stride_r, RING, WIDTH, IS_SILU,
    )  # fmt: skip

    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    append_rows = (position + tokens) & (RING - 1)
    tl.store(
        conv_ring_ptr + append_rows[:, None] * conv_ring_stride_r + d_offs[None, :],
        x.to(conv_ring_ptr.dtype.element_ty),
        mask=mask,
    )
