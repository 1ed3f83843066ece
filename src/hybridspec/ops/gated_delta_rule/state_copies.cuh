// State rows on their way to shared memory and back.
#pragma once

#include "verify_states.cuh"

// Where a turn is long its loop stays a loop: instructions that do not fit into their cache take
// longer than all else.
#if STATE_BITS == 16
#define BLOCK_LOOP UNROLL
#else
#define BLOCK_LOOP ROLLED
#endif

constexpr int ROW_BYTES = State::ROW_BYTES, SCALE_BYTES = State::SCALE_BYTES;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;

static_assert(ROW_CHUNKS >= 8 && (ROW_CHUNKS & (ROW_CHUNKS - 1)) == 0, "chunks are exchanged within 8");

// Copy 32 state rows, and their factors, to shared memory. Lines that are read once
// are the first to make room in the cache; those that a fold stores stay.
template <bool read_once>
DEVICE void copy_rows_as(uint8* rows, const uint8* state) {
    constexpr uint32 ROWS = 32 / ROW_CHUNKS;  // that a warp copies at once
    const uint32 row = lane_index() / ROW_CHUNKS, chunk = lane_index() % ROW_CHUNKS;
    UNROLL
    for (uint32 i = 0; i < 32; i += ROWS)
        copy_async<read_once>(rows + (i + row) * ROW_BYTES + 16 * (chunk ^ State::exchange(i + row)),
                              state + (i + row) * STATE_STRIDE + 16 * chunk);
}
DEVICE void copy_rows(uint8* rows, uint8* factors, const uint8* state, const uint8* scales, bool may_fold) {
    if (EVICT_FIRST && !may_fold) copy_rows_as<true>(rows, state);
    else copy_rows_as<false>(rows, state);
    if (SCALE_BYTES && lane_index() < 2 * SCALE_BYTES)
        copy_async<false>(factors + 16 * lane_index(), scales + 16 * lane_index());
}
// Store them from there, whole lines at a time.
DEVICE void store_rows(const uint8* rows, const uint8* factors, uint8* state, uint8* scales) {
    constexpr uint32 ROWS = 32 / ROW_CHUNKS;
    const uint32 row = lane_index() / ROW_CHUNKS, chunk = lane_index() % ROW_CHUNKS;
    UNROLL
    for (uint32 i = 0; i < 32; i += ROWS)
        store(state + (i + row) * STATE_STRIDE + 16 * chunk,
              load_shared(rows + (i + row) * ROW_BYTES + 16 * (chunk ^ State::exchange(i + row))));
    if (SCALE_BYTES && lane_index() < 2 * SCALE_BYTES)
        store(scales + 16 * lane_index(), load_shared(factors + 16 * lane_index()));
}

// Zero the warp's columns, from `out` on, of rows first, first + step, ...
DEVICE void zero_rows(uint16* out, uint32 stride, uint32 first, uint32 last, uint32 step) {
    for (uint32 row = first; row < last; row += step)
        for (uint32 i = lane_index(); i < PART / 8; i += 32)
            store(out + offset(row, stride) + 8 * i, Chunk{{0, 0, 0, 0}});
}
