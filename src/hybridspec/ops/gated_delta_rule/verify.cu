// The verify step in CUDA C++: the same equations as triton_verify.py, for heads of one size.
//
// One warp serves one request, one value head and PART of its value rows; it needs no other warp.
// With S0 the checkpoint, P live rows (u_j, k_j, G_j), w_j = e^{G_P - G_j}, and c_t the cumulative
// log-decay of the new rows:
//
//     r_t = beta_t v_t - beta_t e^{c_t} (e^{G_P} S0 k_t + sum_j w_j (k_j.k_t) u_j)
//     u   = M r,  M = (1 - N)^-1,  N_ts = -beta_t e^{c_t - c_s} k_t.k_s  (s < t)
//     y_t = e^{c_t} (e^{G_P} S0 q_t + sum_j w_j (k_j.q_t) u_j) + sum_{s <= t} e^{c_t - c_s} (q_t.k_s) u_s
//
// Only S0 k and S0 q need the state, and they need nothing but raw keys and queries: the state is on
// its way to shared memory while gates, M and history are worked out, and is read there once (a
// second time where the request folds).
//
// Keys and queries of a step are the rows of X: up to four tokens fit into one tile of eight rows,
// k_0 .. k_3, then q_0 .. q_3; up to eight take two tiles, one of keys and one of queries. Results have
// value rows down and rows of X across, so nothing is multiplied for tokens that do not exist.
//
// How a warp holds matrices. Lane (g, t) = (lane / 4, lane % 4). A row of 32 numbers is four chunks
// of 16 bytes, one for each t, so lane (g, t) loads numbers 8t .. 8t+7 of row g at once. Tensor-core
// products sum over pairs (2t, 2t+1) of each lane, and any order of the sum will do if both operands
// have it: register j of a chunk serves as pair j, that is columns 8t+2j, 8t+2j+1. The same holds for
// value rows: those of lane row g are 8 (g / 2) + 2j + g % 2 of 32 for each j, and what comes out is
// transposed into register j of a chunk.
//
// The launch defines: ACT (Bf16 or Fp16), STATE_BITS (16: as ACT, 32, 8), GATE_BITS (16: as ACT, or
// 32), HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, STATE_STRIDE (bytes between state rows), MOST_TOKENS
// (4 or 8), SPLITS, WARPS, BLOCKS_PER_MULTIPROCESSOR, EVICT_FIRST (whether states that are only
// read leave the cache early).

#include "primitives.cuh"

// Where a turn is long its loop stays a loop: instructions that do not fit into their cache take
// longer than all else.
#if STATE_BITS == 16
#define BLOCK_LOOP UNROLL
#else
#define BLOCK_LOOP ROLLED
#endif

constexpr int TILES = MOST_TOKENS / 4;        // of rows of X
constexpr int NEVER = 0x7fffffff;             // a fold_threshold
constexpr int GROUPS = KEY_DIM / 32;          // of key columns
constexpr int PART = VALUE_DIM / SPLITS;      // value rows of one warp
constexpr int BLOCKS = PART / 32;             // of value rows
constexpr int RATIO = VALUE_HEADS / HEADS;    // value heads of a key head
constexpr int ROW_BYTES = KEY_DIM * STATE_BITS / 8;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int SCALE_BYTES = STATE_BITS == 8 ? 2 * GROUPS : 0;  // of a row
constexpr int STAGED_BYTES = 512 * 3;  // of a block: 16 bytes a lane for live rows g and g + 8 of u, and for v
constexpr int SHARED_BYTES = PART * (ROW_BYTES + SCALE_BYTES) + BLOCKS * STAGED_BYTES;  // of a warp

static_assert(KEY_DIM % 32 == 0 && PART % 32 == 0, "rows are loaded 32 numbers at a time");
static_assert(ROW_CHUNKS >= 8 && (ROW_CHUNKS & (ROW_CHUNKS - 1)) == 0, "chunks are exchanged within 8");

struct Params {
    const uint16 *q, *k, *v;          // [N, H, K], [N, H, K], [N, HV, V]
    const void *a, *b;                // [N, HV]
    const float *A_log, *dt_bias;     // [HV]
    uint8* state;                     // [S, HV, V, K]
    uint8* state_scale;               // [S, HV, V, K / 32] bf16, factors of an 8-bit state
    uint16 *ring_k, *ring_u;          // [S, H, R, K], [S, HV, R, V]
    float* ring_decay;                // [S, HV, R]
    uint16* out;                      // [N, HV, V]
    const int *ring_start, *history_len;  // [S], or [B] if cursors are by row; no ring_start: 0
    const int *cu_seqlens, *slots;    // [B + 1], [B]; none: equally many rows each, slot b
    const signed char* is_fold;       // [B]; none: windows of at least fold_threshold rows fold
    uint32 q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h;
    uint32 a_stride_n, b_stride_n, out_stride_n, out_stride_h;
    uint32 state_stride_s, state_stride_h, scale_stride_s, scale_stride_h;  // bytes
    uint32 ring_k_stride_s, ring_k_stride_h, ring_k_stride_r;
    uint32 ring_u_stride_s, ring_u_stride_h, ring_u_stride_r;
    uint32 decay_stride_s, decay_stride_h;
    uint32 num_requests, num_rows, rows_per_request, ring_capacity;
    int fold_threshold, cursors_by_row, zero_padding, use_l2norm;
    float scale, beta_scale;
};

// log(1 + e^x), by series where e^-|x| would vanish beside 1.
DEVICE float softplus(float x) {
    float small = exponential(x < 0 ? x : -x);
    float series = small * (1 - small * (0.5f - small * (0.33333333f - small * 0.25f)));
    return (x > 0 ? x : 0.f) + (small < 0.01f ? series : logarithm(1 + small));
}

DEVICE uint64 offset(uint32 index, uint32 stride) { return static_cast<uint64>(index) * stride; }

DEVICE float load_gate(const void* from, uint64 index) {
#if GATE_BITS == 32
    return static_cast<const float*>(from)[index];
#else
    return ACT::first(static_cast<const uint16*>(from)[index]);
#endif
}

// d = c + rows other^T for 32 columns, of which a lane has those of row g: rows g and g + 8 of the
// left factor are `first` and `second`. Lane (g, t) gets columns 2t, 2t + 1 of both.
template <class Type = ACT>
DEVICE void multiply(float (&d)[4], const Chunk& first, const Chunk& second, const Chunk& other, const float (&c)[4]) {
    Type::mma(d, {first.r[0], second.r[0], first.r[1], second.r[1]}, other.r[0], other.r[1], c);
    Type::mma(d, {first.r[2], second.r[2], first.r[3], second.r[3]}, other.r[2], other.r[3], d);
}

// State rows in shared memory. Chunks of a row are exchanged, so that eight lanes that read at once
// meet eight banks: chunk c of row r lies at c ^ exchange(r).
DEVICE uint32 exchange(uint32 row) {
    return STATE_BITS == 16 ? row % 2 * 4 : STATE_BITS == 32 ? row % 2 : row % 2 * 2 + row / 8 % 2 * 4;
}

// Columns 32 group + 8t .. + 7 of a state row, as a lane reads them. `rows` is the lane's first row
// in a block and `exchanged` the exchange of it and of all others that the lane reads.
#if STATE_BITS == 16
struct StateColumns {
    Chunk pairs;
    DEVICE StateColumns(const uint8* rows, uint32 exchanged, uint32 row, uint32 group, uint32 t) {
        pairs = load_shared(rows + row * ROW_BYTES + 16 * ((4 * group + t) ^ exchanged));
    }
    DEVICE void widen(float (&x)[8], float factor) const {
        UNROLL
        for (int j = 0; j < 4; ++j) x[2 * j] = factor * ACT::first(pairs.r[j]), x[2 * j + 1] = factor * ACT::second(pairs.r[j]);
    }
};
#elif STATE_BITS == 32
// Split into the nearest 16-bit number and the rest, rounded: 16 bits of mantissa in bf16.
struct StateColumns {
    float x[8];
    DEVICE StateColumns(const uint8* rows, uint32 exchanged, uint32 row, uint32 group, uint32 t) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            Chunk part = load_shared(rows + row * ROW_BYTES + 16 * ((8 * group + 2 * t + half) ^ exchanged));
            UNROLL
            for (int i = 0; i < 4; ++i) x[4 * half + i] = as_float(part.r[i]);
        }
    }
    DEVICE void widen(float (&wide)[8], float factor) const {
        UNROLL
        for (int i = 0; i < 8; ++i) wide[i] = factor * x[i];
    }
    DEVICE void split(Chunk& pairs, Chunk& rest) const {
        UNROLL
        for (int j = 0; j < 4; ++j) {
            pairs.r[j] = ACT::pack(x[2 * j], x[2 * j + 1]);
            rest.r[j] = ACT::pack(x[2 * j] - ACT::first(pairs.r[j]), x[2 * j + 1] - ACT::second(pairs.r[j]));
        }
    }
};
#else
// Integers -127 .. 127 as fp16 numbers 1152 + n: PRMT alone makes them of bytes 128 + n.
struct StateColumns {
    uint32 bytes[2];
    DEVICE StateColumns(const uint8* rows, uint32 exchanged, uint32 row, uint32 group, uint32 t) {
        const uint32* from = reinterpret_cast<const uint32*>(
            rows + row * ROW_BYTES + 16 * ((2 * group + t / 2) ^ exchanged) + t % 2 * 8);
        bytes[0] = from[0] ^ 0x80808080u, bytes[1] = from[1] ^ 0x80808080u;
    }
    DEVICE Chunk pairs() const {
        Chunk pairs;
        UNROLL
        for (int j = 0; j < 4; ++j) pairs.r[j] = select_bytes(bytes[j / 2], 0x64646464u, j % 2 ? 0x4342 : 0x4140);
        return pairs;
    }
};
#endif

// The factor of a group of columns of an 8-bit state row; `factors` are those of the row.
DEVICE float factor_of(const uint8* factors, uint32 group) {
    const uint32 both = reinterpret_cast<const uint32*>(factors)[group / 2];
    return group % 2 ? Bf16::second(both) : Bf16::first(both);
}

// c += S X^T for 32 columns of two state rows of each lane. 8-bit states: `x` is fp16, `excess` is
// -1152 (sum of a row of x), and `factors` are those of both rows.
DEVICE void multiply_state(float (&c)[TILES][4], const StateColumns& first, const StateColumns& second, const Chunk (&x)[TILES],
                           const float (&excess)[TILES][4], const float (&factors)[2]) {
#if STATE_BITS == 8
    const Chunk first_pairs = first.pairs(), second_pairs = second.pairs();
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        float part[4];
        multiply<Fp16>(part, first_pairs, second_pairs, x[tile], excess[tile]);
        UNROLL
        for (int i = 0; i < 4; ++i) c[tile][i] += factors[i / 2] * part[i];
    }
#elif STATE_BITS == 32
    Chunk first_pairs, first_rest, second_pairs, second_rest;
    first.split(first_pairs, first_rest);
    second.split(second_pairs, second_rest);
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        multiply(c[tile], first_pairs, second_pairs, x[tile], c[tile]);
        multiply(c[tile], first_rest, second_rest, x[tile], c[tile]);
    }
#else
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) multiply(c[tile], first.pairs, second.pairs, x[tile], c[tile]);
#endif
}

// Groups of columns of a folding state row that are put back together. For 8-bit states all: each of the
// four lanes of a row works out the factor of one group.
constexpr int TOGETHER = STATE_BITS == 8 ? GROUPS : 1;

// Put columns 32 (group + i) + 8t .. + 7 of a state row where they were read in shared memory, rounded.
// `row` points at the row, and `factors` at its factors if the state has 8 bits.
DEVICE void put_columns(uint8* row, uint32 exchanged, uint8* factors, uint32 group, uint32 t, const float (&x)[TOGETHER][8]) {
#if STATE_BITS == 32
    UNROLL
    for (int half = 0; half < 2; ++half) {
        Chunk part;
        UNROLL
        for (int i = 0; i < 4; ++i) part.r[i] = as_bits(x[0][4 * half + i]);
        store_shared(row + 16 * ((8 * group + 2 * t + half) ^ exchanged), part);
    }
#elif STATE_BITS == 16
    Chunk pairs;
    UNROLL
    for (int j = 0; j < 4; ++j) pairs.r[j] = ACT::pack(x[0][2 * j], x[0][2 * j + 1]);
    store_shared(row + 16 * ((4 * group + t) ^ exchanged), pairs);
#else
    static_assert(GROUPS == 4, "a lane of four for each group");
    float largest[4];  // magnitude in 32 columns of each group: first the lane's, then that of group t in largest[0]
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
    largest[0] = larger_magnitude(t & 1 ? largest[1] : largest[0], given);
    const bool vanishes = largest[0] < 1e-30f;
    // 1 / 127; no number if the largest is none or not finite, which zero times it is.
    const uint32 factor = Bf16::pack(vanishes ? 0 : fused_multiply_add(largest[0], 0.f, largest[0] * 0.007874016f), 0);
    const float my_inverse = vanishes ? 0 : reciprocal(Bf16::first(factor));
    reinterpret_cast<uint16*>(factors)[t] = static_cast<uint16>(factor);
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
        store_shared(row + 16 * ((2 * i + t / 2) ^ exchanged) + t % 2 * 8, words[0], words[1]);
    }
#endif
}

// Copy 32 state rows, and their factors, to shared memory. Lines that are read once
// are the first to make room in the cache; those that a fold stores stay.
template <bool read_once>
DEVICE void copy_rows_as(uint8* rows, const uint8* state) {
    constexpr uint32 ROWS = 32 / ROW_CHUNKS;  // that a warp copies at once
    const uint32 row = lane_index() / ROW_CHUNKS, chunk = lane_index() % ROW_CHUNKS;
    UNROLL
    for (uint32 i = 0; i < 32; i += ROWS)
        copy_async<read_once>(rows + (i + row) * ROW_BYTES + 16 * (chunk ^ exchange(i + row)),
                              state + (i + row) * STATE_STRIDE + 16 * chunk);
}
DEVICE void copy_rows(uint8* rows, uint8* factors, const uint8* state, const uint8* scales, bool may_fold) {
    if (EVICT_FIRST && !may_fold) copy_rows_as<true>(rows, state);
    else copy_rows_as<false>(rows, state);
    if (STATE_BITS == 8 && lane_index() < 2 * SCALE_BYTES)
        copy_async<false>(factors + 16 * lane_index(), scales + 16 * lane_index());
}
// Store them from there, whole lines at a time.
DEVICE void store_rows(const uint8* rows, const uint8* factors, uint8* state, uint8* scales) {
    constexpr uint32 ROWS = 32 / ROW_CHUNKS;
    const uint32 row = lane_index() / ROW_CHUNKS, chunk = lane_index() % ROW_CHUNKS;
    UNROLL
    for (uint32 i = 0; i < 32; i += ROWS)
        store(state + (i + row) * STATE_STRIDE + 16 * chunk,
              load_shared(rows + (i + row) * ROW_BYTES + 16 * (chunk ^ exchange(i + row))));
    if (STATE_BITS == 8 && lane_index() < 2 * SCALE_BYTES)
        store(scales + 16 * lane_index(), load_shared(factors + 16 * lane_index()));
}

// Zero the warp's columns, from `out` on, of rows first, first + step, ...
DEVICE void zero_rows(const Params& p, uint16* out, uint32 first, uint32 last, uint32 step) {
    for (uint32 row = first; row < last; row += step)
        for (uint32 i = lane_index(); i < PART / 8; i += 32)
            store(out + offset(row, p.out_stride_n) + 8 * i, Chunk{{0, 0, 0, 0}});
}

// Rows g and g + 8 of the live window; zero where dead.
struct Window {
    uint32 row[2];
    bool live[2];
    DEVICE Window(uint32 start, uint32 history, uint32 ring_mask, uint32 g) {
        UNROLL
        for (int half = 0; half < 2; ++half) row[half] = (start + g + 8 * half) & ring_mask, live[half] = g + 8 * half < history;
    }
};

// Copy a block of live rows of u, and of v, to a lane's place in shared memory; `u` is ring row 0.
DEVICE void copy_values(uint8* staged, const Window& window, const uint16* u, uint32 stride, const uint16* v) {
    UNROLL
    for (int half = 0; half < 2; ++half)
        copy_async_if(window.live[half], staged + 512 * half, u + offset(window.row[half], stride));
    copy_async<false>(staged + 1024, v);
}

// The row of X that lane row g holds in a tile: which token, and whether it is the query.
DEVICE uint32 token_of(uint32 g) { return TILES == 1 ? g % 4 : g; }
DEVICE bool is_query(int tile, uint32 g) { return TILES == 1 ? g >= 4 : tile == 1; }

// Rows of M - 1 (keys) and of C M (queries), where C_ts = e^{c_t - c_s} q_t.k_s (s <= t): columns 2t and
// 2t + 1, those of tokens. `dots` are products of a row of X with k_s for s = 2t and 2t + 1.
DEVICE void solve(uint32 (&couplings)[TILES], float decay, float beta, const float (&dots)[TILES][2], uint32 g, uint32 t) {
    const uint32 token = token_of(g);
    float of[TILES][2], solved[TILES][2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32 s = 2 * t + i;
        const float between = exponential(decay - from_lane(decay, 4 * s));
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            const bool query = is_query(tile, g), taken = query ? s <= token : s < token;
            solved[tile][i] = of[tile][i] = taken ? (query ? between : -beta * between) * dots[tile][i] : 0;
        }
    }
    UNROLL
    for (int s = 1; s < MOST_TOKENS; ++s) {  // forward substitution: row s is final, rows below take it in
        const float of_row[2] = {from_lane(solved[0][0], 4 * s + t), from_lane(solved[0][1], 4 * s + t)};
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            const float factor = from_lane(of[tile][s % 2], 4 * g + s / 2);
            UNROLL
            for (int i = 0; i < 2; ++i) solved[tile][i] += factor * of_row[i];
        }
    }
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) couplings[tile] = ACT::pack(solved[tile][0], solved[tile][1]);
}

// Columns 32 group + 8t .. + 7 of a pair of state rows (`row` and two behind it), e^{G_P} S0 + (w u)^T k.
// `keys` are columns of this group of the window, transposed, and `factors` those of `row`.
DEVICE void fold_columns(float (&first)[8], float (&second)[8], const uint8* rows, const uint8* factors, uint32 exchanged, uint32 row, uint32 group,
                         uint32 t, const uint32 (&weighted_u)[4], const Chunk& keys_0, const Chunk& keys_8, float window_decay) {
#if STATE_BITS == 8
    // The tensor cores turn integers into numbers: times one, less 1152.
    const uint32 g = lane_index() / 4;
    const uint32 identity = g / 2 == t ? (g % 2 ? 0x3c000000u : 0x00003c00u) : 0;
    const float minus_1152[4] = {-1152, -1152, -1152, -1152}, zeros[4] = {0, 0, 0, 0};
    float factor[2];
    Chunk integers[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        factor[half] = window_decay * factor_of(factors + 2 * half * SCALE_BYTES, group);
        integers[half] = StateColumns(rows, exchanged, row + 2 * half, group, t).pairs();
    }
    UNROLL
    for (int j = 0; j < 4; ++j) {
        float old[4], added[4];
        Fp16::mma_8(old, {integers[0].r[j], integers[1].r[j]}, identity, minus_1152);
        ACT::mma(added, weighted_u, keys_0.r[j], keys_8.r[j], zeros);
        UNROLL
        for (int i = 0; i < 2; ++i) {
            first[2 * j + i] = fused_multiply_add(old[i], factor[0], added[i]);
            second[2 * j + i] = fused_multiply_add(old[2 + i], factor[1], added[2 + i]);
        }
    }
#else
    StateColumns(rows, exchanged, row, group, t).widen(first, window_decay);
    StateColumns(rows, exchanged, row + 2, group, t).widen(second, window_decay);
    UNROLL
    for (int j = 0; j < 4; ++j) {
        float c[4] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
        ACT::mma(c, weighted_u, keys_0.r[j], keys_8.r[j], c);
        UNROLL
        for (int i = 0; i < 2; ++i) first[2 * j + i] = c[i], second[2 * j + i] = c[2 + i];
    }
#endif
}

// Fold 32 state rows in shared memory. `keys` are transposed; `rows` and `factors` are those of the
// lane's first row.
DEVICE void fold_block(uint8* rows, uint8* factors, uint32 exchanged, const Chunk (&keys)[2][GROUPS], const Chunk (&u)[2],
                       const float (&weight)[2][2], float window_decay, uint32 t) {
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {  // 16 state rows
        sync_warp();  // or the compiler reads rows ahead until registers run out
        uint32 weighted_u[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2;
            const uint32 pair = transpose(u[half].r[2 * tile + i % 2]);
            weighted_u[i] = ACT::pack(weight[half][0] * ACT::first(pair), weight[half][1] * ACT::second(pair));
        }
        const uint32 row = 4 * tile;
        UNROLL
        for (int group = 0; group < GROUPS; group += TOGETHER) {
            float x[2][TOGETHER][8];
            UNROLL
            for (int i = 0; i < TOGETHER; ++i)
                fold_columns(x[0][i], x[1][i], rows, factors + row * SCALE_BYTES, exchanged, row, group + i, t, weighted_u,
                             keys[0][group + i], keys[1][group + i], window_decay);
            if (STATE_BITS == 8) sync_warp();  // all lanes of a row have read its factors
            UNROLL
            for (int half = 0; half < 2; ++half)
                put_columns(rows + (row + 2 * half) * ROW_BYTES, exchanged, factors + (row + 2 * half) * SCALE_BYTES, group, t,
                            x[half]);
        }
    }
}

KERNEL(32 * WARPS, BLOCKS_PER_MULTIPROCESSOR) verify(const Params p) {
    const uint32 item = block_index() * WARPS + warp_index();
    const uint32 hv = item / SPLITS % VALUE_HEADS, request = item / SPLITS / VALUE_HEADS;
    const uint32 value_first = item % SPLITS * PART, h = hv / RATIO;
    if (request >= p.num_requests) return;
    const uint32 g = lane_index() / 4, t = lane_index() % 4;

    uint32 first = request * p.rows_per_request;
    int num_tokens = p.rows_per_request;
    const int slot_or_none = p.slots ? p.slots[request] : request;
    const bool is_marked = p.is_fold && p.is_fold[request] != 0;
    const bool may_fold = p.is_fold ? is_marked : p.fold_threshold != NEVER;  // known before the window's length
    uint16* out = p.out + offset(hv, p.out_stride_h) + value_first;
    if (p.cu_seqlens) {
        first = p.cu_seqlens[request];
        num_tokens = p.cu_seqlens[request + 1] - first;
        const uint32 rows_end = p.cu_seqlens[p.num_requests];
        if (rows_end < p.num_rows) zero_rows(p, out, rows_end + request, p.num_rows, p.num_requests);
    }
    if (slot_or_none < 0) {
        if (p.zero_padding) zero_rows(p, out, first, first + num_tokens, 1);
        return;
    }
    if (num_tokens <= 0) return;

    // Ask for everything: what is waited for longest comes first. Lanes of tokens that do not exist
    // take the last one again; their results go nowhere.
    const uint32 slot = slot_or_none, cursor = p.cursors_by_row ? request : slot;
    const uint32 history = p.history_len[cursor], start = p.ring_start ? p.ring_start[cursor] : 0;
    const bool live = int(token_of(g)) < num_tokens;
    const uint32 token = first + (live ? token_of(g) : num_tokens - 1);
    Chunk x[GROUPS][TILES], window_k[2][GROUPS];
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        const uint16* key = p.k + offset(token, p.k_stride_n) + offset(h, p.k_stride_h);
        const uint16* query = p.q + offset(token, p.q_stride_n) + offset(h, p.q_stride_h);
        const uint16* row = (is_query(tile, g) ? query : key) + 8 * t;
        UNROLL
        for (int i = 0; i < GROUPS; ++i) x[i][tile] = load(row + 32 * i);
    }
    uint8* state = p.state + offset(slot, p.state_stride_s) + offset(hv, p.state_stride_h) + value_first * STATE_STRIDE;
    uint8* scales = p.state_scale + offset(slot, p.scale_stride_s) + offset(hv, p.scale_stride_h) + value_first * SCALE_BYTES;
    const uint16* v = p.v + offset(token, p.v_stride_n) + offset(hv, p.v_stride_h) + value_first + 8 * t;

    uint8* rows = shared_memory + warp_index() * SHARED_BYTES;
    uint8* factors = rows + PART * ROW_BYTES;
    uint8* staged = factors + PART * SCALE_BYTES + 16 * lane_index();
    sync_warp();
    copy_rows(rows, factors, state, scales, may_fold);
    sync_warp();

    const uint32 ring_mask = p.ring_capacity - 1;
    const Window window(start, history, ring_mask, g);
    uint16* ring_k = p.ring_k + offset(slot, p.ring_k_stride_s) + offset(h, p.ring_k_stride_h) + 8 * t;
    uint16* ring_u = p.ring_u + offset(slot, p.ring_u_stride_s) + offset(hv, p.ring_u_stride_h) + value_first + 8 * t;
    float* ring_decay = p.ring_decay + offset(slot, p.decay_stride_s) + offset(hv, p.decay_stride_h);
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            window_k[half][i] = load_if(window.live[half], ring_k + offset(window.row[half], p.ring_k_stride_r) + 32 * i);
    UNROLL
    for (int block = 0; block < BLOCKS; ++block)
        copy_values(staged + block * STAGED_BYTES, window, ring_u + 32 * block, p.ring_u_stride_r, v + 32 * block);
    copy_async_commit();
    const float a = load_gate(p.a, offset(token, p.a_stride_n) + hv), b = load_gate(p.b, offset(token, p.b_stride_n) + hv);
    const float A_log = p.A_log[hv], dt_bias = p.dt_bias[hv];
    float window_decays[2][2];  // of live rows 2t, 2t + 1, 2t + 8, 2t + 9
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < 2; ++i) window_decays[half][i] = ring_decay[(start + 2 * t + i + 8 * half) & ring_mask];
    const float last_decay = ring_decay[(start + history - 1) & ring_mask];

    sync_warp();
    UNROLL
    for (int block = 1; block < BLOCKS; ++block) {
        copy_rows(rows + 32 * block * ROW_BYTES, factors + 32 * block * SCALE_BYTES, state + 32 * block * STATE_STRIDE,
                  scales + 32 * block * SCALE_BYTES, may_fold);
        copy_async_commit();
    }
    sync_warp();
    const bool is_fold = p.is_fold ? is_marked : int(history) >= p.fold_threshold;

    // Products of rows of X with keys 2t and 2t + 1 of this step, and with those of the window.
    float norm[TILES], unit[TILES], dots[TILES][2], window_dots[TILES][2][2];  // x unit has length one
    {
        float with_keys[4] = {0, 0, 0, 0}, with_queries[4] = {0, 0, 0, 0}, with_window[2][4] = {};
        UNROLL
        for (int i = 0; i < GROUPS; ++i) {
            const Chunk &keys = x[i][0], &queries = x[i][TILES - 1];
            multiply(with_keys, keys, queries, keys, with_keys);
            if (TILES == 2) multiply(with_queries, keys, queries, queries, with_queries);
            UNROLL
            for (int half = 0; half < 2; ++half) multiply(with_window[half], keys, queries, window_k[half][i], with_window[half]);
        }
        float key_norm[2] = {1, 1};  // of tokens 2t and 2t + 1
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            norm[tile] = is_query(tile, g) ? p.scale : 1;
            if (STATE_BITS == 8 || p.use_l2norm) {  // squares are on the diagonal: row g's in lane (g, g / 2)
                const float(&squares)[4] = tile ? with_queries : with_keys;
                const float root = reciprocal_root((g % 2 ? squares[2 * tile + 1] : squares[2 * tile]) + 1e-6f);
                unit[tile] = from_lane(root, 4 * g + g / 2);
                if (p.use_l2norm) {
                    norm[tile] *= unit[tile];
                    UNROLL
                    for (int i = 0; i < 2; ++i)
                        if (tile == 0) key_norm[i] = from_lane(root, 4 * (2 * t + i) + t);
                }
            }
        }
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            UNROLL
            for (int i = 0; i < 2; ++i) {
                dots[tile][i] = norm[tile] * key_norm[i] * with_keys[2 * tile + i];
                UNROLL
                for (int half = 0; half < 2; ++half) window_dots[tile][half][i] = norm[tile] * with_window[half][2 * tile + i];
            }
    }

    const uint32 append_row = (start + history + token_of(g)) & ring_mask;
    if (live && !is_query(0, g) && value_first == 0 && hv % RATIO == 0)  // keys are appended by one warp
        UNROLL
        for (int i = 0; i < GROUPS; ++i) {
            Chunk normed;
            UNROLL
            for (int j = 0; j < 4; ++j)
                normed.r[j] = ACT::pack(norm[0] * ACT::first(x[i][0].r[j]), norm[0] * ACT::second(x[i][0].r[j]));
            store(ring_k + offset(append_row, p.ring_k_stride_r) + 32 * i, normed);
        }
    if (is_fold)
        UNROLL
        for (int half = 0; half < 2; ++half)
            UNROLL
            for (int i = 0; i < GROUPS; ++i)
                UNROLL
                for (int pair = 0; pair < 4; ++pair) window_k[half][i].r[pair] = transpose(window_k[half][i].r[pair]);
    float excess[GROUPS][TILES][4] = {};
#if STATE_BITS == 8
    // Integers are multiplied in fp16, where 1152 (sum of x) is part of every product. Rows of X have
    // length one there, so that all of them are in range.
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        UNROLL
        for (int i = 0; i < GROUPS; ++i) {
            UNROLL
            for (int j = 0; j < 4; ++j) {
                uint32& pair = x[i][tile].r[j];
                pair = Fp16::pack(unit[tile] * ACT::first(pair), unit[tile] * ACT::second(pair));
            }
            const Chunk minus_1152{{0xe480e480u, 0xe480e480u, 0xe480e480u, 0xe480e480u}};
            multiply<Fp16>(excess[i][tile], minus_1152, minus_1152, x[i][tile], excess[i][tile]);
        }
        norm[tile] = (is_query(tile, g) ? p.scale : 1) * (p.use_l2norm ? 1 : reciprocal(unit[tile]));
    }
#endif
    const uint32 row_in_block = 8 * (g / 2) + g % 2, exchanged = exchange(row_in_block);

    float decay = live ? -exponential(A_log) * softplus(a + dt_bias) : 0;
    const float beta = live ? p.beta_scale * reciprocal(1 + exponential(-b)) : 0;
    UNROLL
    for (uint32 distance = 1; distance < MOST_TOKENS; distance *= 2) {
        const float below = from_lane_below(decay, 4 * distance);
        decay += token_of(g) >= distance ? below : 0;
    }
    uint32 couplings[TILES];
    solve(couplings, decay, beta, dots, g, t);

    // Weights e^{G_P - G_j}; selected, since what is dead may be anything.
    const float window_end = history ? last_decay : 0;
    const float window_decay = exponential(window_end), token_decay = exponential(decay);
    float weight[2][2];
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const float factor = exponential(window_end - window_decays[half][i]);
            weight[half][i] = 2 * t + i + 8 * half < history ? factor : 0;
        }
    // Coefficients of live rows for row g of X; of the state and of values for rows 2t and 2t + 1.
    uint32 live_coeff[TILES][2];
    float state_scale[TILES][2], value_scale[2];
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        const float row_scale = is_query(tile, g) ? token_decay : -beta * token_decay;
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const float* of = window_dots[tile][half];
            live_coeff[tile][half] = ACT::pack(row_scale * weight[half][0] * of[0], row_scale * weight[half][1] * of[1]);
        }
        UNROLL
        for (int i = 0; i < 2; ++i) state_scale[tile][i] = from_lane(row_scale * norm[tile] * window_decay, 4 * (2 * t + i));
    }
    UNROLL
    for (int i = 0; i < 2; ++i) value_scale[i] = from_lane(is_query(0, g) ? 0 : beta, 4 * (2 * t + i));
    if (live && g < MOST_TOKENS && t == 0 && value_first == 0)
        ring_decay[append_row] = decay + (is_fold ? 0 : window_end);

    // 32 value rows at a time, as they arrive: S0 k and S0 q, live corrections, those of this step.
    BLOCK_LOOP
    for (int block = 0; block < BLOCKS; ++block) {
        copy_async_wait<BLOCKS - 1>();
        copy_async_commit();  // of nothing, so that as many groups as before may be under way
        sync_warp();
        uint8* block_rows = rows + 32 * block * ROW_BYTES;
        uint8* block_factors = factors + 32 * block * SCALE_BYTES;
        uint8* my_rows = block_rows + row_in_block * ROW_BYTES;
        uint8* my_factors = block_factors + row_in_block * SCALE_BYTES;
        const Chunk u[2] = {load_shared(staged + block * STAGED_BYTES), load_shared(staged + block * STAGED_BYTES + 512)};
        const Chunk v = load_shared(staged + block * STAGED_BYTES + 1024);
        Chunk results[TILES];
        UNROLL
        for (int pair = 0; pair < 4; pair += 2) {  // state rows 2 pair and 2 pair + 2 of every lane
            float c[TILES][4] = {};
            UNROLL
            for (int i = 0; i < GROUPS; ++i) {
                float row_factors[2] = {};
#if STATE_BITS == 8
                UNROLL
                for (int half = 0; half < 2; ++half) row_factors[half] = factor_of(my_factors + 2 * (pair + half) * SCALE_BYTES, i);
#endif
                multiply_state(c, StateColumns(my_rows, exchanged, 2 * pair, i, t),
                               StateColumns(my_rows, exchanged, 2 * pair + 2, i, t), x[i], excess[i], row_factors);
            }
            uint32 r[2];
            UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32 values = transpose(v.r[pair + half]);
                UNROLL
                for (int tile = 0; tile < TILES; ++tile)
                    UNROLL
                    for (int i = 0; i < 2; ++i) {
                        float& of = c[tile][2 * half + i];
                        of *= state_scale[tile][i];
                        if (tile == 0) of += value_scale[i] * (i ? ACT::second(values) : ACT::first(values));
                    }
            }
            const uint32 live_u[4] = {transpose(u[0].r[pair]), transpose(u[0].r[pair + 1]), transpose(u[1].r[pair]),
                                      transpose(u[1].r[pair + 1])};
            UNROLL
            for (int tile = 0; tile < TILES; ++tile) ACT::mma(c[tile], live_u, live_coeff[tile][0], live_coeff[tile][1], c[tile]);
            UNROLL
            for (int half = 0; half < 2; ++half) {
                r[half] = ACT::pack(c[0][2 * half], c[0][2 * half + 1]);
                if (TILES == 1 && t >= 2) r[half] = 0;  // these are queries
            }
            UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                ACT::mma_8(c[tile], r, couplings[tile], c[tile]);
                UNROLL
                for (int half = 0; half < 2; ++half)
                    results[tile].r[pair + half] = transpose(ACT::pack(c[tile][2 * half], c[tile][2 * half + 1]));
            }
        }
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            uint16* to = is_query(tile, g) ? out + offset(token, p.out_stride_n) + 8 * t
                                           : ring_u + offset(append_row, p.ring_u_stride_r);
            if (live) store(to + 32 * block, results[tile]);
        }
        if (is_fold) {
            fold_block(my_rows, my_factors, exchanged, window_k, u, weight, window_decay, t);
            sync_warp();
            store_rows(block_rows, block_factors, state + 32 * block * STATE_STRIDE, scales + 32 * block * SCALE_BYTES);
        }
    }
}
