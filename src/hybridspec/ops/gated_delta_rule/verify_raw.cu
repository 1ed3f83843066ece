// The verify step over a raw ring in CUDA C++: the same equations as triton_raw.py.
//
// One warp serves one request, one value head and PART of its value rows. Rows of the window come from
// the ring and those of the step behind them, as one system of up to 16 keys:
//
//     r_j = beta_j v_j - beta_j e^{c_j} S0 k_j
//     u   = M r,  M = (1 - N)^-1,  N_ts = -beta_t e^{c_t - c_s} k_t.k_s  (s < t)
//     y_t = scale e^{c_t} S0 q_t + C M r,  C_ts = scale e^{c_t - c_s} q_t.k_s  (s <= t)
//
// so that a step which does not fold never forms u. A fold adds sum_j (e^{c_P - c_j} u_j) k_j^T to
// e^{c_P} S0. What it multiplies is split into two 16-bit numbers each, r, M and u, and raw keys and
// states are what they are: no rounding to 16 bits enters the state but its own.
//
// The phases are those of verify.cu: `ask`, `solve`, and for 32 value rows at a time `stream` and,
// where the request folds, `fold`.

#include "raw_system.cuh"

#include "state_copies.cuh"

constexpr int STAGED_BYTES = 512 * 2;  // of a block: 16 bytes a lane for rows g and g + 8 of v

static_assert(SHARED_BYTES == PART * ROW_BYTES + BLOCKS * STAGED_BYTES, "what the launch reserves");

// Where a warp has its state rows and the lane's bytes of v in shared memory, and the state in the pool.
struct Places {
    uint8 *rows, *staged, *state;
    DEVICE Places(const Params& p, const Work& work, const Request& request) {
        rows = shared_memory + warp_index() * SHARED_BYTES;
        staged = rows + PART * ROW_BYTES + 16 * lane_index();
        state = p.state + offset(request.slot, p.state_stride_s) + offset(work.hv, p.state_stride_h) + work.value_first * STATE_STRIDE;
    }
    DEVICE void copy_block(int block, bool may_fold) const {
        copy_rows(rows + 32 * block * ROW_BYTES, nullptr, state + 32 * block * STATE_STRIDE, nullptr, may_fold);
    }
};

// Rows of the ring, from the lane's columns on.
struct Ring {
    uint16 *k, *v;
    float *a, *b;
    DEVICE Ring(const Params& p, const Work& work, const Request& request) {
        k = p.ring_k + offset(request.slot, p.ring_k_stride_s) + offset(work.h, p.ring_k_stride_h) + 8 * work.t;
        v = p.ring_v + offset(request.slot, p.ring_v_stride_s) + offset(work.hv, p.ring_v_stride_h) + work.value_first + 8 * work.t;
        a = p.ring_a + offset(request.slot, p.ring_a_stride_s) + offset(work.hv, p.ring_a_stride_h);
        b = p.ring_b + offset(request.slot, p.ring_b_stride_s) + offset(work.hv, p.ring_b_stride_h);
    }
};

// Ask for everything: what is waited for longest comes first.
DEVICE void ask(Asked& asked, const Params& p, const Work& work, const Request& request, const Ring& ring, const Places& places,
                bool may_fold) {
    const uint32 g = work.g, t = work.t;
    places.copy_block(0, may_fold);
    sync_warp();
    const bool has_query = request.is_new(request.history + g);
    const uint16* query = p.q + offset(request.first + g, p.q_stride_n) + offset(work.h, p.q_stride_h) + 8 * t;
    UNROLL
    for (int i = 0; i < GROUPS; ++i) asked.x[i][2] = load_if(has_query, query + 32 * i);
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
        const int row = g + 8 * tile;
        const bool is_new = request.is_new(row), is_live = request.is_live(row);
        const uint32 token = is_new ? request.token(row) : 0, ring_row = request.ring_row(row);
        const uint16* fresh_k = p.k + offset(token, p.k_stride_n) + offset(work.h, p.k_stride_h) + 8 * t;
        const uint16* key = is_new ? fresh_k : ring.k + offset(ring_row, p.ring_k_stride_r);
        UNROLL
        for (int i = 0; i < GROUPS; ++i) asked.x[i][tile] = load_if(is_live, key + 32 * i);
        const uint16* fresh_v = p.v + offset(token, p.v_stride_n) + offset(work.hv, p.v_stride_h) + work.value_first + 8 * t;
        const uint16* value = is_new ? fresh_v : ring.v + offset(ring_row, p.ring_v_stride_r);
        UNROLL
        for (int block = 0; block < BLOCKS; ++block)
            copy_async_if(is_live, places.staged + block * STAGED_BYTES + 512 * tile, value + 32 * block);
        asked.a[tile] = is_new ? load_number<GATE>(p.a, offset(token, p.a_stride_n) + work.hv) : ring.a[ring_row];
        asked.b[tile] = is_new ? load_number<GATE>(p.b, offset(token, p.b_stride_n) + work.hv) : ring.b[ring_row];
    }
    copy_async_commit();
    asked.A_log = load_number<A_LOG>(p.A_log, work.hv), asked.dt_bias = load_number<DT_BIAS>(p.dt_bias, work.hv);
    sync_warp();
    UNROLL
    for (int block = 1; block < BLOCKS; ++block) {
        places.copy_block(block, may_fold);
        copy_async_commit();
    }
    sync_warp();
}

// Append keys and gates of the step; values follow as they arrive.
DEVICE void append(const Params& p, const Work& work, const Request& request, const Ring& ring, const Asked& asked) {
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
        const int row = work.g + 8 * tile;
        const uint32 ring_row = request.ring_row(row);
        if (!request.is_new(row) || work.value_first) continue;
        if (work.hv % RATIO == 0)  // keys are appended by one warp
            UNROLL
            for (int i = 0; i < GROUPS; ++i) store(ring.k + offset(ring_row, p.ring_k_stride_r) + 32 * i, asked.x[i][tile]);
        if (work.t == 0) ring.a[ring_row] = asked.a[tile], ring.b[ring_row] = asked.b[tile];
    }
}

// Weighted corrections of two pairs of state rows, in two numbers each.
struct Corrections {
    uint32 high[2][4], rest[2][4];
};

// Corrections of 16 state rows, weighted: those of keys 0 to 7 need r of these alone.
DEVICE void correct(uint32 (&high)[4], uint32 (&rest)[4], const Solved& solved, const float (&r)[2][4]) {
    uint32 pairs[4], left[4];
    float u[2][4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const float first = r[i / 2][2 * (i % 2)], second = r[i / 2][2 * (i % 2) + 1];
        pairs[i] = ACT::pack(first, second);
        left[i] = ACT::pack(first - ACT::first(pairs[i]), second - ACT::second(pairs[i]));
    }
    ACT::mma_8(u[0], {left[0], left[1]}, solved.solve[0][0], r[0]);
    ACT::mma_8(u[0], {pairs[0], pairs[1]}, solved.rest[0][0], u[0]);
    ACT::mma_8(u[0], {pairs[0], pairs[1]}, solved.solve[0][0], u[0]);
    ACT::mma(u[1], left, solved.solve[1][0], solved.solve[1][1], r[1]);
    ACT::mma(u[1], pairs, solved.rest[1][0], solved.rest[1][1], u[1]);
    ACT::mma(u[1], pairs, solved.solve[1][0], solved.solve[1][1], u[1]);
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int tile = i / 2, of = 2 * (i % 2);
        const float first = solved.weight[tile][0] * u[tile][of], second = solved.weight[tile][1] * u[tile][of + 1];
        high[i] = ACT::pack(first, second);
        rest[i] = ACT::pack(first - ACT::first(high[i]), second - ACT::second(high[i]));
    }
}

// Outputs of 32 value rows and, where the request folds, their corrections.
DEVICE void stream(Chunk& results, Corrections& corrections, const LaneRows& rows, const Asked& asked, const Solved& solved,
                   const Chunk (&v)[2], bool is_fold) {
    const float zeros[TILES][4] = {};
    UNROLL
    for (int pair = 0; pair < 4; pair += 2) {  // state rows 2 pair and 2 pair + 2 of every lane
        float c[TILES][4] = {}, r[2][4];
        UNROLL
        for (int i = 0; i < GROUPS; ++i) State::multiply(c, rows, 2 * pair, i, asked.x[i], zeros);
        UNROLL
        for (int half = 0; half < 2; ++half)
            UNROLL
            for (int i = 0; i < 2; ++i) c[2][2 * half + i] *= solved.state_scale[2][i];
        UNROLL
        for (int tile = 0; tile < 2; ++tile)
            UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32 values = transpose(v[tile].r[pair + half]);
                UNROLL
                for (int i = 0; i < 2; ++i)
                    r[tile][2 * half + i] = solved.state_scale[tile][i] * c[tile][2 * half + i] +
                                            solved.value_scale[tile][i] * (i ? ACT::second(values) : ACT::first(values));
            }
        uint32 pairs[4];
        UNROLL
        for (int i = 0; i < 4; ++i) pairs[i] = ACT::pack(r[i / 2][2 * (i % 2)], r[i / 2][2 * (i % 2) + 1]);
        ACT::mma(c[2], pairs, solved.reads[0], solved.reads[1], c[2]);
        UNROLL
        for (int half = 0; half < 2; ++half) results.r[pair + half] = transpose(ACT::pack(c[2][2 * half], c[2][2 * half + 1]));
        if (is_fold) correct(corrections.high[pair / 2], corrections.rest[pair / 2], solved, r);
    }
}

// Terms of a fold for a group of columns: keys of the window are transposed, rows 0 to 7 and 8 to 15.
struct Added {
    const uint32 (&high)[4], (&rest)[4];
    const Chunk (&keys)[2];
    DEVICE void to(float (&d)[4], int j, const float (&c)[4]) const {
        ACT::mma(d, rest, keys[0].r[j], keys[1].r[j], c);
        ACT::mma(d, high, keys[0].r[j], keys[1].r[j], d);
    }
};

// Fold 32 state rows in shared memory.
DEVICE void fold(const LaneRows& rows, const Asked& asked, const Solved& solved, const Corrections& corrections) {
    UNROLL
    for (int group = 0; group < GROUPS; ++group) {
        sync_warp();  // or the compiler reads rows ahead until registers run out
        Chunk keys[2];
        UNROLL
        for (int tile = 0; tile < 2; ++tile)
            UNROLL
            for (int j = 0; j < 4; ++j) keys[tile].r[j] = transpose(asked.x[group][tile].r[j]);
        UNROLL
        for (int tile = 0; tile < 2; ++tile) {  // 16 state rows
            Columns x[2][1];
            const Added added{corrections.high[tile], corrections.rest[tile], keys};
            State::fold(x[0][0], x[1][0], rows, 4 * tile, group, added, solved.window_decay);
            UNROLL
            for (int half = 0; half < 2; ++half) State::put(rows, 4 * tile + 2 * half, group, x[half]);
        }
    }
}

KERNEL(32 * WARPS, BLOCKS_PER_MULTIPROCESSOR) verify_raw(const Params p) {
    const Work work;
    if (work.request >= p.num_requests) return;

    uint32 first = work.request * p.rows_per_request;
    int num_tokens = p.rows_per_request;
    const int slot = p.slots ? p.slots[work.request] : work.request;
    const bool is_marked = p.is_fold && p.is_fold[work.request] != 0;
    const bool may_fold = p.is_fold ? is_marked : p.fold_threshold != NEVER;  // known before the window's length
    uint16* out = p.out + offset(work.hv, p.out_stride_h) + work.value_first;
    if (p.cu_seqlens) {
        first = p.cu_seqlens[work.request];
        num_tokens = p.cu_seqlens[work.request + 1] - first;
        const uint32 rows_end = p.cu_seqlens[p.num_requests];
        if (rows_end < p.num_rows) zero_rows(out, p.out_stride_n, rows_end + work.request, p.num_rows, p.num_requests);
    }
    if (slot < 0) {
        if (p.zero_padding) zero_rows(out, p.out_stride_n, first, first + num_tokens, 1);
        return;
    }
    if (num_tokens <= 0 && !is_marked) return;

    const Request request(p, work, slot, first, num_tokens);
    const Places places(p, work, request);
    const Ring ring(p, work, request);
    Asked asked;
    Solved solved;
    ask(asked, p, work, request, ring, places, may_fold);
    const bool is_fold = request.history > 0 && (p.is_fold ? is_marked : request.history >= p.fold_threshold);
    append(p, work, request, ring, asked);
    solve(solved, p, work, request, asked, is_fold);

    const uint32 row_in_block = 8 * (work.g / 2) + work.g % 2;
    BLOCK_LOOP
    for (int block = 0; block < BLOCKS; ++block) {  // as they arrive
        copy_async_wait<BLOCKS - 1>();
        copy_async_commit();  // of nothing, so that as many groups as before may be under way
        sync_warp();
        uint8* rows = places.rows + 32 * block * ROW_BYTES;
        const uint8* staged = places.staged + block * STAGED_BYTES;
        const LaneRows lane_rows{rows + row_in_block * ROW_BYTES, nullptr, State::exchange(row_in_block), work.t};
        const Chunk v[2] = {load_shared(staged), load_shared(staged + 512)};
        Chunk results;
        Corrections corrections;
        stream(results, corrections, lane_rows, asked, solved, v, is_fold);
        if (request.is_new(request.history + work.g))
            store(out + offset(first + work.g, p.out_stride_n) + 8 * work.t + 32 * block, results);
        UNROLL
        for (int tile = 0; tile < 2; ++tile) {
            const int row = work.g + 8 * tile;
            if (request.is_new(row)) store(ring.v + offset(request.ring_row(row), p.ring_v_stride_r) + 32 * block, v[tile]);
        }
        if (is_fold) {
            fold(lane_rows, asked, solved, corrections);
            sync_warp();
            store_rows(rows, nullptr, places.state + 32 * block * STATE_STRIDE, nullptr);
        }
    }
}
