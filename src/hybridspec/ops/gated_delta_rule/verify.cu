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
// second time where the request folds). Results have 16 rows, tokens k_0 .. k_7, then q_0 .. q_7.
//
// How a warp holds matrices. Lane (g, t) = (lane / 4, lane % 4). A row of 32 numbers is four chunks
// of 16 bytes, one for each t, so lane (g, t) loads numbers 8t .. 8t+7 of row g at once. Tensor-core
// products sum over pairs (2t, 2t+1) of each lane, and any order of the sum will do if both operands
// have it: register j of a chunk serves as pair j, that is columns 8t+2j, 8t+2j+1. The same holds for
// the columns of a result: pair j of a row of 32 is register j of a chunk. What has been transposed
// has its rows in that order: row g of pair j is row 8 (g / 2) + 2j + g % 2 of 32.
//
// The launch defines: ACT (Bf16 or Fp16), STATE_BITS (16: as ACT, 32, 8), GATE_BITS (16: as ACT, or
// 32), HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, STATE_STRIDE (bytes between state rows), SPLITS, WARPS,
// BLOCKS_PER_MULTIPROCESSOR, EVICT_FIRST (whether states that are only read leave the cache early).

#include "primitives.cuh"

constexpr int TOKENS = 8;
constexpr int NEVER = 0x7fffffff;             // a fold_threshold
constexpr int GROUPS = KEY_DIM / 32;          // of key columns
constexpr int PART = VALUE_DIM / SPLITS;      // value rows of one warp
constexpr int BLOCKS = PART / 32;             // of value rows
constexpr int ROW_BYTES = KEY_DIM * STATE_BITS / 8;
constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int SCALE_BYTES = STATE_BITS == 8 ? 2 * GROUPS : 0;  // of a row
constexpr int SHARED_BYTES = PART * (ROW_BYTES + SCALE_BYTES);  // of a warp

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
    int fold_threshold, cursors_by_row, zero_padding, use_l2norm, zero;
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

// Rows of tokens as the left factor of products: k_g and q_g, 32 columns.
struct Rows {
    uint32 pairs[2][4];
    DEVICE Rows() {}
    // `zero` is one that the compiler cannot know: what it knows to be a copy it copies again, four
    // registers side by side, for every product.
    DEVICE Rows(const Chunk& k, const Chunk& q, uint32 zero) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
            pairs[i][0] = k.r[2 * i] | zero, pairs[i][1] = q.r[2 * i] | zero;
            pairs[i][2] = k.r[2 * i + 1] | zero, pairs[i][3] = q.r[2 * i + 1] | zero;
        }
    }
    DEVICE uint32 key(int j) const { return pairs[j / 2][j % 2 * 2]; }  // register j of the chunk
};

// c += rows other^T for 32 columns, of which a lane has those of row g in `other`.
template <class Type = ACT>
DEVICE void multiply(float (&c)[4], const Rows& rows, const Chunk& other) {
    UNROLL
    for (int i = 0; i < 2; ++i) Type::mma(c, rows.pairs[i], other.r[2 * i], other.r[2 * i + 1]);
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
    // The bits of 2^15 + 128 + n, times the factor, less the rest: off by 2e-3 of a quantum at most,
    // and exact for a factor of bf16, so that what does not change keeps its bits.
    DEVICE void widen(float (&x)[8], float factor) const {
        const float rest = -32896.f * factor;
        UNROLL
        for (int i = 0; i < 8; ++i)
            x[i] = fused_multiply_add(as_float(select_bytes(bytes[i / 4], 0x47000000u, 0x7504 + i % 4 * 16)), factor, rest);
    }
};
#endif

#if STATE_BITS == 8
// c += rows S^T for columns of a group and eight state rows. `excess` is -1152 (sum of a row) and
// `factors` those of the rows of both columns.
DEVICE void multiply_scaled(float (&c)[4], const Rows& rows, const StateColumns& state, const float (&excess)[4],
                            const Chunk& factors, int group) {
    float part[4] = {excess[0], excess[1], excess[2], excess[3]};
    multiply<Fp16>(part, rows, state.pairs());
    UNROLL
    for (int n = 0; n < 4; ++n) {
        const uint32 both = factors.r[n % 2 * 2 + group / 2];
        c[n] += (group % 2 ? Bf16::second(both) : Bf16::first(both)) * part[n];
    }
}
#else
// c += rows S^T for 32 columns of eight state rows.
DEVICE void multiply(float (&c)[4], const Rows& rows, const StateColumns& state) {
#if STATE_BITS == 32
    Chunk pairs, rest;
    state.split(pairs, rest);
    multiply(c, rows, pairs);
    multiply(c, rows, rest);
#else
    multiply(c, rows, state.pairs);
#endif
}
#endif

// Store columns 32 group + 8t .. + 7 of a state row; `row` points at column 8t. The row's factors, of an
// 8-bit state, go to shared memory.
DEVICE void store_columns(uint8* row, uint8* scales, uint32 group, uint32 t, const float (&x)[8]) {
#if STATE_BITS == 32
    UNROLL
    for (int half = 0; half < 2; ++half) {
        Chunk part;
        UNROLL
        for (int i = 0; i < 4; ++i) part.r[i] = as_bits(x[4 * half + i]);
        store(row + 16 * (8 * group + half), part);
    }
#elif STATE_BITS == 16
    Chunk pairs;
    UNROLL
    for (int j = 0; j < 4; ++j) pairs.r[j] = ACT::pack(x[2 * j], x[2 * j + 1]);
    store(row + 64 * group, pairs);
#else
    float largest = 0;  // magnitude in 32 columns
    UNROLL
    for (int i = 0; i < 8; ++i) largest = larger_magnitude(largest, x[i]);
    UNROLL
    for (int mask = 1; mask < 4; mask *= 2) largest = larger_magnitude(largest, from_lane_xor(largest, mask));
    const uint32 scale = largest < 1e-30f ? 0 : Bf16::pack(largest * 0.007874016f, 0);  // 1 / 127
    const float inverse = scale ? reciprocal(Bf16::first(scale)) : 0;
    uint32 words[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        uint32 integers[4];  // 1.5 2^23 + n has the bits of n at its end
        UNROLL
        for (int i = 0; i < 4; ++i) integers[i] = as_bits(x[4 * half + i] * inverse + 12582912.f);
        words[half] = select_bytes(select_bytes(integers[0], integers[1], 0x40),
                                   select_bytes(integers[2], integers[3], 0x40), 0x5410);
    }
    store(row + 32 * group, words[0], words[1]);
    if (t == 0) *reinterpret_cast<uint16*>(scales + 2 * group) = static_cast<uint16>(scale);
#endif
}

// Copies of a warp's state rows to shared memory, a group for every block. What is asked for behind
// the state arrives behind it, so only the first block goes before the live window is asked for.
struct StateCopies {
    static constexpr uint32 ROWS = 32 / ROW_CHUNKS;  // that a warp copies at once
    uint8 *shared, *shared_scales;
    const uint8 *state, *scales;
    bool may_fold;
    // Lines that are read once are the first to make room in the cache; those that a fold stores stay.
    template <bool read_once>
    DEVICE void block_as(uint32 first_row) const {
        const uint32 row = lane_index() / ROW_CHUNKS, chunk = lane_index() % ROW_CHUNKS;
        const uint8* from = state + row * STATE_STRIDE + 16 * chunk;
        UNROLL
        for (uint32 i = first_row; i < first_row + 32; i += ROWS)
            copy_async<read_once>(shared + (i + row) * ROW_BYTES + 16 * (chunk ^ exchange(i + row)), from + i * STATE_STRIDE);
    }
    DEVICE void block(uint32 first_row) const {
        if (EVICT_FIRST && !may_fold) block_as<true>(first_row);
        else block_as<false>(first_row);
        copy_async_commit();
    }
    DEVICE void first() const {
        if (STATE_BITS == 8)
            for (uint32 i = 16 * lane_index(); i < PART * SCALE_BYTES; i += 16 * 32)
                copy_async<false>(shared_scales + i, scales + i);
        block(0);
    }
    DEVICE void rest() const {
        UNROLL
        for (uint32 i = 1; i < BLOCKS; ++i) block(32 * i);
    }
};

DEVICE void zero_rows(const Params& p, uint16* out, uint32 first, uint32 last, uint32 step) {
    for (uint32 row = first; row < last; row += step)
        for (uint32 i = lane_index(); i < PART / 8; i += 32)
            store(out + offset(row, p.out_stride_n) + 8 * i, Chunk{{0, 0, 0, 0}});
}

// Rows g and g + 8 of the live window, decays of rows 2t, 2t + 1, 2t + 8, 2t + 9; zero where dead.
struct Window {
    Chunk k[2][GROUPS], u[2][BLOCKS];
    float decay[2][2], decay_end;
    DEVICE Window(const Params& p, const uint16* ring_k, const uint16* ring_u, const float* ring_decay, uint32 start,
                  uint32 history, uint32 g, uint32 t) {
        const uint32 mask = p.ring_capacity - 1;
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32 j = g + 8 * half, row = (start + j) & mask;
            UNROLL
            for (int i = 0; i < GROUPS; ++i) k[half][i] = load_if(j < history, ring_k + offset(row, p.ring_k_stride_r) + 32 * i);
            UNROLL
            for (int i = 0; i < BLOCKS; ++i) u[half][i] = load_if(j < history, ring_u + offset(row, p.ring_u_stride_r) + 32 * i);
        }
        UNROLL
        for (int half = 0; half < 2; ++half)
            UNROLL
            for (int i = 0; i < 2; ++i) decay[half][i] = ring_decay[(start + 2 * t + i + 8 * half) & mask];
        decay_end = ring_decay[(start + history - 1) & mask];
    }
    // Turn decays into weights e^{G_P - G_j}; selected, since what is dead may be anything.
    DEVICE void weigh(uint32 history, uint32 t) {
        decay_end = history ? decay_end : 0;
        UNROLL
        for (int half = 0; half < 2; ++half)
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const float factor = exponential(decay_end - decay[half][i]);
                decay[half][i] = 2 * t + i + 8 * half < history ? factor : 0;
            }
    }
};

// Row g of M - 1 and of C M, where C_ts = e^{c_t - c_s} q_t.k_s (s <= t); columns 2t and 2t + 1.
struct Couplings {
    uint32 pairs[2];
};

// Solve for them. `dots` are k_g.k_s and q_g.k_s for s = 2t and 2t + 1, not normalised.
DEVICE Couplings solve(float decay, float beta, float k_norm, float q_norm, const float (&k_norm_of)[2],
                       const float (&dots)[4], uint32 g, uint32 t) {
    float of_k[2], of_q[2], solved_k[2], solved_q[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32 s = 2 * t + i;
        const float both = exponential(decay - from_lane(decay, 4 * s)) * k_norm_of[i];
        solved_k[i] = of_k[i] = s < g ? -beta * k_norm * both * dots[i] : 0;
        solved_q[i] = of_q[i] = s <= g ? q_norm * both * dots[2 + i] : 0;
    }
    UNROLL
    for (int s = 1; s < TOKENS; ++s) {  // forward substitution: row s is final, rows below take it in
        const float k_factor = from_lane(of_k[s % 2], 4 * g + s / 2);
        const float q_factor = from_lane(of_q[s % 2], 4 * g + s / 2);
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const float of_row = from_lane(solved_k[i], 4 * s + t);
            solved_k[i] += k_factor * of_row, solved_q[i] += q_factor * of_row;
        }
    }
    return {{ACT::pack(solved_k[0], solved_k[1]), ACT::pack(solved_q[0], solved_q[1])}};
}

// S0 <- e^{G_P} S0 + (w u)^T k, from the rows in shared memory. `rows` and `state` point at the lane's
// first row (`row_in_block`), `state` at column 8t.
DEVICE void fold(Window& window, float window_decay, const uint8* rows, uint32 exchanged, uint8* scales, uint8* state,
                 uint32 row_in_block, uint32 t) {
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            UNROLL
            for (int pair = 0; pair < 4; ++pair) window.k[half][i].r[pair] = transpose(window.k[half][i].r[pair]);
    UNROLL
    for (int block = 0; block < BLOCKS; ++block)
        UNROLL
        for (int tile = 0; tile < 2; ++tile) {  // 16 state rows
            sync_warp();  // or the compiler reads rows ahead until registers run out
            const uint32 row = 32 * block + 4 * tile;
            uint32 weighted[4];
            UNROLL
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2;
                const uint32 pair = transpose(window.u[half][block].r[2 * tile + i % 2]);
                weighted[i] = ACT::pack(window.decay[half][0] * ACT::first(pair), window.decay[half][1] * ACT::second(pair));
            }
            UNROLL
            for (int i = 0; i < GROUPS; ++i) {
                float x[2][8];
                UNROLL
                for (int half = 0; half < 2; ++half) {
                    float factor = window_decay;
#if STATE_BITS == 8
                    factor *= Bf16::first(*reinterpret_cast<const uint16*>(
                        scales + (row_in_block + row + 2 * half) * SCALE_BYTES + 2 * i));
#endif
                    StateColumns(rows, exchanged, row + 2 * half, i, t).widen(x[half], factor);
                }
                UNROLL
                for (int j = 0; j < 4; ++j) {
                    float c[4] = {x[0][2 * j], x[0][2 * j + 1], x[1][2 * j], x[1][2 * j + 1]};
                    ACT::mma(c, weighted, window.k[0][i].r[j], window.k[1][i].r[j]);
                    x[0][2 * j] = c[0], x[0][2 * j + 1] = c[1], x[1][2 * j] = c[2], x[1][2 * j + 1] = c[3];
                }
                UNROLL
                for (int half = 0; half < 2; ++half)
                    store_columns(state + (row + 2 * half) * STATE_STRIDE,
                                  scales + (row_in_block + row + 2 * half) * SCALE_BYTES, i, t, x[half]);
            }
        }
}

KERNEL(32 * WARPS, BLOCKS_PER_MULTIPROCESSOR) verify(const Params p) {
    const uint32 item = block_index() * WARPS + warp_index();
    const uint32 hv = item / SPLITS % VALUE_HEADS, request = item / SPLITS / VALUE_HEADS;
    const uint32 value_first = item % SPLITS * PART, h = hv / (VALUE_HEADS / HEADS);
    if (request >= p.num_requests) return;
    const uint32 g = lane_index() / 4, t = lane_index() % 4;
    uint8* rows = shared_memory + warp_index() * SHARED_BYTES;

    uint16* out = p.out + offset(hv, p.out_stride_h) + value_first;
    uint32 first = request * p.rows_per_request;
    int num_tokens = p.rows_per_request;
    const int slot_or_none = p.slots ? p.slots[request] : request;
    const bool is_marked = p.is_fold && p.is_fold[request] != 0;
    const bool may_fold = p.is_fold ? is_marked : p.fold_threshold != NEVER;  // known before the window's length
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
    const bool live = g < num_tokens;
    const uint32 token = first + (live ? g : num_tokens - 1);
    Chunk k[GROUPS], q[GROUPS], v[BLOCKS];
    const uint16* k_row = p.k + offset(token, p.k_stride_n) + offset(h, p.k_stride_h) + 8 * t;
    const uint16* q_row = p.q + offset(token, p.q_stride_n) + offset(h, p.q_stride_h) + 8 * t;
    const uint16* v_row = p.v + offset(token, p.v_stride_n) + offset(hv, p.v_stride_h) + value_first + 8 * t;
    UNROLL
    for (int i = 0; i < GROUPS; ++i) k[i] = load(k_row + 32 * i), q[i] = load(q_row + 32 * i);
    const float a = load_gate(p.a, offset(token, p.a_stride_n) + hv), b = load_gate(p.b, offset(token, p.b_stride_n) + hv);
    const float A = exponential(p.A_log[hv]), dt_bias = p.dt_bias[hv];
    uint8* state = p.state + offset(slot, p.state_stride_s) + offset(hv, p.state_stride_h) + value_first * STATE_STRIDE;
    UNROLL
    for (int i = 0; i < BLOCKS; ++i) v[i] = load(v_row + 32 * i);

    uint8* state_scale = p.state_scale + offset(slot, p.scale_stride_s) + offset(hv, p.scale_stride_h) + value_first * SCALE_BYTES;
    uint8* scales = rows + PART * ROW_BYTES;
    const StateCopies copies{rows, scales, state, state_scale, may_fold};
    sync_warp();
    copies.first();
    sync_warp();

    const uint32 ring_mask = p.ring_capacity - 1;
    uint16* ring_k = p.ring_k + offset(slot, p.ring_k_stride_s) + offset(h, p.ring_k_stride_h) + 8 * t;
    uint16* ring_u = p.ring_u + offset(slot, p.ring_u_stride_s) + offset(hv, p.ring_u_stride_h) + value_first + 8 * t;
    float* ring_decay = p.ring_decay + offset(slot, p.decay_stride_s) + offset(hv, p.decay_stride_h);
    Window window(p, ring_k, ring_u, ring_decay, start, history, g, t);

    sync_warp();
    copies.rest();
    sync_warp();
    const bool is_fold = p.is_fold ? is_marked : int(history) >= p.fold_threshold;

    Rows x[GROUPS];
    float dots_k[4] = {0, 0, 0, 0}, dots_q[4] = {0, 0, 0, 0};  // rows k_g, q_g; columns k, then q
    UNROLL
    for (int i = 0; i < GROUPS; ++i) {
        x[i] = Rows(k[i], q[i], p.zero);
        multiply(dots_k, x[i], k[i]);
        multiply(dots_q, x[i], q[i]);
    }
    window.weigh(history, t);

    // Gates and norms of token g, and of tokens 2t and 2t + 1, which are the lane's columns.
    float decay = live ? -A * softplus(a + dt_bias) : 0;
    const float beta = live ? p.beta_scale * reciprocal(1 + exponential(-b)) : 0;
    UNROLL
    for (uint32 distance = 1; distance < TOKENS; distance *= 2) {
        const float below = from_lane_below(decay, 4 * distance);
        decay += g >= distance ? below : 0;
    }
    float k_norm = 1, q_norm = p.scale, k_norm_of[2] = {1, 1};
    if (p.use_l2norm) {  // squares are on the diagonal: token g's in lane (g, g / 2)
        const float k_root = reciprocal_root((g % 2 ? dots_k[1] : dots_k[0]) + 1e-6f);
        const float q_root = reciprocal_root((g % 2 ? dots_q[3] : dots_q[2]) + 1e-6f);
        k_norm = from_lane(k_root, 4 * g + g / 2);
        q_norm *= from_lane(q_root, 4 * g + g / 2);
        UNROLL
        for (int i = 0; i < 2; ++i) k_norm_of[i] = from_lane(k_root, 4 * (2 * t + i) + t);
    }

    // Append decays, and keys by one warp per key head; corrections follow.
    const uint32 append_row = (start + history + g) & ring_mask;
    if (live && value_first == 0) {
        if (t == 0) ring_decay[append_row] = decay + (is_fold ? 0 : window.decay_end);
        if (hv % (VALUE_HEADS / HEADS) == 0)
            UNROLL
            for (int i = 0; i < GROUPS; ++i) {
                Chunk normed;
                UNROLL
                for (int j = 0; j < 4; ++j)
                    normed.r[j] = ACT::pack(k_norm * ACT::first(x[i].key(j)), k_norm * ACT::second(x[i].key(j)));
                store(ring_k + offset(append_row, p.ring_k_stride_r) + 32 * i, normed);
            }
    }

    const Couplings couplings = solve(decay, beta, k_norm, q_norm, k_norm_of, dots_k, g, t);

    // Coefficients of the live corrections: rows k_g and q_g of X K^T, weighted.
    const float window_decay = exponential(window.decay_end), token_decay = exponential(decay);
    const float k_scale = -beta * token_decay * k_norm, q_scale = token_decay * q_norm;
    uint32 live_coeff[4];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float dots[4] = {0, 0, 0, 0};
        UNROLL
        for (int i = 0; i < GROUPS; ++i) multiply(dots, x[i], window.k[half][i]);
        live_coeff[2 * half] = ACT::pack(k_scale * window.decay[half][0] * dots[0], k_scale * window.decay[half][1] * dots[1]);
        live_coeff[2 * half + 1] = ACT::pack(q_scale * window.decay[half][0] * dots[2], q_scale * window.decay[half][1] * dots[3]);
    }

    // 32 value rows at a time, as they arrive: S0 k and S0 q, live corrections, those of this step.
    const uint32 row_in_block = 8 * (g / 2) + g % 2, exchanged = exchange(row_in_block);
    const uint8* my_rows = rows + row_in_block * ROW_BYTES;
    float state_k_scale = k_scale * window_decay, state_q_scale = q_scale * window_decay;
#if STATE_BITS == 8
    // Integers are multiplied in fp16, where 1152 (sum of x) is part of every product. Rows have length
    // one there, so that all of them are in range.
    float excess[GROUPS][4] = {};
    UNROLL
    for (int i = 0; i < GROUPS; ++i) {
        UNROLL
        for (int j = 0; j < 8; ++j) {
            uint32& pair = x[i].pairs[j / 4][j % 4];
            const float norm = j % 2 ? q_norm : k_norm;
            pair = Fp16::pack(norm * ACT::first(pair), norm * ACT::second(pair));
        }
        multiply<Fp16>(excess[i], x[i], Chunk{{0xe480e480u, 0xe480e480u, 0xe480e480u, 0xe480e480u}});  // -1152
    }
    state_k_scale = -beta * token_decay * window_decay, state_q_scale = token_decay * window_decay;
#endif
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
        if (block + 1 == BLOCKS) copy_async_wait<0>();
        else if (block + 2 == BLOCKS) copy_async_wait<1>();
        else if (block + 3 == BLOCKS) copy_async_wait<2>();
        else copy_async_wait<3>();
        sync_warp();
        Chunk u_out, y_out;
        UNROLL
        for (int pair = 0; pair < 4; ++pair) {
            float c[4] = {0, 0, 0, 0};
#if STATE_BITS == 8
            const Chunk factors = load_shared(scales + (32 * block + 8 * t + 2 * pair) * SCALE_BYTES);
#endif
            UNROLL
            for (int i = 0; i < GROUPS; ++i) {
                const StateColumns columns(my_rows, exchanged, 32 * block + 2 * pair, i, t);
#if STATE_BITS == 8
                multiply_scaled(c, x[i], columns, excess[i], factors, i);
#else
                multiply(c, x[i], columns);
#endif
            }
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const float value = i ? ACT::second(v[block].r[pair]) : ACT::first(v[block].r[pair]);
                c[i] = beta * value + state_k_scale * c[i];
                c[2 + i] *= state_q_scale;
            }
            ACT::mma(c, live_coeff, transpose(window.u[0][block].r[pair]), transpose(window.u[1][block].r[pair]));
            ACT::mma_8(c, couplings.pairs, transpose(ACT::pack(c[0], c[1])));
            u_out.r[pair] = ACT::pack(c[0], c[1]);
            y_out.r[pair] = ACT::pack(c[2], c[3]);
        }
        if (live) {
            store(ring_u + offset(append_row, p.ring_u_stride_r) + 32 * block, u_out);
            store(out + offset(token, p.out_stride_n) + 32 * block + 8 * t, y_out);
        }
    }
    if (is_fold) {
        fold(window, window_decay, my_rows, exchanged, scales, state + row_in_block * STATE_STRIDE + STATE_BITS * t,
             row_in_block, t);
        if (STATE_BITS == 8) {
            sync_warp();
            for (uint32 i = 16 * lane_index(); i < PART * SCALE_BYTES; i += 16 * 32)
                store(state_scale + i, load_shared(scales + i));
        }
    }
}
