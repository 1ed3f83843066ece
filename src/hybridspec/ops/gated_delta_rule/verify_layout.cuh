// Rows of a step and of the window in registers, and what a launch of the verify kernel passes.
//
// Keys and queries of a step are the rows of X: up to four tokens fit into one tile of eight rows,
// k_0 .. k_3, then q_0 .. q_3; up to eight take two tiles, one of keys and one of queries. Results have
// value rows down and rows of X across, so nothing is multiplied for tokens that do not exist.
//
// Beside what `warp_layout.cuh` names the launch defines: MOST_TOKENS (4 or 8), MOST_WINDOW, BY_BLOCK
// (whether slots may be a strided column, marks be by slot and other numbers than -1 be padding),
// TOKEN_DECAY (whether the ring has decays of tokens, not their sums).
#pragma once

#include "warp_layout.cuh"

constexpr int TILES = MOST_TOKENS / 4;         // of rows of X
constexpr int WINDOW_TILES = MOST_WINDOW / 8;  // of rows of the window

static_assert(WINDOW_TILES == 2 || WINDOW_TILES == 3, "lanes hold a row of each tile");

struct Params {
    const uint16 *q, *k, *v;          // [N, H, K], [N, H, K], [N, HV, V]
    const void *a, *b;                // [N, HV]
    const void *A_log, *dt_bias;      // [HV]
    uint8* state;                     // [S, HV, V, K]
    uint8* state_scale;               // [S, HV, V, K / 32] bf16, factors of an 8-bit state
    uint16 *ring_k, *ring_u;          // [S, H, R, K], [S, HV, R, V]
    float* ring_decay;                // [S, HV, R]
    uint16* out;                      // [N, HV, V]
    const int *ring_start, *history_len;  // [S], or [B] if cursors are by row; no ring_start: 0
    const int *cu_seqlens, *slots;    // [B + 1], [B]; none: equally many rows each, slot b
    const signed char* is_fold;       // [B], or [S] if by slot; none: windows of at least fold_threshold rows fold
    uint32 q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h;
    uint32 a_stride_n, b_stride_n, out_stride_n, out_stride_h;
    uint32 state_stride_s, state_stride_h, scale_stride_s, scale_stride_h;  // bytes
    uint32 ring_k_stride_s, ring_k_stride_h, ring_k_stride_r;
    uint32 ring_u_stride_s, ring_u_stride_h, ring_u_stride_r;
    uint32 decay_stride_s, decay_stride_h;
    uint32 num_requests, num_rows, rows_per_request, ring_capacity;
    int fold_threshold, cursors_by_row, zero_padding, use_l2norm;
    int padding, slot_stride, fold_by_slot;  // slots up to `padding` are none
    float scale, beta_scale;
};

// The row of X that lane row g holds in a tile: which token, and whether it is the query.
DEVICE uint32 token_of(uint32 g) { return TILES == 1 ? g % 4 : g; }
DEVICE bool is_query(int tile, uint32 g) { return TILES == 1 ? g >= 4 : tile == 1; }

// Rows of the step and of the ring that a request has.
struct Request {
    uint32 slot, history, start, ring_mask;
    int num_tokens;
    uint32 token;  // the lane's row of q, k, v, a, b and out: that of token_of(g), the last one, or any
    DEVICE Request(const Params& p, const Work& work, uint32 slot, uint32 first, int num_tokens)
        : slot(slot), num_tokens(num_tokens) {
        const uint32 cursor = p.cursors_by_row ? work.request : slot;
        history = p.history_len[cursor], start = p.ring_start ? p.ring_start[cursor] : 0;
        ring_mask = p.ring_capacity - 1;
        token = num_tokens > 0 ? first + (has(work.g) ? token_of(work.g) : num_tokens - 1) : 0;
    }
    DEVICE bool has(uint32 g) const { return int(token_of(g)) < num_tokens; }
    DEVICE uint32 ring_row(uint32 index) const { return (start + index) & ring_mask; }
};

// Rows g, g + 8, ... of the live window.
struct Window {
    uint32 row[WINDOW_TILES];
    bool live[WINDOW_TILES];
    DEVICE Window(const Request& request, uint32 g) {
        UNROLL
        for (int tile = 0; tile < WINDOW_TILES; ++tile)
            row[tile] = request.ring_row(g + 8 * tile), live[tile] = g + 8 * tile < request.history;
    }
};

// Where the pools have what a warp works on: row 0 of the ring and the first value row of the state;
// ring_k and ring_u from the lane's columns on.
struct Pools {
    uint8 *state, *scales;
    uint16 *ring_k, *ring_u;
    float* ring_decay;
};
