"""Triton kernels of attention over pages: equal shares of all key blocks, then one finish.

A unit of work is one block of keys of one request and one tile of query rows. The programs of
`split_kernel` share all units of a step evenly, whatever the lengths, so a program may see the end
of one request, whole requests and the beginning of another. Key heads form head groups, each with
programs of its own: neighbouring programs read the heads of the same keys. `finish_kernel` appends
the new rows, writes zeros into padding rows and adds up the parts of tiles that were cut.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["finish_kernel", "split_kernel"]


@triton.jit
def _program_of(unit, share, num_larger):
    """Which program of a group has a unit: the first `num_larger` have one more than `share`."""
    larger = num_larger * (share + 1)
    rest = num_larger + (unit - larger) // tl.maximum(share, 1)
    return tl.where(unit < larger, unit // (share + 1), rest)


@triton.jit
def _row_tiles(num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROW_TILES: tl.constexpr):
    """Tiles of query rows that a request has for a key head: at most ROW_TILES."""
    if ROW_TILES == 1:
        return 1
    else:
        return tl.cdiv(num_tokens * GROUP, BLOCK_M)


@triton.jit
def _load_pages(table_ptr, stride, block, position, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of each key of a block, or the one page of all; behind the last, that of the last."""
    last = tl.maximum(position - 1, 0)
    if PAGE_SIZE % BLOCK_N == 0:
        keys = tl.minimum(block * BLOCK_N, last)
    else:
        keys = tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), last)
    entries = keys.to(tl.uint32) // PAGE_SIZE  # unsigned: a shift
    return tl.load(table_ptr + entries * tl.cast(stride, tl.int64))


@triton.jit
def _load_columns(rows, mask, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """Rows in CHUNKS pieces of COLUMNS: with few columns a thread has many, hence few addresses."""
    pieces = ()
    for c in tl.static_range(CHUNKS):
        ptrs = rows[:, None] + (c * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        pieces = pieces + (tl.load(ptrs, mask=mask[:, None], other=0.0),)
    return pieces


@triton.jit
def _units_of(
    cu_seqlens_ptr, slots_ptr, seq_len_ptr, num_requests, HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_TILES: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Where the units of each request end, over all requests, for a group of HEADS heads."""
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    begins = tl.load(cu_seqlens_ptr + requests, mask=is_request, other=0).to(tl.int32)
    ends = tl.load(cu_seqlens_ptr + 1 + requests, mask=is_request, other=0).to(tl.int32)
    slots = tl.load(slots_ptr + requests, mask=is_request, other=-1).to(tl.int64)
    is_live = (slots >= 0) & (ends > begins)
    lengths = tl.load(seq_len_ptr + slots, mask=is_live, other=0).to(tl.int32) + ends - begins
    blocks = tl.where(is_live, tl.cdiv(lengths, BLOCK_N), 0)
    return tl.cumsum(blocks * (HEADS * _row_tiles(ends - begins, GROUP, BLOCK_M, ROW_TILES)), 0)


@triton.jit
def _add_block(acc, peak, total, q, k, v, keys, last_keys, is_ending, scale_log2):
    """Add a block of keys to the sums of a tile; rows see keys up to `last_keys`."""
    scores = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    for c in tl.static_range(len(q)):
        scores = tl.dot(q[c], tl.trans(k[c]), scores, input_precision="ieee")
    if is_ending:
        is_seen = keys[None, :] <= last_keys[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v[0].dtype)
    new_acc = ()
    for c in tl.static_range(len(q)):
        kept = acc[c] * decay[:, None]
        new_acc = new_acc + (tl.dot(weights, v[c], kept, input_precision="ieee"),)
    return new_acc, new_peak, total


@triton.jit
def _store_columns(rows, pieces, mask, COLUMNS: tl.constexpr):
    """Store pieces of COLUMNS side by side in rows."""
    for c in tl.static_range(len(pieces)):
        ptrs = rows[:, None] + (c * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        tl.store(ptrs, pieces[c], mask=mask[:, None])


@triton.jit
def _store_cut(cut_ptr, num_parts, first_program, first, num_tokens, tile):
    """Note how a tile was cut, for whoever adds up its parts."""
    tl.store(cut_ptr, num_parts)
    tl.store(cut_ptr + 1, first_program)
    tl.store(cut_ptr + 2, first.to(tl.int32))
    tl.store(cut_ptr + 3, num_tokens)
    tl.store(cut_ptr + 4, tile)


@triton.jit(do_not_specialize=["num_requests", "page_table_stride_s"])
def split_kernel(
    # inputs: q [N, Hq, D]; k, v [N, Hkv, D]; k_pages, v_pages [P, PAGE_SIZE, Hkv, D]
    q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr,
    # outputs: out [N, Hq, D]; of each program the tiles that it ends and begins for others:
    # parts [2, programs, BLOCK_M, D], sums [2, programs, 2, BLOCK_M] (peak, total),
    # cuts [2, programs, 8] (parts of the tile, program of the first, first row, rows, tile);
    # the parts of a tile but the first come from every HEAD_GROUPS-th program after the first
    out_ptr, parts_ptr, sums_ptr, cuts_ptr,
    # metadata: page_table [S, max_pages]; seq_len [S]; cu_seqlens [B + 1]; slots [B]
    page_table_ptr, seq_len_ptr, cu_seqlens_ptr, slots_ptr, num_requests, scale_log2,
    # strides of all dimensions but the last, which are 1; pages: of k_pages and v_pages
    q_strides, k_strides, v_strides, pages_strides, out_strides,
    page_table_stride_s, page_table_stride_p,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, HEAD_GROUPS: tl.constexpr, ROW_TILES: tl.constexpr,
    ALIGNMENT: tl.constexpr, REQUESTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Attend over a share of the units of a head group: every HEAD_GROUPS-th of HEADS key heads.

    GROUP query heads read a key head.
    """
    if IS_OVERLAPPED:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    head_group, nth = pid % HEAD_GROUPS, pid // HEAD_GROUPS
    group_programs: tl.constexpr = PROGRAMS // HEAD_GROUPS
    unit_ends = _units_of(
        cu_seqlens_ptr, slots_ptr, seq_len_ptr, num_requests, HEADS // HEAD_GROUPS, GROUP,
        BLOCK_M, BLOCK_N, ROW_TILES, REQUESTS,
    )  # fmt: skip
    num_units = tl.max(unit_ends, 0)
    share, num_larger = num_units // group_programs, num_units % group_programs
    unit = nth * share + tl.minimum(nth, num_larger)
    last_unit = unit + share + (nth < num_larger).to(tl.int32)
    tl.store(cuts_ptr + pid * 8, 0)
    tl.store(cuts_ptr + (PROGRAMS + pid) * 8, 0)

    CHUNKS: tl.constexpr = D // COLUMNS
    while unit < last_unit:
        request = tl.sum((unit_ends <= unit).to(tl.int32), 0)
        begin = tl.max(tl.where(unit_ends <= unit, unit_ends, 0), 0)
        first = tl.load(cu_seqlens_ptr + request).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens_ptr + request + 1) - first).to(tl.int32)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        position = tl.load(seq_len_ptr + slot).to(tl.int32)
        num_blocks = tl.cdiv(position + num_tokens, BLOCK_N)
        m_tiles = _row_tiles(num_tokens, GROUP, BLOCK_M, ROW_TILES)
        tile = (unit - begin) // num_blocks
        begin += tile * num_blocks
        block, end_block = unit - begin, tl.minimum(last_unit - begin, num_blocks)
        head = (tile // m_tiles * HEAD_GROUPS + head_group).to(tl.int64)
        table_ptr = page_table_ptr + slot * page_table_stride_s
        pages = _load_pages(table_ptr, page_table_stride_p, block, position, PAGE_SIZE, BLOCK_N)
        page_places = pages * tl.cast(pages_strides[0], tl.int64)
        pages = _load_pages(table_ptr, page_table_stride_p, block + 1, position, PAGE_SIZE, BLOCK_N)

        m_offs = (tile % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        tokens = m_offs // GROUP
        heads = head * GROUP + m_offs % GROUP
        m_mask = tokens < num_tokens
        q_rows = q_ptr + (first + tokens) * q_strides[0] + heads * q_strides[1]
        q = _load_columns(q_rows, m_mask, COLUMNS, CHUNKS)
        k_new_ptr = k_ptr + (first - position) * k_strides[0] + head * k_strides[1]
        v_new_ptr = v_ptr + (first - position) * v_strides[0] + head * v_strides[1]
        k_old_ptr = k_pages_ptr + head * pages_strides[2]
        v_old_ptr = v_pages_ptr + head * pages_strides[2]

        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = ()
        for _c in tl.static_range(CHUNKS):
            acc = acc + (tl.zeros([BLOCK_M, COLUMNS], tl.float32),)
        for i in tl.range(block, end_block, num_stages=STAGES):
            keys = i * BLOCK_N + tl.arange(0, BLOCK_N)
            is_old = keys < position
            is_key = keys < position + num_tokens
            places = (keys.to(tl.uint32) % PAGE_SIZE) * tl.cast(pages_strides[1], tl.int64)
            places += page_places
            new_k = keys * tl.cast(k_strides[0], tl.int64)
            new_v = keys * tl.cast(v_strides[0], tl.int64)
            k_rows = tl.where(is_old, k_old_ptr + places, k_new_ptr + new_k)
            v_rows = tl.where(is_old, v_old_ptr + places, v_new_ptr + new_v)
            k_rows = tl.multiple_of(k_rows, ALIGNMENT)  # which compilers forget at a selection
            v_rows = tl.multiple_of(v_rows, ALIGNMENT)
            k = _load_columns(k_rows, is_key, COLUMNS, CHUNKS)
            v = _load_columns(v_rows, is_key, COLUMNS, CHUNKS)
            # Page numbers arrive two blocks before their keys are copied, so that no copy waits.
            page_places = pages * tl.cast(pages_strides[0], tl.int64)
            pages = _load_pages(table_ptr, page_table_stride_p, i + 2, position, PAGE_SIZE, BLOCK_N)

            acc, peak, total = _add_block(
                acc, peak, total, q, k, v, keys, position + tokens, (i + 1) * BLOCK_N > position,
                scale_log2,
            )  # fmt: skip

        if (block == 0) & (end_block == num_blocks):
            y = ()
            for c in tl.static_range(CHUNKS):
                y = y + ((acc[c] / total[:, None]).to(out_ptr.dtype.element_ty),)
            out_rows = out_ptr + (first + tokens) * out_strides[0] + heads * out_strides[1]
            _store_columns(out_rows, y, m_mask, COLUMNS)
        else:
            place = (block == 0).to(tl.int32) * PROGRAMS + pid
            rows = place.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            _store_columns(parts_ptr + rows * D, acc, m_mask, COLUMNS)
            sums_rows = sums_ptr + place * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
            tl.store(sums_rows, peak)
            tl.store(sums_rows + BLOCK_M, total)
            start = _program_of(begin, share, num_larger)
            end = _program_of(begin + num_blocks - 1, share, num_larger)
            cut_tile = head.to(tl.int32) * m_tiles + tile % m_tiles
            starter = start * HEAD_GROUPS + head_group
            cut_ptr = cuts_ptr + place * 8
            _store_cut(cut_ptr, end - start + 1, starter, first, num_tokens, cut_tile)
        unit = begin + end_block


@triton.jit
def _add_up(
    out_ptr,
    parts_ptr,
    sums_ptr,
    out_stride_n,
    out_stride_h,
    num_programs,
    num_parts,
    start,
    first,
    num_tokens,
    tile,
    worker,
    num_workers,
    HEAD_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the parts of a worker's pieces of a tile, ROWS by COLUMNS each."""
    m_tiles = tl.cdiv(num_tokens * GROUP, BLOCK_M)
    first_row, head = (tile % m_tiles) * BLOCK_M, tile // m_tiles
    num_rows = tl.minimum(num_tokens * GROUP - first_row, BLOCK_M)
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    for piece in range(worker, tl.cdiv(num_rows, ROWS) * ACROSS, num_workers):
        m_offs = piece // ACROSS * ROWS + tl.arange(0, ROWS)
        d_offs = piece % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        mask = (m_offs < num_rows)[:, None] & (d_offs < D)[None, :]
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, num_parts, PARTS):
            parts = begin + tl.arange(0, PARTS)
            is_part = (parts < num_parts)[:, None]
            places = tl.where(parts == 0, num_programs, parts * HEAD_GROUPS) + start
            places = places.to(tl.int64)[:, None]
            sums_ptrs = sums_ptr + places * (2 * BLOCK_M) + m_offs[None, :]
            peaks = tl.load(sums_ptrs, mask=is_part, other=float("-inf"))
            totals = tl.load(sums_ptrs + BLOCK_M, mask=is_part, other=0.0)
            rows = (places * BLOCK_M + m_offs[None, :]) * D
            values = tl.load(
                parts_ptr + rows[:, :, None] + d_offs[None, None, :],
                mask=is_part[:, :, None] & mask[None, :, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            weights, decay = tl.exp2(peaks - new_peak[None, :]), tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights * totals, 0)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
            peak = new_peak
        y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        rows = first_row + m_offs
        out_rows = out_ptr + (first + rows // GROUP) * out_stride_n
        out_rows += (head * GROUP + rows % GROUP) * out_stride_h
        tl.store(out_rows[:, None] + d_offs[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_requests", "num_rows", "page_table_stride_s"])
def finish_kernel(
    # inputs: k, v [N, Hkv, D]; parts, sums and cuts as above
    k_ptr, v_ptr, parts_ptr, sums_ptr, cuts_ptr,
    # in-out: k_pages, v_pages [P, PAGE_SIZE, Hkv, D]
    k_pages_ptr, v_pages_ptr,
    # output: out [N, Hq, D]
    out_ptr,
    # metadata: page_table [S, max_pages]; seq_len [S]; cu_seqlens [B + 1]; slots [B]
    page_table_ptr, seq_len_ptr, cu_seqlens_ptr, slots_ptr, num_requests, num_rows,
    # strides as above
    k_strides, v_strides, pages_strides, out_strides, page_table_stride_s, page_table_stride_p,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, HEAD_GROUPS: tl.constexpr, REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    PART_ROWS: tl.constexpr, PART_COLUMNS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_QUERY_HEADS: tl.constexpr, IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Append rows and zero padding rows; then add up a share of the tile that a part belongs to.

    All programs at the parts of a tile share its rows; PARTS parts are added in one go.
    """
    worker, place = tl.program_id(0), tl.program_id(1)
    num_workers = tl.num_programs(0)
    d_offs = tl.arange(0, BLOCK_D)
    d_mask = d_offs < D
    requests = tl.arange(0, REQUESTS)
    is_request = requests < num_requests
    # The first PROGRAMS programs append: they find room beside those of the first launch.
    first_row = place * num_workers + worker
    for row in range(first_row, tl.where(first_row < PROGRAMS, num_rows, 0), PROGRAMS):
        begins = tl.load(cu_seqlens_ptr + requests, mask=is_request, other=0)
        ends = tl.load(cu_seqlens_ptr + 1 + requests, mask=is_request, other=0)
        slots = tl.load(slots_ptr + requests, mask=is_request, other=-1)
        is_mine = (begins <= row) & (row < ends)
        slot = tl.max(tl.where(is_mine, slots, -1), 0).to(tl.int64)
        begin = tl.max(tl.where(is_mine, begins, 0), 0)
        if slot < 0:
            q_heads = tl.arange(0, BLOCK_QUERY_HEADS)
            out_rows = out_ptr + row * tl.cast(out_strides[0], tl.int64) + q_heads * out_strides[1]
            zeros = tl.zeros([BLOCK_QUERY_HEADS, BLOCK_D], out_ptr.dtype.element_ty)
            q_mask = (q_heads < HEADS * GROUP)[:, None] & d_mask[None, :]
            tl.store(out_rows[:, None] + d_offs[None, :], zeros, mask=q_mask)
        else:
            position = (tl.load(seq_len_ptr + slot) + row - begin).to(tl.int32)
            ptr = page_table_ptr + slot * page_table_stride_s
            ptr += (position // PAGE_SIZE) * tl.cast(page_table_stride_p, tl.int64)
            heads = tl.arange(0, BLOCK_HEADS).to(tl.int64)
            places = tl.load(ptr) * tl.cast(pages_strides[0], tl.int64) + heads * pages_strides[2]
            places += (position % PAGE_SIZE) * tl.cast(pages_strides[1], tl.int64)
            mask = (heads < HEADS)[:, None] & d_mask[None, :]
            k_rows = k_ptr + row * tl.cast(k_strides[0], tl.int64) + heads * k_strides[1]
            v_rows = v_ptr + row * tl.cast(v_strides[0], tl.int64) + heads * v_strides[1]
            k = tl.load(k_rows[:, None] + d_offs[None, :], mask=mask, other=0.0)
            v = tl.load(v_rows[:, None] + d_offs[None, :], mask=mask, other=0.0)
            tl.store((k_pages_ptr + places)[:, None] + d_offs[None, :], k, mask=mask)
            tl.store((v_pages_ptr + places)[:, None] + d_offs[None, :], v, mask=mask)

    if IS_OVERLAPPED:
        gdc_wait()
    cut_ptr = cuts_ptr + place * 8
    num_parts, start = tl.load(cut_ptr), tl.load(cut_ptr + 1)
    first, num_tokens = tl.load(cut_ptr + 2).to(tl.int64), tl.load(cut_ptr + 3)
    tile = tl.load(cut_ptr + 4)
    if num_parts > 0:
        part = tl.where(place < PROGRAMS, (place - start) // HEAD_GROUPS, 0)
        _add_up(
            out_ptr, parts_ptr, sums_ptr, out_strides[0], out_strides[1], PROGRAMS, num_parts,
            start, first, num_tokens, tile, part * num_workers + worker, num_parts * num_workers,
            HEAD_GROUPS, GROUP, D, BLOCK_M, PARTS, PART_ROWS, PART_COLUMNS,
        )  # fmt: skip
