// The small system of a step: gates, products of rows of X, and the coefficients of all that is large.
#pragma once

#include "verify_phases.cuh"

// What the large products need of it.
struct Solved {
    float excess[GROUPS][TILES][4];  // of 8-bit states, see there
    uint32 couplings[TILES];         // rows of M - 1 and of C M
    uint32 live_coeff[TILES][2];     // coefficients of live rows for row g of X
    float state_scale[TILES][2];     // of the state for rows 2t and 2t + 1 of X
    float value_scale[2];            // of values
    Folding folding;
    uint32 append_row;               // ring row of token_of(g)
};

// Of row g of X in each tile.
struct Products {
    float norm[TILES], unit[TILES];     // factor of the row in the equations; x unit has length one
    float dots[TILES][2];               // with keys 2t and 2t + 1 of this step
    float window_dots[TILES][2][2];     // with those of the window
};

struct Gates {
    float decay, beta, log_decay;  // c_t, beta_t and g_t of token_of(g)
};

DEVICE Gates gates(const Params& p, const Work& work, const Request& request, const Asked& asked) {
    const Gate gate(p, work, request, asked);
    float decay = gate.log_decay;
    UNROLL
    for (uint32 distance = 1; distance < MOST_TOKENS; distance *= 2) {
        const float below = from_lane_below(decay, 4 * distance);
        decay += token_of(work.g) >= distance ? below : 0;
    }
    return {decay, gate.beta, gate.log_decay};
}

// Make sums of decays of tokens, from the first live row on; dead rows add nothing, whatever they hold.
DEVICE void accumulate(Asked& asked, const Work& work, const Request& request) {
    float total = 0;
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float(&decays)[2] = asked.window_decays[half];
        UNROLL
        for (int i = 0; i < 2; ++i) decays[i] = 2 * work.t + i + 8 * half < request.history ? decays[i] : 0;
        decays[1] += decays[0];
        float sum = decays[1];
        UNROLL
        for (uint32 distance = 1; distance < 4; distance *= 2) {
            const float below = from_lane_below(sum, distance);
            sum += work.t >= distance ? below : 0;
        }
        const float below = from_lane_below(sum, 1), before = total + (work.t ? below : 0);
        decays[0] += before, decays[1] += before;
        total += from_lane(sum, 4 * work.g + 3);
    }
    asked.last_decay = total;
}

// Products of rows of X with keys 2t and 2t + 1 of this step, and with those of the window.
DEVICE void multiply_rows(Products& products, const Params& p, const Work& work, const Asked& asked) {
    const uint32 g = work.g, t = work.t;
    float with_keys[4] = {0, 0, 0, 0}, with_queries[4] = {0, 0, 0, 0}, with_window[2][4] = {};
    UNROLL
    for (int i = 0; i < GROUPS; ++i) {
        const Chunk &keys = asked.x[i][0], &queries = asked.x[i][TILES - 1];
        multiply(with_keys, keys, queries, keys, with_keys);
        if (TILES == 2) multiply(with_queries, keys, queries, queries, with_queries);
        UNROLL
        for (int half = 0; half < 2; ++half)
            multiply(with_window[half], keys, queries, asked.window_k[half][i], with_window[half]);
    }
    float key_norm[2] = {1, 1};  // of tokens 2t and 2t + 1
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        float& norm = products.norm[tile];
        norm = is_query(tile, g) ? p.scale : 1;
        if (State::HAS_UNIT_ROWS || p.use_l2norm) {  // squares are on the diagonal: row g's in lane (g, g / 2)
            const float(&squares)[4] = tile ? with_queries : with_keys;
            const float root = reciprocal_root((g % 2 ? squares[2 * tile + 1] : squares[2 * tile]) + 1e-6f);
            products.unit[tile] = from_lane(root, 4 * g + g / 2);
            if (p.use_l2norm) {
                norm *= products.unit[tile];
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
            products.dots[tile][i] = products.norm[tile] * key_norm[i] * with_keys[2 * tile + i];
            UNROLL
            for (int half = 0; half < 2; ++half)
                products.window_dots[tile][half][i] = products.norm[tile] * with_window[half][2 * tile + i];
        }
}

// Rows of M - 1 (keys) and of C M (queries), where C_ts = e^{c_t - c_s} q_t.k_s (s <= t): columns 2t and
// 2t + 1, those of tokens. `dots` are products of a row of X with k_s for s = 2t and 2t + 1.
DEVICE void substitute(uint32 (&couplings)[TILES], const Gates& gates, const float (&dots)[TILES][2], uint32 g, uint32 t) {
    const uint32 token = token_of(g);
    float of[TILES][2], solved[TILES][2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32 s = 2 * t + i;
        const float between = exponential(gates.decay - from_lane(gates.decay, 4 * s));
        UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
            const bool query = is_query(tile, g), taken = query ? s <= token : s < token;
            solved[tile][i] = of[tile][i] = taken ? (query ? between : -gates.beta * between) * dots[tile][i] : 0;
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

// Weights of live rows, then factors of rows of X.
DEVICE void coefficients(Solved& solved, const Work& work, const Request& request, const Asked& asked, const Products& products, const Gates& gates,
                         float window_end) {
    const uint32 g = work.g, t = work.t;
    const float token_decay = exponential(gates.decay);
    solved.folding.weigh(work, request, asked, window_end);
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        const float row_scale = is_query(tile, g) ? token_decay : -gates.beta * token_decay;
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const float *of = products.window_dots[tile][half], *weight = solved.folding.weight[half];
            solved.live_coeff[tile][half] = ACT::pack(row_scale * weight[0] * of[0], row_scale * weight[1] * of[1]);
        }
        UNROLL
        for (int i = 0; i < 2; ++i)
            solved.state_scale[tile][i] = from_lane(row_scale * products.norm[tile] * solved.folding.window_decay, 4 * (2 * t + i));
    }
    UNROLL
    for (int i = 0; i < 2; ++i) solved.value_scale[i] = from_lane(is_query(0, g) ? 0 : gates.beta, 4 * (2 * t + i));
}

DEVICE void append_keys(uint16* row, const Asked& asked, float norm) {
    UNROLL
    for (int i = 0; i < GROUPS; ++i) {
        Chunk normed;
        UNROLL
        for (int j = 0; j < 4; ++j)
            normed.r[j] = ACT::pack(norm * ACT::first(asked.x[i][0].r[j]), norm * ACT::second(asked.x[i][0].r[j]));
        store(row + 32 * i, normed);
    }
}

// Solve the system and append keys and decays. Where the request folds, keys of the window are
// transposed.
DEVICE void solve(Solved& solved, Asked& asked, const Params& p, const Work& work, const Request& request, const Pools& pools,
                  bool is_fold) {
    const uint32 g = work.g;
    Products products;
    multiply_rows(products, p, work, asked);
    solved.append_row = request.ring_row(request.history + token_of(g));
    if (request.has(g) && !is_query(0, g) && work.value_first == 0 && work.hv % RATIO == 0)  // keys are appended by one warp
        append_keys(pools.ring_k + offset(solved.append_row, p.ring_k_stride_r), asked, products.norm[0]);
    if (is_fold) transpose_window(asked);
    State::take(asked.x, solved.excess, products.unit);
    if (State::HAS_UNIT_ROWS)
        UNROLL
        for (int tile = 0; tile < TILES; ++tile)
            products.norm[tile] = (is_query(tile, g) ? p.scale : 1) * (p.use_l2norm ? 1 : reciprocal(products.unit[tile]));

    const Gates of = gates(p, work, request, asked);
    substitute(solved.couplings, of, products.dots, g, work.t);
    if (TOKEN_DECAY) accumulate(asked, work, request);
    const float window_end = request.history ? asked.last_decay : 0;
    coefficients(solved, work, request, asked, products, of, window_end);
    if (request.has(g) && g < MOST_TOKENS && work.t == 0 && work.value_first == 0)
        pools.ring_decay[solved.append_row] = TOKEN_DECAY ? of.log_decay : of.decay + (is_fold ? 0 : window_end);
}
