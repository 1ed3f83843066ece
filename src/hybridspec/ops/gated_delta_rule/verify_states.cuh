// How checkpoints are stored: in 16 bits, in 32, or in 8 with a factor for every 32 columns.
//
// State rows lie in shared memory as they lie in the pool, but for the chunks of 16 bytes of a row,
// which are exchanged, so that eight lanes that read at once meet eight banks: chunk c of row r is
// at c ^ exchange(r). A format is a struct with
//
//     ROW_BYTES, SCALE_BYTES  of the numbers of a row, and of its factors
//     TOGETHER                groups of 32 columns that are put back together by a fold
//     HAS_UNIT_ROWS           whether rows of X have length one in products with the state
//     exchange(row)           as above
//     take(x, excess, unit)   makes of rows of X what `multiply` wants; x unit has length one
//     multiply(c, ...)        c += S X^T for 32 columns of two state rows of each lane
//     fold(first, ...)        columns 32 group + 8t .. + 7 of a pair of state rows, e^{G_P} S0 + (w u)^T k,
//                             the latter by `added.to(d, j, c)` for columns 8t + 2j, 8t + 2j + 1
//     put(rows, ...)          puts such columns of one row where they were read, rounded
//
// A pair of rows is `row`, counted from the lane's first row in a block, and the one two behind it.
#pragma once

#include "warp_layout.cuh"

// The rows of a block, from lane (g, t)'s first row on, and their factors; all have the same exchange.
struct LaneRows {
    uint8 *numbers, *factors;
    uint32 exchanged, t;
};

using Columns = float[8];
using Tiles = float[TILES][4];

// What formats share that multiply rows of X as they are.
template <int bytes>
struct WideFormat {
    static constexpr int ROW_BYTES = KEY_DIM * bytes, SCALE_BYTES = 0, TOGETHER = 1;
    static constexpr bool HAS_UNIT_ROWS = false;
    DEVICE static void take(Chunk (&)[GROUPS][TILES], float (&)[GROUPS][TILES][4], const float (&)[TILES]) {}
    template <class Terms>
    DEVICE static void add(Columns& first, Columns& second, const Terms& added) {
        UNROLL
        for (int j = 0; j < 4; ++j) {
            float c[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
            added.to(c, j, c);
            UNROLL
            for (int i = 0; i < 2; ++i) first[2 * j + i] = c[i], second[2 * j + i] = c[2 + i];
        }
    }
};

struct State16 : WideFormat<2> {
    DEVICE static uint32 exchange(uint32 row) { return row % 2 * 4; }
    DEVICE static uint8* place(const LaneRows& rows, uint32 row, uint32 group) {
        return rows.numbers + row * ROW_BYTES + 16 * ((4 * group + rows.t) ^ rows.exchanged);
    }
    DEVICE static void multiply(Tiles& c, const LaneRows& rows, uint32 row, uint32 group, const Chunk (&x)[TILES], const Tiles&) {
        const Chunk first = load_shared(place(rows, row, group)), second = load_shared(place(rows, row + 2, group));
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) ::multiply(c[tile], first, second, x[tile], c[tile]);
    }
    DEVICE static void widen(Columns& x, const Chunk& pairs, float factor) {
        UNROLL
        for (int j = 0; j < 4; ++j) x[2 * j] = factor * ACT::first(pairs.r[j]), x[2 * j + 1] = factor * ACT::second(pairs.r[j]);
    }
    template <class Terms>
    DEVICE static void fold(Columns& first, Columns& second, const LaneRows& rows, uint32 row, uint32 group, const Terms& added,
                            float window_decay) {
        widen(first, load_shared(place(rows, row, group)), window_decay);
        widen(second, load_shared(place(rows, row + 2, group)), window_decay);
        add(first, second, added);
    }
    DEVICE static void put(const LaneRows& rows, uint32 row, uint32 group, const Columns (&x)[TOGETHER]) {
        Chunk pairs;
        UNROLL
        for (int j = 0; j < 4; ++j) pairs.r[j] = ACT::pack(x[0][2 * j], x[0][2 * j + 1]);
        store_shared(place(rows, row, group), pairs);
    }
};

// Split into the nearest 16-bit number and the rest, rounded: 16 bits of mantissa in bf16.
struct State32 : WideFormat<4> {
    DEVICE static uint32 exchange(uint32 row) { return row % 2; }
    DEVICE static uint8* place(const LaneRows& rows, uint32 row, uint32 group, int half) {
        return rows.numbers + row * ROW_BYTES + 16 * ((8 * group + 2 * rows.t + half) ^ rows.exchanged);
    }
    DEVICE static void read(Columns& x, const LaneRows& rows, uint32 row, uint32 group) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const Chunk part = load_shared(place(rows, row, group, half));
            UNROLL
            for (int i = 0; i < 4; ++i) x[4 * half + i] = as_float(part.r[i]);
        }
    }
    DEVICE static void split(Chunk& pairs, Chunk& rest, const Columns& x) {
        UNROLL
        for (int j = 0; j < 4; ++j) {
            pairs.r[j] = ACT::pack(x[2 * j], x[2 * j + 1]);
            rest.r[j] = ACT::pack(x[2 * j] - ACT::first(pairs.r[j]), x[2 * j + 1] - ACT::second(pairs.r[j]));
        }
    }
    DEVICE static void multiply(Tiles& c, const LaneRows& rows, uint32 row, uint32 group, const Chunk (&x)[TILES], const Tiles&) {
        Columns first, second;
        Chunk first_pairs, first_rest, second_pairs, second_rest;
        read(first, rows, row, group);
        read(second, rows, row + 2, group);
        split(first_pairs, first_rest, first);
        split(second_pairs, second_rest, second);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            ::multiply(c[tile], first_pairs, second_pairs, x[tile], c[tile]);
            ::multiply(c[tile], first_rest, second_rest, x[tile], c[tile]);
        }
    }
    template <class Terms>
    DEVICE static void fold(Columns& first, Columns& second, const LaneRows& rows, uint32 row, uint32 group, const Terms& added,
                            float window_decay) {
        read(first, rows, row, group);
        UNROLL
        for (int i = 0; i < 8; ++i) first[i] *= window_decay;
        read(second, rows, row + 2, group);
        UNROLL
        for (int i = 0; i < 8; ++i) second[i] *= window_decay;
        add(first, second, added);
    }
    DEVICE static void put(const LaneRows& rows, uint32 row, uint32 group, const Columns (&x)[TOGETHER]) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            Chunk part;
            UNROLL
            for (int i = 0; i < 4; ++i) part.r[i] = as_bits(x[0][4 * half + i]);
            store_shared(place(rows, row, group, half), part);
        }
    }
};

// Integers -127 .. 127 times a bf16 factor for every 32 columns. They become fp16 numbers 1152 + n,
// since PRMT alone makes these of bytes 128 + n, and the sums that this adds are taken off again.
struct State8 {
    static constexpr int ROW_BYTES = KEY_DIM, SCALE_BYTES = 2 * GROUPS, TOGETHER = GROUPS;
    static constexpr bool HAS_UNIT_ROWS = true;  // so that all of them are in the range of fp16
    static_assert(GROUPS == 4 && SCALE_GROUP == 32, "a lane of four for each group");

    DEVICE static uint32 exchange(uint32 row) { return row % 2 * 2 + row / 8 % 2 * 4; }
    DEVICE static uint8* place(const LaneRows& rows, uint32 row, uint32 group) {
        const uint32 t = rows.t;
        return rows.numbers + row * ROW_BYTES + 16 * ((2 * group + t / 2) ^ rows.exchanged) + t % 2 * 8;
    }
    DEVICE static Chunk read(const LaneRows& rows, uint32 row, uint32 group) {
        const uint32* from = reinterpret_cast<const uint32*>(place(rows, row, group));
        const uint32 bytes[2] = {from[0] ^ 0x80808080u, from[1] ^ 0x80808080u};
        Chunk pairs;
        UNROLL
        for (int j = 0; j < 4; ++j) pairs.r[j] = select_bytes(bytes[j / 2], 0x64646464u, j % 2 ? 0x4342 : 0x4140);
        return pairs;
    }
    DEVICE static float factor_of(const LaneRows& rows, uint32 row, uint32 group) {
        const uint32 both = reinterpret_cast<const uint32*>(rows.factors + row * SCALE_BYTES)[group / 2];
        return group % 2 ? Bf16::second(both) : Bf16::first(both);
    }

    // `excess` becomes -1152 (sum of a row of x).
    DEVICE static void take(Chunk (&x)[GROUPS][TILES], float (&excess)[GROUPS][TILES][4], const float (&unit)[TILES]) {
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            UNROLL
            for (int i = 0; i < GROUPS; ++i) {
                UNROLL
                for (int j = 0; j < 4; ++j) {
                    uint32& pair = x[i][tile].r[j];
                    pair = Fp16::pack(unit[tile] * ACT::first(pair), unit[tile] * ACT::second(pair));
                }
                const Chunk minus_1152{{0xe480e480u, 0xe480e480u, 0xe480e480u, 0xe480e480u}};
                const float zeros[4] = {0, 0, 0, 0};
                ::multiply<Fp16>(excess[i][tile], minus_1152, minus_1152, x[i][tile], zeros);
            }
    }
    DEVICE static void multiply(Tiles& c, const LaneRows& rows, uint32 row, uint32 group, const Chunk (&x)[TILES],
                                const Tiles& excess) {
        const float factors[2] = {factor_of(rows, row, group), factor_of(rows, row + 2, group)};
        const Chunk first = read(rows, row, group), second = read(rows, row + 2, group);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            float part[4];
            ::multiply<Fp16>(part, first, second, x[tile], excess[tile]);
            UNROLL
            for (int i = 0; i < 4; ++i) c[tile][i] += factors[i / 2] * part[i];
        }
    }
    // The tensor cores turn integers into numbers: times one, less 1152.
    template <class Terms>
    DEVICE static void fold(Columns& first, Columns& second, const LaneRows& rows, uint32 row, uint32 group, const Terms& added,
                            float window_decay) {
        const uint32 g = lane_index() / 4;
        const uint32 identity = g / 2 == rows.t ? (g % 2 ? 0x3c000000u : 0x00003c00u) : 0;
        const float minus_1152[4] = {-1152, -1152, -1152, -1152}, zeros[4] = {0, 0, 0, 0};
        float factor[2];
        Chunk integers[2];
        UNROLL
        for (int half = 0; half < 2; ++half) {
            factor[half] = window_decay * factor_of(rows, row + 2 * half, group);
            integers[half] = read(rows, row + 2 * half, group);
        }
        UNROLL
        for (int j = 0; j < 4; ++j) {
            float old[4], sum[4];
            Fp16::mma_8(old, {integers[0].r[j], integers[1].r[j]}, identity, minus_1152);
            added.to(sum, j, zeros);
            UNROLL
            for (int i = 0; i < 2; ++i) {
                first[2 * j + i] = fused_multiply_add(old[i], factor[0], sum[i]);
                second[2 * j + i] = fused_multiply_add(old[2 + i], factor[1], sum[2 + i]);
            }
        }
    }
    // The factor of group t of a row is worked out by lane t of its four.
    DEVICE static void put(const LaneRows& rows, uint32 row, uint32, const Columns (&x)[TOGETHER]) {
        const float largest = largest_of_group(x, rows.t);
        const bool vanishes = largest < 1e-30f;
        // 1 / 127; NaN if the largest is none or not finite, which zero times it is.
        const uint32 factor = Bf16::pack(vanishes ? 0 : fused_multiply_add(largest, 0.f, largest * 0.007874016f), 0);
        const float my_inverse = vanishes ? 0 : reciprocal(Bf16::first(factor));
        reinterpret_cast<uint16*>(rows.factors + row * SCALE_BYTES)[rows.t] = static_cast<uint16>(factor);
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const float inverse = from_lane(my_inverse, lane_index() / 4 * 4 + i);
            uint32 words[2];
            UNROLL
            for (int half = 0; half < 2; ++half) {
                uint32 integers[4];  // 1.5 2^23 + n has the bits of n at its end
                UNROLL
                for (int j = 0; j < 4; ++j) integers[j] = as_bits(x[i][4 * half + j] * inverse + 12582912.f);
                words[half] = select_bytes(select_bytes(integers[0], integers[1], 0x40),
                                           select_bytes(integers[2], integers[3], 0x40), 0x5410);
            }
            store_shared(place(rows, row, i), words[0], words[1]);
        }
    }
    // Largest magnitude in the 32 columns of group t, of which each lane of four has eight.
    DEVICE static float largest_of_group(const Columns (&x)[GROUPS], uint32 t) {
        float largest[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            float of[4];
            UNROLL
            for (int j = 0; j < 4; ++j) of[j] = larger_magnitude(x[i][j], x[i][4 + j]);
            largest[i] = larger_magnitude(larger_magnitude(of[0], of[1]), larger_magnitude(of[2], of[3]));
        }
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const float given = from_lane_xor(t & 2 ? largest[i] : largest[i + 2], 2);
            largest[i] = larger_magnitude(t & 2 ? largest[i + 2] : largest[i], given);
        }
        const float given = from_lane_xor(t & 1 ? largest[0] : largest[1], 1);
        return larger_magnitude(t & 1 ? largest[1] : largest[0], given);
    }
};

template <int bits>
struct FormatOf;
template <>
struct FormatOf<16> { using Type = State16; };
template <>
struct FormatOf<32> { using Type = State32; };
template <>
struct FormatOf<8> { using Type = State8; };
using State = FormatOf<STATE_BITS>::Type;
