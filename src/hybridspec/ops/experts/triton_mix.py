"""Triton kernels of the mixture: route, gate and up, down, sum; each one launch for all experts.

An assignment is a row and one of its experts: number row * PER_ROW + place. Programs find the
assignments of their expert by themselves, in the list of all of them, so nothing is sorted. Every
product runs over the whole inner dimension in one fixed order, whatever rows lie beside a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["down_kernel", "gate_up_kernel", "route_kernel", "sum_kernel"]

_TAKEN: tl.constexpr = tl.constexpr(-(2**31))
_NAN: tl.constexpr = tl.constexpr(-(2**31) + 1)


@triton.jit
def route_kernel(
    # input [N, E + 1]
    scores_ptr,
    # outputs: experts [N, PER_ROW] int32; weights [N, PER_ROW + 1] fp32
    experts_ptr,
    weights_ptr,
    num_experts,
    scores_stride_n,
    PER_ROW: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e_offs = tl.arange(0, BLOCK_E)
    p_offs = tl.arange(0, BLOCK_P)
    e_mask = e_offs < num_experts

    scores_ptr += row * scores_stride_n
    scores = tl.load(scores_ptr + e_offs, mask=e_mask, other=float("-inf")).to(tl.float32)
    gate = tl.load(scores_ptr + num_experts).to(tl.float32)

    is_number = scores == scores
    peak = tl.max(tl.where(is_number, scores, float("-inf")), axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(scores - peak), axis=0)
    # Integers in the order of the scores, so that equal ones, infinities and NaN have a place.
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(e_mask, tl.where(is_number, key, _NAN), _TAKEN)
    chosen = tl.zeros([BLOCK_P], tl.int32)
    experts = tl.zeros([BLOCK_P], tl.int32)
    for place in range(PER_ROW):
        best = tl.max(key, axis=0)
        expert = tl.min(tl.where(key == best, e_offs, BLOCK_E), axis=0)
        key = tl.where(e_offs == expert, _TAKEN, key)
        chosen = tl.where(p_offs == place, best, chosen)
        experts = tl.where(p_offs == place, expert, experts)
    chosen = (chosen ^ ((chosen >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    weights = tl.where(p_offs < PER_ROW, tl.exp(chosen - peak) / total, 0.0)
    if IS_NORMALIZED:
        weights /= tl.sum(weights, axis=0)
    weights = tl.where(p_offs == PER_ROW, tl.sigmoid(gate), weights)

    tl.store(experts_ptr + row * PER_ROW + p_offs, experts, mask=p_offs < PER_ROW)
    tl.store(weights_ptr + row * (PER_ROW + 1) + p_offs, weights, mask=p_offs <= PER_ROW)


@triton.jit
def expert_of(group, experts_ptr, num_assignments, IS_DENSE: tl.constexpr, CHUNK: tl.constexpr):
    """The expert of a group of programs, and how many assignments it has; group 0 is the shared.

    Groups stand for experts, or, where there are fewer of those, for assignments: of all that have
    the same expert the first one's group does the work, and the others have nothing to do.
    """
    expert = group - 1
    if not IS_DENSE:
        expert = tl.load(experts_ptr + group - 1, mask=group > 0, other=-1)
    count = 0
    earlier = 0
    for start in range(0, num_assignments, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        found = tl.load(experts_ptr + offs, mask=offs < num_assignments, other=-2) == expert
        count += tl.sum(found.to(tl.int32), axis=0)
        if not IS_DENSE:
            earlier += tl.sum((found & (offs < group - 1)).to(tl.int32), axis=0)
    return expert, tl.where(earlier > 0, 0, count)


@triton.jit
def assignments_of(
    expert, first, experts_ptr, num_assignments, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr
):
    """The assignments of an expert from its `first` one on, in rising order, [BLOCK_M]."""
    m_offs = tl.arange(0, BLOCK_M)
    numbers = tl.zeros([BLOCK_M], tl.int32)
    before = -first
    for start in range(0, num_assignments, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        found = tl.load(experts_ptr + offs, mask=offs < num_assignments, other=-2) == expert
        rank = before + tl.cumsum(found.to(tl.int32), axis=0) - 1
        is_here = found[None, :] & (rank[None, :] == m_offs[:, None])
        numbers += tl.sum(tl.where(is_here, offs[None, :], 0), axis=1)
        before += tl.sum(found.to(tl.int32), axis=0)
    return numbers


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def gate_up_kernel(
    # inputs: x [N, D]; experts [N, PER_ROW] int32; gate_up [E, 2 F, D]; shared [2 G, D]
    x_ptr,
    experts_ptr,
    gate_up_ptr,
    shared_ptr,
    # output: of all assignments [N PER_ROW, F], then of the shared expert [N, G]
    hidden_ptr,
    num_rows,
    num_assignments,
    size,
    inner,
    shared_inner,
    x_stride_n,
    gate_up_stride_e,
    gate_up_stride_f,
    shared_stride_f,
    PER_ROW: tl.constexpr,
    IS_DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(1)
    expert, count = expert_of(group, experts_ptr, num_assignments, IS_DENSE, CHUNK)
    num_places = num_assignments.to(tl.int64) * inner
    if group == 0:
        count = num_rows
        inner = shared_inner
        weight_ptr = shared_ptr
        stride_f = shared_stride_f
        hidden_ptr += num_places
    else:
        weight_ptr = gate_up_ptr + expert.to(tl.int64) * gate_up_stride_e
        stride_f = gate_up_stride_f

    # The gate's rows of the matrix, then those of `up`, as one operand.
    columns = tl.arange(0, 2 * BLOCK_F)
    f_offs = tl.program_id(0) * BLOCK_F + columns % BLOCK_F
    k_offs = tl.arange(0, BLOCK_K)
    m_offs = tl.arange(0, BLOCK_M)
    f_mask = f_offs < inner
    w_rows = f_offs + tl.where(columns < BLOCK_F, 0, inner)
    weight_ptr += w_rows.to(tl.int64)[:, None] * stride_f + k_offs[None, :]
    out_offs = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)

    if tl.program_id(0) * BLOCK_F < inner:
        for first in range(0, count, BLOCK_M):
            if group == 0:
                places = first + m_offs
                rows = places
            else:
                places = assignments_of(expert, first, experts_ptr, num_assignments, BLOCK_M, CHUNK)
                rows = places // PER_ROW
            m_mask = first + m_offs < count
            x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride_n + k_offs[None, :]
            y = tl.zeros([BLOCK_M, 2 * BLOCK_F], tl.float32)
            for start in range(0, size, BLOCK_K):
                k_mask = (start + k_offs < size)[None, :]
                x = tl.load(x_rows + start, mask=m_mask[:, None] & k_mask, other=0.0)
                weight = tl.load(weight_ptr + start, mask=f_mask[:, None] & k_mask, other=0.0)
                y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
            halves = tl.permute(tl.reshape(y, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1))
            gate, up = tl.split(halves)
            hidden = (gate * tl.sigmoid(gate) * up).to(hidden_ptr.dtype.element_ty)
            out_rows = hidden_ptr + places.to(tl.int64)[:, None] * inner
            mask = m_mask[:, None] & (out_offs < inner)[None, :]
            tl.store(out_rows + out_offs[None, :], hidden, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def down_kernel(
    # inputs: hidden as `gate_up_kernel` leaves it; experts; down [E, D, F]; shared [D, G]
    hidden_ptr,
    experts_ptr,
    down_ptr,
    shared_ptr,
    # output: of all assignments, then of the shared expert, [N PER_ROW + N, D] fp32
    made_ptr,
    num_rows,
    num_assignments,
    size,
    inner,
    shared_inner,
    down_stride_e,
    down_stride_d,
    shared_stride_d,
    IS_DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group = tl.program_id(1)
    expert, count = expert_of(group, experts_ptr, num_assignments, IS_DENSE, CHUNK)
    num_places = num_assignments.to(tl.int64)
    if group == 0:
        count = num_rows
        hidden_ptr += num_places * inner
        made_ptr += num_places * size
        inner = shared_inner
        weight_ptr = shared_ptr
        stride_d = shared_stride_d
    else:
        weight_ptr = down_ptr + expert.to(tl.int64) * down_stride_e
        stride_d = down_stride_d

    d_offs = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    k_offs = tl.arange(0, BLOCK_K)
    m_offs = tl.arange(0, BLOCK_M)
    d_mask = d_offs < size
    weight_ptr += d_offs.to(tl.int64)[:, None] * stride_d + k_offs[None, :]

    for first in range(0, count, BLOCK_M):
        if group == 0:
            places = first + m_offs
        else:
            places = assignments_of(expert, first, experts_ptr, num_assignments, BLOCK_M, CHUNK)
        m_mask = first + m_offs < count
        rows = hidden_ptr + places.to(tl.int64)[:, None] * inner + k_offs[None, :]
        y = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, inner, BLOCK_K):
            k_mask = (start + k_offs < inner)[None, :]
            hidden = tl.load(rows + start, mask=m_mask[:, None] & k_mask, other=0.0)
            weight = tl.load(weight_ptr + start, mask=d_mask[:, None] & k_mask, other=0.0)
            y = tl.dot(hidden, tl.trans(weight), y, input_precision="ieee")
        out_rows = made_ptr + places.to(tl.int64)[:, None] * size
        tl.store(out_rows + d_offs[None, :], y, mask=m_mask[:, None] & d_mask[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    # inputs: made as `down_kernel` leaves it; weights [N, PER_ROW + 1] fp32
    made_ptr,
    weights_ptr,
    # in-out [N, D]
    out_ptr,
    num_rows,
    size,
    out_stride_n,
    PER_ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d_offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d_offs < size

    weights_ptr += row * (PER_ROW + 1)
    y = tl.zeros([BLOCK_D], tl.float32)
    for place in tl.static_range(PER_ROW):
        made_row = made_ptr + (row * PER_ROW + place) * size
        y += tl.load(weights_ptr + place) * tl.load(made_row + d_offs, mask=mask, other=0.0)
    shared_row = made_ptr + (num_rows.to(tl.int64) * PER_ROW + row) * size
    y += tl.load(weights_ptr + PER_ROW) * tl.load(shared_row + d_offs, mask=mask, other=0.0)
    out_ptr += row * out_stride_n + d_offs
    y += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)

    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=mask)
