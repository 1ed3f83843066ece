// The system of a step over a raw ring: 16 keys, those of the window and then those of the step, and
// up to eight queries; all that the large products need of them.
//
// Lane (g, t) has keys g and g + 8 (tiles 0 and 1) and query g (tile 2), and in every matrix with a
// column for each key columns 2t, 2t + 1, 2t + 8 and 2t + 9. Key P + g is that of query g.
#pragma once

#include "warp_layout.cuh"

constexpr int TILES = 3;  // of rows that are multiplied with the state

#include "verify_states.cuh"

struct Params {
    const uint16 *q, *k, *v;          // [N, H, K], [N, H, K], [N, HV, V]
    const void *a, *b;                // [N, HV]
    const void *A_log, *dt_bias;      // [HV]
    uint8* state;                     // [S, HV, V, K]
    uint16 *ring_k, *ring_v;          // [S, H, R, K], [S, HV, R, V]
    float *ring_a, *ring_b;           // [S, HV, R]
    uint16* out;                      // [N, HV, V]
    const int *ring_start, *history_len;  // [S], or [B] if cursors are by row
    const int *cu_seqlens, *slots;    // [B + 1], [B]; none: equally many rows each, slot b
    const signed char* is_fold;       // [B]; none: windows of at least fold_threshold rows fold
    uint32 q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h;
    uint32 a_stride_n, b_stride_n, out_stride_n, out_stride_h;
    uint32 state_stride_s, state_stride_h;  // bytes
    uint32 ring_k_stride_s, ring_k_stride_h, ring_k_stride_r;
    uint32 ring_v_stride_s, ring_v_stride_h, ring_v_stride_r;
    uint32 ring_a_stride_s, ring_a_stride_h, ring_b_stride_s, ring_b_stride_h;
    uint32 num_requests, num_rows, rows_per_request, ring_capacity;
    int fold_threshold, cursors_by_row, zero_padding, use_l2norm;
    float scale, beta_scale;
};

// Where rows since the checkpoint are: `history` of them in the ring, then those of the step.
struct Request {
    uint32 slot, start, ring_mask, first;
    int history, last;  // rows of the window, and of window and step
    DEVICE Request(const Params& p, const Work& work, uint32 slot, uint32 first, int num_tokens) : slot(slot), first(first) {
        const uint32 cursor = p.cursors_by_row ? work.request : slot;
        history = p.history_len[cursor], start = p.ring_start[cursor], last = history + num_tokens;
        ring_mask = p.ring_capacity - 1;
    }
    DEVICE bool is_live(int row) const { return row < last; }
    DEVICE bool is_new(int row) const { return row >= history && row < last; }
    DEVICE uint32 ring_row(int row) const { return (start + row) & ring_mask; }
    DEVICE uint32 token(int row) const { return first + (row - history); }
};

// What a step asks for before it solves its system.
struct Asked {
    Chunk x[GROUPS][TILES];  // keys g and g + 8, query g
    float a[2], b[2];        // of keys g and g + 8
    float A_log, dt_bias;
};

// What the large products need of it.
struct Solved {
    uint32 reads[2];             // C M: what query g takes of r for keys 2t, 2t + 1 and 2t + 8, 2t + 9
    uint32 solve[2][2], rest[2][2];  // rows g and g + 8 of M - 1 likewise, and what 16 bits leave of them
    float state_scale[TILES][2];  // of S k for keys 2t, 2t + 1, then 2t + 8, 2t + 9; of S q
    float value_scale[2][2];     // of v
    float weight[2][2];          // e^{c_P - c_j} / |k_j| of live rows, else 0
    float window_decay;          // e^{c_P}
};

// A sum of log-decays in two numbers: differences of near ones would lose what far ones left of them.
struct Sum {
    float high, low;
    DEVICE void add(const Sum& other) {
        const float sum = high + other.high, part = sum - high;
        low += other.low + ((high - (sum - part)) + (other.high - part));
        high = sum;
    }
    DEVICE float since(const Sum& other) const { return (high - other.high) + (low - other.low); }
};
DEVICE Sum from_lane(const Sum& sum, int lane) { return {from_lane(sum.high, lane), from_lane(sum.low, lane)}; }

struct Gates {
    Sum decay[2];   // c of keys g and g + 8
    float beta[2];
};

DEVICE Gates gates(const Params& p, const Work& work, const Request& request, const Asked& asked) {
    Gates found;
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
        const bool live = request.is_live(work.g + 8 * tile);
        Sum& sum = found.decay[tile];
        sum = {live ? -exponential(asked.A_log) * softplus(asked.a[tile] + asked.dt_bias) : 0, 0};
        found.beta[tile] = live ? p.beta_scale * reciprocal(1 + exponential(-asked.b[tile])) : 0;
        UNROLL
        for (uint32 distance = 1; distance < 8; distance *= 2) {
            const Sum below{from_lane_below(sum.high, 4 * distance), from_lane_below(sum.low, 4 * distance)};
            if (work.g >= distance) sum.add(below);
        }
    }
    found.decay[1].add(from_lane(found.decay[0], 28));
    return found;
}

// A number of row `row`, of which lanes have those of rows g and g + 8.
DEVICE float of_row(const float (&rows)[2], int row) {
    const float first = from_lane(rows[0], row % 8 * 4), second = from_lane(rows[1], row % 8 * 4);
    return row & 8 ? second : first;
}
DEVICE Sum of_row(const Sum (&rows)[2], int row) {
    const Sum first = from_lane(rows[0], row % 8 * 4), second = from_lane(rows[1], row % 8 * 4);
    return row & 8 ? second : first;
}

// Products of raw rows, and factors that scale rows to length one.
struct Products {
    float of_keys[2][2][2];  // keys g and g + 8 with keys 2t + i and 2t + 8 + i
    float of_query[2][2];
    float norm[TILES];       // of key g, key g + 8, query g
};

DEVICE Products multiply_rows(const Params& p, const Work& work, const Asked& asked) {
    const uint32 g = work.g, t = work.t;
    // A tile of rows g and g + 8 each: (key g, key g + 8), (key g + 8, query g), the query alone.
    float low[4] = {}, high[4] = {}, query_low[4] = {}, query_square[4] = {};
    UNROLL
    for (int i = 0; i < GROUPS; ++i) {
        const Chunk &key_0 = asked.x[i][0], &key_8 = asked.x[i][1], &query = asked.x[i][2];
        multiply(low, key_0, key_8, key_0, low);
        multiply(high, key_8, query, key_8, high);
        multiply(query_low, query, query, key_0, query_low);
        multiply(query_square, query, query, query, query_square);
    }
    Products found;
    UNROLL
    for (int i = 0; i < 2; ++i) {
        found.of_keys[0][0][i] = low[i], found.of_keys[1][0][i] = low[2 + i];
        found.of_keys[0][1][i] = 0, found.of_keys[1][1][i] = high[i];
        found.of_query[0][i] = query_low[i], found.of_query[1][i] = high[2 + i];
    }
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {  // squares are on the diagonal: row g's in lane (g, g / 2)
        const float(&squares)[4] = tile == 0 ? low : tile == 1 ? high : query_square;
        const float root = reciprocal_root((g % 2 ? squares[1] : squares[0]) + 1e-6f);
        found.norm[tile] = p.use_l2norm ? from_lane(root, 4 * g + g / 2) : 1;
    }
    return found;
}

// Rows X of a matrix with columns of keys become X (1 - N)^-1, from the last column on: column s of X is
// final when those above it have been taken in.
template <int rows>
DEVICE void substitute(float (&x)[rows][2][2], const float (&coupling)[2][2][2], uint32 g, uint32 t) {
    UNROLL
    for (int s = 15; s > 0; --s) {
        const int half = s / 8;
        float row[2][2];
        UNROLL
        for (int i = 0; i < 2; ++i)
            UNROLL
            for (int part = 0; part < 2; ++part)
                if (part <= half) row[part][i] = from_lane(coupling[half][part][i], s % 8 * 4 + t);
        UNROLL
        for (int of = 0; of < rows; ++of) {
            const float factor = from_lane(x[of][half][s % 2], 4 * g + s % 8 / 2);
            UNROLL
            for (int i = 0; i < 2; ++i)
                UNROLL
                for (int part = 0; part < 2; ++part)
                    if (part <= half) x[of][part][i] += factor * row[part][i];
        }
    }
}

// Solve the system; what only a fold needs is worked out where the request folds.
DEVICE void solve(Solved& solved, const Params& p, const Work& work, const Request& request, const Asked& asked, bool is_fold) {
    const uint32 g = work.g, t = work.t;
    const Products products = multiply_rows(p, work, asked);
    const Gates of = gates(p, work, request, asked);
    const int history = request.history;
    const Sum query_decay = of_row(of.decay, (history + g) & 15);
    float coupling[2][2][2], reads[1][2][2], key_norm[2][2];
    Sum column[2][2];
    UNROLL
    for (int part = 0; part < 2; ++part)
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int s = 2 * t + i + 8 * part, lane = 4 * (2 * t + i);
            column[part][i] = from_lane(of.decay[part], lane);
            key_norm[part][i] = from_lane(products.norm[part], lane);
            UNROLL
            for (int tile = 0; tile < 2; ++tile) {
                const float factor = exponential(of.decay[tile].since(column[part][i])) * key_norm[part][i] * products.norm[tile];
                coupling[tile][part][i] = s < g + 8 * tile ? -of.beta[tile] * factor * products.of_keys[tile][part][i] : 0;
            }
            const float factor = exponential(query_decay.since(column[part][i])) * key_norm[part][i] * products.norm[2] * p.scale;
            reads[0][part][i] = s <= history + int(g) ? factor * products.of_query[part][i] : 0;
            const float beta = from_lane(of.beta[part], lane);
            solved.value_scale[part][i] = beta;
            solved.state_scale[part][i] = -beta * exponential(column[part][i].high) * key_norm[part][i];
        }
    UNROLL
    for (int i = 0; i < 2; ++i)
        solved.state_scale[2][i] = from_lane(p.scale * products.norm[2] * exponential(query_decay.high), 4 * (2 * t + i));
    substitute(reads, coupling, g, t);
    UNROLL
    for (int part = 0; part < 2; ++part) solved.reads[part] = ACT::pack(reads[0][part][0], reads[0][part][1]);
    if (!is_fold) return;

    const Sum end = of_row(of.decay, (history - 1) & 15);
    solved.window_decay = exponential(end.high);
    float inverse[2][2][2];
    UNROLL
    for (int part = 0; part < 2; ++part)
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int s = 2 * t + i + 8 * part;
            const float weight = exponential(end.since(column[part][i])) * key_norm[part][i];
            solved.weight[part][i] = s < history ? weight : 0;
            UNROLL
            for (int tile = 0; tile < 2; ++tile) inverse[tile][part][i] = s == g + 8 * tile ? 1 : 0;
        }
    substitute(inverse, coupling, g, t);
    UNROLL
    for (int tile = 0; tile < 2; ++tile)
        UNROLL
        for (int part = 0; part < 2; ++part) {
            float x[2];
            UNROLL
            for (int i = 0; i < 2; ++i) x[i] = 2 * t + i + 8 * part == g + 8 * tile ? 0 : inverse[tile][part][i];
            const uint32 pair = ACT::pack(x[0], x[1]);
            solved.solve[tile][part] = pair;
            solved.rest[tile][part] = ACT::pack(x[0] - ACT::first(pair), x[1] - ACT::second(pair));
        }
}
