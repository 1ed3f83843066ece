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
// second time where the request folds). So a step has four phases: `ask`, `solve`, and for 32 value
// rows at a time `stream` and, where the request folds, `fold`.

#include "verify_system.cuh"

#include "state_copies.cuh"

constexpr int STAGED_BYTES = 512 * 3;  // of a block: 16 bytes a lane for live rows g and g + 8 of u, and for v

static_assert(SHARED_BYTES == PART * (ROW_BYTES + SCALE_BYTES) + BLOCKS * STAGED_BYTES, "what the launch reserves");

// Where a warp has its state rows, their factors, and the lane's bytes of u and v in shared memory.
struct Shared {
    uint8 *rows, *factors, *staged;
    DEVICE Shared() {
        rows = shared_memory + warp_index() * SHARED_BYTES;
        factors = rows + PART * ROW_BYTES;
        staged = factors + PART * SCALE_BYTES + 16 * lane_index();
    }
};

DEVICE void copy_block(const Shared& shared, const Pools& pools, int block, bool may_fold) {
    copy_rows(shared.rows + 32 * block * ROW_BYTES, shared.factors + 32 * block * SCALE_BYTES,
              pools.state + 32 * block * STATE_STRIDE, pools.scales + 32 * block * SCALE_BYTES, may_fold);
}

// Copy live rows g and g + 8 of u, and v, to a lane's place in shared memory.
DEVICE void copy_values(uint8* staged, const Window& window, const uint16* u, uint32 stride, const uint16* v) {
    UNROLL
    for (int half = 0; half < 2; ++half)
        copy_async_if(window.live[half], staged + 512 * half, u + offset(window.row[half], stride));
    copy_async<false>(staged + 1024, v);
}

// Ask for everything: what is waited for longest comes first. Lanes of tokens that do not exist
// take the last one again; their results go nowhere.
DEVICE void ask(Asked& asked, Pools& pools, const Params& p, const Work& work, const Request& request, const Shared& shared,
                bool may_fold) {
    const uint32 g = work.g, t = work.t;
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        const uint16* key = p.k + offset(request.token, p.k_stride_n) + offset(work.h, p.k_stride_h);
        const uint16* query = p.q + offset(request.token, p.q_stride_n) + offset(work.h, p.q_stride_h);
        const uint16* row = (is_query(tile, g) ? query : key) + 8 * t;
        UNROLL
        for (int i = 0; i < GROUPS; ++i) asked.x[i][tile] = load(row + 32 * i);
    }
    const uint32 slot = request.slot, hv = work.hv, value_first = work.value_first;
    pools.state = p.state + offset(slot, p.state_stride_s) + offset(hv, p.state_stride_h) + value_first * STATE_STRIDE;
    pools.scales = p.state_scale + offset(slot, p.scale_stride_s) + offset(hv, p.scale_stride_h) + value_first * SCALE_BYTES;
    const uint16* v = p.v + offset(request.token, p.v_stride_n) + offset(hv, p.v_stride_h) + value_first + 8 * t;
    sync_warp();
    copy_block(shared, pools, 0, may_fold);
    sync_warp();

    const Window window(request, g);
    uint16* ring_k = p.ring_k + offset(slot, p.ring_k_stride_s) + offset(work.h, p.ring_k_stride_h) + 8 * t;
    uint16* ring_u = p.ring_u + offset(slot, p.ring_u_stride_s) + offset(hv, p.ring_u_stride_h) + value_first + 8 * t;
    pools.ring_k = ring_k, pools.ring_u = ring_u;
    pools.ring_decay = p.ring_decay + offset(slot, p.decay_stride_s) + offset(hv, p.decay_stride_h);
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            asked.window_k[half][i] = load_if(window.live[half], ring_k + offset(window.row[half], p.ring_k_stride_r) + 32 * i);
    UNROLL
    for (int block = 0; block < BLOCKS; ++block)
        copy_values(shared.staged + block * STAGED_BYTES, window, ring_u + 32 * block, p.ring_u_stride_r, v + 32 * block);
    copy_async_commit();
    asked.a = load_number<GATE>(p.a, offset(request.token, p.a_stride_n) + hv);
    asked.b = load_number<GATE>(p.b, offset(request.token, p.b_stride_n) + hv);
    asked.A_log = load_number<A_LOG>(p.A_log, hv), asked.dt_bias = load_number<DT_BIAS>(p.dt_bias, hv);
    UNROLL
    for (int half = 0; half < 2; ++half)
        UNROLL
        for (int i = 0; i < 2; ++i) asked.window_decays[half][i] = pools.ring_decay[request.ring_row(2 * t + i + 8 * half)];
    asked.last_decay = pools.ring_decay[request.ring_row(request.history - 1)];

    sync_warp();
    UNROLL
    for (int block = 1; block < BLOCKS; ++block) {
        copy_block(shared, pools, block, may_fold);
        copy_async_commit();
    }
    sync_warp();
}

// Terms of a fold for a group of columns: weighted corrections of the pair of rows, and keys of the
// window, transposed, rows 0 to 7 and 8 to 15.
struct Added {
    const uint32 (&weighted_u)[4];
    const Chunk &keys_0, &keys_8;
    DEVICE void to(float (&d)[4], int j, const float (&c)[4]) const { ACT::mma(d, weighted_u, keys_0.r[j], keys_8.r[j], c); }
};

// Corrections and outputs of 32 value rows: S0 k and S0 q, live corrections `u`, and those of this step.
DEVICE void stream(Chunk (&results)[TILES], const LaneRows& rows, const Asked& asked, const Solved& solved, const Chunk (&u)[2],
                   const Chunk& v) {
    UNROLL
    for (int pair = 0; pair < 4; pair += 2) {  // state rows 2 pair and 2 pair + 2 of every lane
        float c[TILES][4] = {};
        UNROLL
        for (int i = 0; i < GROUPS; ++i) State::multiply(c, rows, 2 * pair, i, asked.x[i], solved.excess[i]);
        uint32 r[2];
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32 values = transpose(v.r[pair + half]);
            UNROLL
            for (int tile = 0; tile < TILES; ++tile)
                UNROLL
                for (int i = 0; i < 2; ++i) {
                    float& of = c[tile][2 * half + i];
                    of *= solved.state_scale[tile][i];
                    if (tile == 0) of += solved.value_scale[i] * (i ? ACT::second(values) : ACT::first(values));
                }
        }
        const uint32 live_u[4] = {transpose(u[0].r[pair]), transpose(u[0].r[pair + 1]), transpose(u[1].r[pair]),
                                  transpose(u[1].r[pair + 1])};
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            ACT::mma(c[tile], live_u, solved.live_coeff[tile][0], solved.live_coeff[tile][1], c[tile]);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            r[half] = ACT::pack(c[0][2 * half], c[0][2 * half + 1]);
            if (TILES == 1 && rows.t >= 2) r[half] = 0;  // these are queries
        }
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            ACT::mma_8(c[tile], r, solved.couplings[tile], c[tile]);
            UNROLL
            for (int half = 0; half < 2; ++half)
                results[tile].r[pair + half] = transpose(ACT::pack(c[tile][2 * half], c[tile][2 * half + 1]));
        }
    }
}

// Fold 32 state rows in shared memory; keys of the window are transposed.
DEVICE void fold(const LaneRows& rows, const Asked& asked, const Solved& solved, const Chunk (&u)[2]) {
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {  // 16 state rows
        sync_warp();  // or the compiler reads rows ahead until registers run out
        uint32 weighted_u[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2;
            const uint32 pair = transpose(u[half].r[2 * tile + i % 2]);
            weighted_u[i] = ACT::pack(solved.weight[half][0] * ACT::first(pair), solved.weight[half][1] * ACT::second(pair));
        }
        const uint32 row = 4 * tile;
        UNROLL
        for (int group = 0; group < GROUPS; group += State::TOGETHER) {
            Columns x[2][State::TOGETHER];
            UNROLL
            for (int i = 0; i < State::TOGETHER; ++i) {
                const Added added{weighted_u, asked.window_k[0][group + i], asked.window_k[1][group + i]};
                State::fold(x[0][i], x[1][i], rows, row, group + i, added, solved.window_decay);
            }
            if (SCALE_BYTES) sync_warp();  // all lanes of a row have read its factors
            UNROLL
            for (int half = 0; half < 2; ++half) State::put(rows, row + 2 * half, group, x[half]);
        }
    }
}

KERNEL(32 * WARPS, BLOCKS_PER_MULTIPROCESSOR) verify(const Params p) {
    const Work work;
    if (work.request >= p.num_requests) return;

    uint32 first = work.request * p.rows_per_request;
    int num_tokens = p.rows_per_request;
    const int slot_or_none = p.slots ? p.slots[work.request * (BY_BLOCK ? p.slot_stride : 1)] : work.request;
    const bool is_padding = slot_or_none <= (BY_BLOCK ? p.padding : -1);
    // A mark by slot waits for the slot's number; one by request does not.
    const uint32 mark = BY_BLOCK && p.fold_by_slot ? (is_padding ? 0 : slot_or_none) : work.request;
    const bool is_marked = p.is_fold && p.is_fold[mark] != 0;
    const bool may_fold = p.is_fold ? is_marked : p.fold_threshold != NEVER;  // known before the window's length
    uint16* out = p.out + offset(work.hv, p.out_stride_h) + work.value_first;
    if (p.cu_seqlens) {
        first = p.cu_seqlens[work.request];
        num_tokens = p.cu_seqlens[work.request + 1] - first;
        const uint32 rows_end = p.cu_seqlens[p.num_requests];
        if (rows_end < p.num_rows) zero_rows(out, p.out_stride_n, rows_end + work.request, p.num_rows, p.num_requests);
    }
    if (is_padding) {
        if (p.zero_padding) zero_rows(out, p.out_stride_n, first, first + num_tokens, 1);
        return;
    }
    if (num_tokens <= 0 && !is_marked) return;

    const Request request(p, work, slot_or_none, first, num_tokens);
    const Shared shared;
    Asked asked;
    Pools pools;
    Solved solved;
    ask(asked, pools, p, work, request, shared, may_fold);
    const bool is_fold = p.is_fold ? is_marked : int(request.history) >= p.fold_threshold;
    solve(solved, asked, p, work, request, pools, is_fold);

    const uint32 row_in_block = 8 * (work.g / 2) + work.g % 2;
    BLOCK_LOOP
    for (int block = 0; block < BLOCKS; ++block) {  // as they arrive
        copy_async_wait<BLOCKS - 1>();
        copy_async_commit();  // of nothing, so that as many groups as before may be under way
        sync_warp();
        uint8 *rows = shared.rows + 32 * block * ROW_BYTES, *factors = shared.factors + 32 * block * SCALE_BYTES;
        const uint8* staged = shared.staged + block * STAGED_BYTES;
        const LaneRows lane_rows{rows + row_in_block * ROW_BYTES, factors + row_in_block * SCALE_BYTES,
                                 State::exchange(row_in_block), work.t};
        const Chunk u[2] = {load_shared(staged), load_shared(staged + 512)}, v = load_shared(staged + 1024);
        Chunk results[TILES];
        stream(results, lane_rows, asked, solved, u, v);
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            uint16* to = is_query(tile, work.g) ? out + offset(request.token, p.out_stride_n) + 8 * work.t
                                                    : pools.ring_u + offset(solved.append_row, p.ring_u_stride_r);
            if (request.has(work.g)) store(to + 32 * block, results[tile]);
        }
        if (is_fold) {
            fold(lane_rows, asked, solved, u);
            sync_warp();
            store_rows(rows, factors, pools.state + 32 * block * STATE_STRIDE, pools.scales + 32 * block * SCALE_BYTES);
        }
    }
}
