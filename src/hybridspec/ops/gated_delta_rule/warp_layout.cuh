// How a warp holds matrices, whatever ring a verify kernel has.
//
// Lane (g, t) = (lane / 4, lane % 4). A row of 32 numbers is four chunks of 16 bytes, one for each t,
// so lane (g, t) loads numbers 8t .. 8t+7 of row g at once. Tensor-core products sum over pairs
// (2t, 2t+1) of each lane, and any order of the sum will do if both operands have it: register j of a
// chunk serves as pair j, that is columns 8t+2j, 8t+2j+1. The same holds for value rows: those of lane
// row g are 8 (g / 2) + 2j + g % 2 of 32 for each j, and what comes out is transposed into register j of
// a chunk.
//
// The launch defines: ACT (Bf16 or Fp16), STATE_BITS (16: as ACT, 32, 8), GATE, A_LOG and DT_BIAS
// (Bf16, Fp16 or Fp32), HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, STATE_STRIDE (bytes between state
// rows), SCALE_GROUP (columns of a factor of an 8-bit state), NEVER (a fold_threshold), SPLITS, WARPS,
// SHARED_BYTES (of a warp), BLOCKS_PER_MULTIPROCESSOR, EVICT_FIRST (whether states that are only read
// leave the cache early). A kernel's own header defines TILES, how many tiles of eight rows are multiplied
// with the state.
#pragma once

#include "primitives.cuh"

constexpr int GROUPS = KEY_DIM / 32;          // of key columns
constexpr int PART = VALUE_DIM / SPLITS;      // value rows of one warp
constexpr int BLOCKS = PART / 32;             // of value rows
constexpr int RATIO = VALUE_HEADS / HEADS;    // value heads of a key head

static_assert(KEY_DIM % 32 == 0 && PART % 32 == 0, "rows are loaded 32 numbers at a time");

DEVICE uint64 offset(uint32 index, uint32 stride) { return static_cast<uint64>(index) * stride; }

// What a warp works on, PART value rows of a head of a request from value_first on, and its lane (g, t).
struct Work {
    uint32 request, h, hv, value_first, g, t;
    DEVICE Work() {
        const uint32 item = block_index() * WARPS + warp_index();
        hv = item / SPLITS % VALUE_HEADS, request = item / SPLITS / VALUE_HEADS;
        value_first = item % SPLITS * PART, h = hv / RATIO;
        g = lane_index() / 4, t = lane_index() % 4;
    }
};

// d = c + rows other^T for 32 columns, of which a lane has those of row g: rows g and g + 8 of the
// left factor are `first` and `second`. Lane (g, t) gets columns 2t, 2t + 1 of both.
template <class Type = ACT>
DEVICE void multiply(float (&d)[4], const Chunk& first, const Chunk& second, const Chunk& other, const float (&c)[4]) {
    Type::mma(d, {first.r[0], second.r[0], first.r[1], second.r[1]}, other.r[0], other.r[1], c);
    Type::mma(d, {first.r[2], second.r[2], first.r[3], second.r[3]}, other.r[2], other.r[3], d);
}

struct Fp32;
template <class Type>
DEVICE float load_number(const void* from, uint64 index) {
    return Type::first(static_cast<const uint16*>(from)[index]);
}
template <>
DEVICE float load_number<Fp32>(const void* from, uint64 index) {
    return static_cast<const float*>(from)[index];
}

// log(1 + e^x), by series where e^-|x| would vanish beside 1.
DEVICE float softplus(float x) {
    float small = exponential(x < 0 ? x : -x);
    float series = small * (1 - small * (0.5f - small * (0.33333333f - small * 0.25f)));
    return (x > 0 ? x : 0.f) + (small < 0.01f ? series : logarithm(1 + small));
}
