// What the verify kernels share that have a ring of corrections: what a warp asks for, the gates of a
// token, and the fold.
//
// ptxas may encode an asynchronous copy that has a cache hint so that it cannot run: LDGSTS [R + UR], desc[UR]. Code
// far away decides it: look at the instructions of all builds after a change (docs/kernels/log/gdn_verify.md).
#pragma once

#include "verify_layout.cuh"

#include "state_copies.cuh"

constexpr int STAGED_BYTES = 512 * (WINDOW_TILES + 1);  // of a block: 16 bytes a lane for rows g, g + 8, ... of u, and for v

// Where a warp has its state rows, their factors, and the lane's bytes of u and v in shared memory.
struct Shared {
    uint8 *rows, *factors, *staged;
    DEVICE explicit Shared(uint8* base) {
        rows = base + warp_index() * SHARED_BYTES;
        factors = rows + PART * ROW_BYTES;
        staged = factors + PART * SCALE_BYTES + 16 * lane_index();
    }
};

// What a step asks for before it solves its system.
struct Asked {
    Chunk x[GROUPS][TILES];                // rows of X
    Chunk window_k[WINDOW_TILES][GROUPS];  // keys g, g + 8, ... of the window
    float a, b, A_log, dt_bias;
    float window_decays[WINDOW_TILES][2];  // of live rows 2t, 2t + 1, 2t + 8, 2t + 9, ...
    float last_decay;
};

DEVICE void copy_block(const Shared& shared, const Pools& pools, int block, bool may_fold) {
    copy_rows(shared.rows + 32 * block * ROW_BYTES, shared.factors + 32 * block * SCALE_BYTES,
              pools.state + 32 * block * STATE_STRIDE, pools.scales + 32 * block * SCALE_BYTES, may_fold);
}

// Copy live rows g, g + 8, ... of u, and v, to a lane's place in shared memory.
DEVICE void copy_values(uint8* staged, const Window& window, const uint16* u, uint32 stride, const uint16* v) {
    UNROLL
    for (int tile = 0; tile < WINDOW_TILES; ++tile)
        copy_async_if(window.live[tile], staged + 512 * tile, u + offset(window.row[tile], stride));
    copy_async<false>(staged + 512 * WINDOW_TILES, v);
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
    for (int tile = 0; tile < WINDOW_TILES; ++tile)
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            asked.window_k[tile][i] = load_if(window.live[tile], ring_k + offset(window.row[tile], p.ring_k_stride_r) + 32 * i);
    UNROLL
    for (int block = 0; block < BLOCKS; ++block)
        copy_values(shared.staged + block * STAGED_BYTES, window, ring_u + 32 * block, p.ring_u_stride_r, v + 32 * block);
    copy_async_commit();
    asked.a = load_number<GATE>(p.a, offset(request.token, p.a_stride_n) + hv);
    asked.b = load_number<GATE>(p.b, offset(request.token, p.b_stride_n) + hv);
    asked.A_log = load_number<A_LOG>(p.A_log, hv), asked.dt_bias = load_number<DT_BIAS>(p.dt_bias, hv);
    UNROLL
    for (int tile = 0; tile < WINDOW_TILES; ++tile)
        UNROLL
        for (int i = 0; i < 2; ++i) asked.window_decays[tile][i] = pools.ring_decay[request.ring_row(2 * t + i + 8 * tile)];
    asked.last_decay = pools.ring_decay[request.ring_row(request.history - 1)];

    sync_warp();
    UNROLL
    for (int block = 1; block < BLOCKS; ++block) {
        copy_block(shared, pools, block, may_fold);
        copy_async_commit();
    }
    sync_warp();
}

// Log-decay and write strength of token_of(g).
struct Gate {
    float log_decay, beta;
    DEVICE Gate(const Params& p, const Work& work, const Request& request, const Asked& asked) {
        const bool live = request.has(work.g);
        log_decay = live ? -exponential(asked.A_log) * softplus(asked.a + asked.dt_bias) : 0;
        beta = live ? p.beta_scale * reciprocal(1 + exponential(-asked.b)) : 0;
    }
};

// What a fold multiplies with, for a window that ends with decay G_P. Selected, since what is dead may be
// anything.
struct Folding {
    float weight[WINDOW_TILES][2];  // e^{G_P - G_j} of live rows 2t, 2t + 1, 2t + 8, 2t + 9, ...
    float window_decay;             // e^{G_P}
    DEVICE void weigh(const Work& work, const Request& request, const Asked& asked, float window_end) {
        window_decay = exponential(window_end);
        UNROLL
        for (int tile = 0; tile < WINDOW_TILES; ++tile)
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const float factor = exponential(window_end - asked.window_decays[tile][i]);
                weight[tile][i] = 2 * work.t + i + 8 * tile < request.history ? factor : 0;
            }
    }
};

// Make columns of keys of the window, for a fold.
DEVICE void transpose_window(Asked& asked) {
    UNROLL
    for (int tile = 0; tile < WINDOW_TILES; ++tile)
        UNROLL
        for (int i = 0; i < GROUPS; ++i)
            UNROLL
            for (int j = 0; j < 4; ++j) asked.window_k[tile][i].r[j] = transpose(asked.window_k[tile][i].r[j]);
}

// Terms of a fold for a group of columns: weighted corrections of the pair of rows, and keys of the
// window, transposed.
struct Added {
    const uint32 (&weighted_u)[2 * WINDOW_TILES];
    const Chunk (&keys)[WINDOW_TILES][GROUPS];
    int group;
    DEVICE void to(float (&d)[4], int j, const float (&c)[4]) const {
        ACT::mma(d, {weighted_u[0], weighted_u[1], weighted_u[2], weighted_u[3]}, keys[0][group].r[j], keys[1][group].r[j], c);
        if (WINDOW_TILES == 3)
            ACT::mma_8(d, {weighted_u[2 * WINDOW_TILES - 2], weighted_u[2 * WINDOW_TILES - 1]}, keys[WINDOW_TILES - 1][group].r[j], d);
    }
};

// Fold 32 state rows in shared memory; keys of the window are transposed.
DEVICE void fold(const LaneRows& rows, const Asked& asked, const Folding& folding, const Chunk (&u)[WINDOW_TILES]) {
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {  // 16 state rows
        sync_warp();  // or the compiler reads rows ahead until registers run out
        uint32 weighted_u[2 * WINDOW_TILES];
        UNROLL
        for (int i = 0; i < 2 * WINDOW_TILES; ++i) {
            const int part = i / 2;
            const uint32 pair = transpose(u[part].r[2 * tile + i % 2]);
            weighted_u[i] = ACT::pack(folding.weight[part][0] * ACT::first(pair), folding.weight[part][1] * ACT::second(pair));
        }
        const uint32 row = 4 * tile;
        UNROLL
        for (int group = 0; group < GROUPS; group += State::TOGETHER) {
            Columns x[2][State::TOGETHER];
            UNROLL
            for (int i = 0; i < State::TOGETHER; ++i) {
                const Added added{weighted_u, asked.window_k, group + i};
                State::fold(x[0][i], x[1][i], rows, row, group + i, added, folding.window_decay);
            }
            if (SCALE_BYTES) sync_warp();  // all lanes of a row have read its factors
            UNROLL
            for (int half = 0; half < 2; ++half) State::put(rows, row + 2 * half, group, x[half]);
        }
    }
}
