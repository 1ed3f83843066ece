// The verify step whose bits do not depend on how rows are cut into steps: as verify.cu, but that what a
// row takes of rows before it is added up in the order of their places in the window, whether the ring
// holds them or the step brings them.
//
// With D_s the decay from the checkpoint to place s, added one token after the other, and keys rounded as
// the ring holds them,
//
//     u_t = beta_t (v_t - e^{D_t} S0 k_t) - sum_{s < t} beta_t e^{D_t - D_s} (k_t.k_s) u_s
//     y_t = scale e^{D_t} S0 q_t + sum_{s <= t} scale e^{D_t - D_s} (q_t.k_s) u_s
//
// where each u is rounded as the ring holds it before another row reads it. Both sums are fp32, one fused
// product after the other; then one addition makes the row. Products with S0 and of two keys are the
// tensor cores', which do the same for a row wherever it lies in a tile. A fold comes first, and what it
// rounded is read. The compiler must not fuse products and sums by itself: builds for 4 and for 8 tokens
// have to agree.

#include "verify_phases.cuh"

constexpr int ROW_COUNT = 8 * TILES;  // rows of X
constexpr int TABLE_BYTES = 4 * ROW_COUNT * (MOST_WINDOW + 8);

static_assert(!State::HAS_UNIT_ROWS, "states are 16 or 32 bits wide");
static_assert(SHARED_BYTES == PART * ROW_BYTES + BLOCKS * STAGED_BYTES + TABLE_BYTES, "what the launch reserves");

struct alignas(8) Pair {
    float first, second;
};

// Coefficients of u for every row of X: of places of the window, then of tokens of the step.
struct Table {
    float *stored, *fresh;
    DEVICE Table(const Shared& shared)
        : stored(reinterpret_cast<float*>(shared.rows + PART * ROW_BYTES + BLOCKS * STAGED_BYTES)),
          fresh(stored + MOST_WINDOW * ROW_COUNT) {}
    // Of rows 2t and 2t + 1 of a tile.
    DEVICE static Pair pair(const float* of, int source, int tile, uint32 t) {
        return *reinterpret_cast<const Pair*>(of + source * ROW_COUNT + 8 * tile + 2 * t);
    }
};

// What the large products need of the small system.
struct Solved {
    Folding folding;
    float state_scale[TILES][2];  // of the state for rows 2t and 2t + 1 of X
    float value_scale[2];         // of values
    int window;                   // stored rows that the step's rows see
    uint32 append_row;            // ring row of token_of(g)
};

// Products of rows g of X, in the first tile and in the last, with rows of eight others, 2t and 2t + 1. Two
// sums, which wait for less.
template <class Other>
DEVICE void multiply_rows(float (&dots)[4], const Asked& asked, int first, int last, const Other& other) {
    float parts[2][4] = {};
    UNROLL
    for (int i = 0; i < GROUPS; ++i) multiply(parts[i % 2], asked.x[i][first], asked.x[i][last], other(i), parts[i % 2]);
    UNROLL
    for (int i = 0; i < 4; ++i) dots[i] = parts[0][i] + parts[1][i];
}

// Norm keys of the step, rounded as the ring holds them; factors of the rows of X that this leaves.
DEVICE void norm(Asked& asked, float (&factor)[TILES], const Params& p, const Work& work) {
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) factor[tile] = is_query(tile, work.g) ? p.scale : 1;
    if (!p.use_l2norm) return;
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        float squares[4];  // on the diagonal: row g's in lane (g, g / 2)
        multiply_rows(squares, asked, tile, tile, [&](int i) { return asked.x[i][tile]; });
        const float root = reciprocal_root((work.g % 2 ? squares[1] : squares[0]) + 1e-6f);
        const float unit = from_lane(root, 4 * work.g + work.g / 2);
        const bool query = is_query(tile, work.g);
        factor[tile] *= query ? unit : 1;
        if (TILES == 2 && tile == 1) continue;
        const float key_unit = query ? 1 : unit;
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            UNROLL
            for (int j = 0; j < 4; ++j) {
                uint32& pair = asked.x[i][tile].r[j];
                pair = ACT::pack(key_unit * ACT::first(pair), key_unit * ACT::second(pair));
            }
    }
}

// Decay from the checkpoint to token_of(g), one token after the other.
DEVICE float add_decays(float before, const Gate& gate, uint32 g) {
    float total = before, decay = before;
    UNROLL
    for (int s = 0; s < MOST_TOKENS; ++s) {
        total += from_lane(gate.log_decay, 4 * s);
        decay = s <= int(token_of(g)) ? total : decay;
    }
    return decay;
}

// Coefficients of row g of X in each tile. Of dead places they are -0: a sum keeps its bits when -0 times
// zero is added.
DEVICE void fill(const Table& table, const Asked& asked, const float (&row_scale)[TILES], float decay, int window, uint32 g,
                 uint32 t) {
    UNROLL
    for (int part = 0; part < WINDOW_TILES; ++part) {
        if (8 * part >= window) break;
        float dots[4];
        multiply_rows(dots, asked, 0, TILES - 1, [&](int i) { return asked.window_k[part][i]; });
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int place = 8 * part + 2 * t + i;
            const float between = exponential(decay - asked.window_decays[part][i]);
            UNROLL
            for (int tile = 0; tile < TILES; ++tile)
                table.stored[place * ROW_COUNT + 8 * tile + g] =
                    place < window ? row_scale[tile] * dots[2 * tile + i] * between : -0.f;
        }
    }
    float dots[4];
    multiply_rows(dots, asked, 0, TILES - 1, [&](int i) { return asked.x[i][0]; });
    UNROLL
    for (int i = 0; i < 2; ++i) {
        const int token = 2 * t + i;
        const float between = exponential(decay - from_lane(decay, 4 * token));
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            table.fresh[token * ROW_COUNT + 8 * tile + g] = row_scale[tile] * dots[2 * tile + i] * between;
    }
}

DEVICE void append_keys(uint16* row, const Asked& asked) {
    UNROLL
    for (int i = 0; i < GROUPS; ++i) store(row + 32 * i, asked.x[i][0]);
}

// Make the coefficients, and append keys and decays.
DEVICE void solve(Solved& solved, const Table& table, Asked& asked, const Params& p, const Work& work, const Request& request,
                  const Pools& pools, bool is_fold) {
    const uint32 g = work.g, t = work.t;
    const bool has_row = request.has(g) && work.value_first == 0;
    solved.append_row = request.ring_row(request.history + token_of(g));
    solved.window = is_fold ? 0 : request.history;
    if (is_fold) {
        transpose_window(asked);
        solved.folding.weigh(work, request, asked, request.history ? asked.last_decay : 0);
    }
    float factor[TILES], row_scale[TILES];
    norm(asked, factor, p, work);
    if (has_row && !is_query(0, g) && work.hv % RATIO == 0)  // keys are appended by one warp
        append_keys(pools.ring_k + offset(solved.append_row, p.ring_k_stride_r), asked);
    const Gate gate(p, work, request, asked);
    const float decay = add_decays(solved.window ? asked.last_decay : 0, gate, g), token_decay = exponential(decay);
    if (has_row && g < MOST_TOKENS && t == 0) pools.ring_decay[solved.append_row] = decay;
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        row_scale[tile] = is_query(tile, g) ? factor[tile] : -gate.beta;
        UNROLL
        for (int i = 0; i < 2; ++i) solved.state_scale[tile][i] = from_lane(row_scale[tile] * token_decay, 4 * (2 * t + i));
    }
    UNROLL
    for (int i = 0; i < 2; ++i) solved.value_scale[i] = from_lane(gate.beta, 4 * (2 * t + i));
    fill(table, asked, row_scale, decay, solved.window, g, t);
}

// What rows of X take of stored rows: of four value rows of the lane, as in a chunk, two at a time.
DEVICE void sum_stored(Tiles (&sums)[2], const Table& table, const uint8* staged, const Work& work, int window) {
    const uint8* u = staged - 16 * lane_index() + 16 * (work.g / 2);
    ROLLED
    for (int first = 0; first < window; first += 4)
        UNROLL
        for (int place = first; place < first + 4; ++place) {
            const Chunk values = load_shared(u + 64 * place);
            UNROLL
            for (int tile = 0; tile < TILES; ++tile) {
                const Pair of = Table::pair(table.stored, place, tile, work.t);
                UNROLL
                for (int row = 0; row < 4; ++row) {
                    const float value = ACT::either(values.r[row], work.g % 2);
                    float* sum = sums[row / 2][tile] + 2 * (row % 2);
                    sum[0] = fused_multiply_add(of.first, value, sum[0]);
                    sum[1] = fused_multiply_add(of.second, value, sum[1]);
                }
            }
        }
}

// The same of rows of the step, each of which is final when those before it have been taken in. `own` is
// what rows of X are without other rows.
DEVICE void sum_fresh(Tiles (&sums)[2], const Tiles (&own)[2], const Table& table, const Work& work, int num_tokens) {
    UNROLL
    for (int s = 0; s < MOST_TOKENS; ++s) {
        if (s >= num_tokens) break;
        uint32 u[2];
        UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            const float *sum = sums[pair][0] + s % 2, *of = own[pair][0] + s % 2;
            u[pair] = from_lane(ACT::pack(of[0] + sum[0], of[2] + sum[2]), 4 * work.g + s / 2);
        }
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            const Pair of = Table::pair(table.fresh, s, tile, work.t);
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const uint32 row = 2 * work.t + i;
                const bool sees = s < int(token_of(row)) + is_query(tile, row);
                UNROLL
                for (int pair = 0; pair < 2; ++pair) {
                    float* sum = sums[pair][tile] + i;
                    const float first = fused_multiply_add(i ? of.second : of.first, ACT::first(u[pair]), sum[0]);
                    const float second = fused_multiply_add(i ? of.second : of.first, ACT::second(u[pair]), sum[2]);
                    sum[0] = sees ? first : sum[0], sum[2] = sees ? second : sum[2];
                }
            }
        }
    }
}

// What rows of X are of 32 value rows without other rows: of the state, and of v.
DEVICE void multiply_state(Tiles (&own)[2], const LaneRows& rows, const Asked& asked, const Solved& solved, const Chunk& v) {
    const float none[GROUPS][TILES][4] = {};
    UNROLL
    for (int pair = 0; pair < 2; ++pair) {  // state rows 4 pair and 4 pair + 2 of every lane
        UNROLL
        for (int i = 0; i < GROUPS; ++i) State::multiply(own[pair], rows, 4 * pair, i, asked.x[i], none[i]);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32 values = transpose(v.r[2 * pair + half]);
            UNROLL
            for (int tile = 0; tile < TILES; ++tile)
                UNROLL
                for (int i = 0; i < 2; ++i) {
                    float& of = own[pair][tile][2 * half + i];
                    of *= solved.state_scale[tile][i];
                    const float with_value =
                        fused_multiply_add(solved.value_scale[i], i ? ACT::second(values) : ACT::first(values), of);
                    of = is_query(tile, 2 * rows.t + i) ? of : with_value;
                }
        }
    }
}

DEVICE void clear(Tiles (&sums)[2]) {
    UNROLL
    for (int pair = 0; pair < 2; ++pair)
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            UNROLL
            for (int i = 0; i < 4; ++i) sums[pair][tile][i] = 0;
}

KERNEL(32 * WARPS, BLOCKS_PER_MULTIPROCESSOR) verify_ordered(const Params p) {
    const Work work;
    if (work.request >= p.num_requests) return;

    const uint32 first = p.cu_seqlens[work.request], rows_end = p.cu_seqlens[p.num_requests];
    const int num_tokens = p.cu_seqlens[work.request + 1] - first, slot = p.slots[work.request];
    const bool is_fold = p.is_fold && p.is_fold[work.request] != 0;
    uint16* out = p.out + offset(work.hv, p.out_stride_h) + work.value_first;
    if (rows_end < p.num_rows) zero_rows(out, p.out_stride_n, rows_end + work.request, p.num_rows, p.num_requests);
    if (slot < 0) {
        zero_rows(out, p.out_stride_n, first, first + num_tokens, 1);
        return;
    }
    if (num_tokens <= 0 && !is_fold) return;

    const Request request(p, work, slot, first, num_tokens);
    const Shared shared(opaque_shared_memory());
    const Table table(shared);
    Asked asked;
    Pools pools;
    Solved solved;
    ask(asked, pools, p, work, request, shared, is_fold);
    solve(solved, table, asked, p, work, request, pools, is_fold);

    const uint32 row_in_block = 8 * (work.g / 2) + work.g % 2;
    copy_async_wait<BLOCKS - 1>();  // for u of all blocks
    sync_warp();
    ROLLED  // or registers run out
    for (int block = 0; block < BLOCKS; ++block) {  // as they arrive
        uint8 *rows = shared.rows + 32 * block * ROW_BYTES, *staged = shared.staged + block * STAGED_BYTES;
        const LaneRows lane_rows{rows + row_in_block * ROW_BYTES, nullptr, State::exchange(row_in_block), work.t};
        Tiles sums[2] = {}, own[2] = {};
        if (!is_fold) sum_stored(sums, table, staged, work, solved.window);
        copy_async_wait<BLOCKS - 1>();
        copy_async_commit();  // of nothing, so that as many groups as before may be under way
        sync_warp();
        if (is_fold) {
            Chunk u[WINDOW_TILES];
            UNROLL
            for (int tile = 0; tile < WINDOW_TILES; ++tile) u[tile] = load_shared(staged + 512 * tile);
            fold(lane_rows, asked, solved.folding, u);
            sync_warp();
            store_rows(rows, nullptr, pools.state + 32 * block * STATE_STRIDE, nullptr);
            clear(sums);
        }
        multiply_state(own, lane_rows, asked, solved, load_shared(staged + 512 * WINDOW_TILES));
        sum_fresh(sums, own, table, work, num_tokens);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            Chunk results;
            UNROLL
            for (int row = 0; row < 4; ++row) {
                const float *sum = sums[row / 2][tile] + 2 * (row % 2), *rest = own[row / 2][tile] + 2 * (row % 2);
                results.r[row] = transpose(ACT::pack(rest[0] + sum[0], rest[1] + sum[1]));
            }
            uint16* to = is_query(tile, work.g) ? out + offset(request.token, p.out_stride_n) + 8 * work.t
                                                    : pools.ring_u + offset(solved.append_row, p.ring_u_stride_r);
            if (request.has(work.g)) store(to + 32 * block, results);
        }
    }
}
