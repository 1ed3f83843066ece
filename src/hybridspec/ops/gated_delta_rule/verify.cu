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

static_assert(WINDOW_TILES == 2, "the system has two tiles of live rows");
static_assert(SHARED_BYTES == PART * (ROW_BYTES + SCALE_BYTES) + BLOCKS * STAGED_BYTES, "what the launch reserves");

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
    const Shared shared(shared_memory);
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
            fold(lane_rows, asked, solved.folding, u);
            sync_warp();
            store_rows(rows, factors, pools.state + 32 * block * STATE_STRIDE, pools.scales + 32 * block * SCALE_BYTES);
        }
    }
}
