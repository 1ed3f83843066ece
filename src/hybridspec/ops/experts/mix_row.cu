// One row through a norm, a router and its experts, in one launch.
//
// Blocks stay on the machine together (a cooperative launch) and meet twice: when all scores are
// known, and when all hidden values are. What a phase reads of weights is asked for before the wait
// in front of it, where it is known by then: so memory has work from the beginning to the end.
//
//   until the first meeting    norm; scores; hidden values of the shared expert
//   until the second           every block: the experts; hidden values of the experts
//   then                       columns of the output, through all experts
//
// A unit of work is a warp's: a row of the router, a gate's row and its row of `up`, a column of the
// output. Sums run over a lane's chunks of 8, then over lanes, whatever the number of blocks.
#include "primitives.cuh"

// Pointers are to bf16 but for the norm's weight and the meeting; strides are bytes.
struct Params {
    const uint8* norm_weight;  // [SIZE] fp32
    const uint8* router;  // [EXPERTS + 1, SIZE]
    const uint8* gate_up;  // [EXPERTS, 2 INNER, SIZE]
    const uint8* down;  // [EXPERTS, SIZE, INNER]
    const uint8* shared_gate_up;  // [2 SHARED, SIZE]
    const uint8* shared_down;  // [SIZE, SHARED]
    uint8* row;  // [SIZE]
    uint8* scores;  // [EXPERTS + 1]
    uint8* hidden;  // [PER_ROW * INNER + SHARED]
    uint32* meeting;  // [2]: of `arrive`, of `take_number`
    uint64 router_stride, gate_up_stride_e, gate_up_stride_f, down_stride_e, down_stride_d, shared_gate_up_stride,
        shared_down_stride;
    float eps;
};

constexpr int kWarps = THREADS / 32;
constexpr int kLane = 8;  // values of a chunk
constexpr int kWide = SIZE / (32 * kLane), kDeep = INNER / (32 * kLane), kSharedDeep = SHARED / (32 * kLane);
constexpr int kScores = EXPERTS + 1;
constexpr int kHidden = PER_ROW * INNER + SHARED;
constexpr int kKeys = (EXPERTS + 31) / 32;  // of a lane

// Shared memory.
constexpr int kHiddenAt = 2 * SIZE, kExpertsAt = kHiddenAt + 2 * kHidden, kWeightsAt = kExpertsAt + 4 * PER_ROW;
constexpr int kSumsAt = kWeightsAt + 4 * (PER_ROW + 1);

DEVICE Chunk chunk_of(const uint8* row, int i) { return load_shared(row + 16 * (32 * i + lane_index())); }
DEVICE float plus_products(float sum, const Chunk& x, const Chunk& y) {
    UNROLL for (int j = 0; j < 4; ++j) {
        sum = fused_multiply_add(Bf16::first(x.r[j]), Bf16::first(y.r[j]), sum);
        sum = fused_multiply_add(Bf16::second(x.r[j]), Bf16::second(y.r[j]), sum);
    }
    return sum;
}

// A lane's part of a row of weights.
template <int n>
struct Row {
    Chunk chunks[n];

    DEVICE void load_from(const uint8* from) {
        UNROLL for (int i = 0; i < n; ++i) chunks[i] = load_once(from + 16 * (32 * i + lane_index()));
    }
    DEVICE float times(const uint8* other) const {
        float sum = 0;
        UNROLL for (int i = 0; i < n; ++i) sum = plus_products(sum, chunks[i], chunk_of(other, i));
        return sum;
    }
};

DEVICE float sum_of_warp(float x) {
    UNROLL for (int mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
    return x;
}
DEVICE float in_shared(int at) { return *reinterpret_cast<const float*>(shared_memory + at); }
DEVICE void put_shared(int at, float x) { *reinterpret_cast<float*>(shared_memory + at) = x; }
DEVICE float bf16_at(const uint8* row, int i) { return Bf16::first(reinterpret_cast<const uint16*>(row)[i]); }
DEVICE void put_bf16(uint8* row, int i, float x) { reinterpret_cast<uint16*>(row)[i] = Bf16::pack(x, x); }

// A gate's row and its row of `up`, or a row of the router.
struct Unit {
    Row<kWide> gate, up;

    DEVICE void load_pair(const uint8* from, int rows, uint64 stride) {
        gate.load_from(from);
        up.load_from(from + rows * stride);
    }
    DEVICE void store_hidden(uint8* to) const {
        float g = 0, u = 0;
        UNROLL for (int i = 0; i < kWide; ++i) {
            const Chunk x = chunk_of(shared_memory, i);
            g = plus_products(g, gate.chunks[i], x), u = plus_products(u, up.chunks[i], x);
        }
        g = sum_of_warp(g), u = sum_of_warp(u);
        if (lane_index() == 0) put_bf16(to, 0, g * reciprocal(1 + exponential(-g)) * u);
    }
};

// The row and the norm's weight, then the normed row in shared memory, rounded.
struct Norm {
    static constexpr int kPart = kLane * THREADS;  // values at a time, a chunk of each thread
    static constexpr int kParts = (SIZE + kPart - 1) / kPart;
    Chunk x[kParts], weight[kParts][2];

    DEVICE static int place(int i) { return i * kPart + kLane * (32 * warp_index() + lane_index()); }
    DEVICE void load_from(const Params& p) {
        UNROLL for (int i = 0; i < kParts; ++i) {
            const int at = place(i);
            if (at >= SIZE) continue;
            x[i] = load_once(p.row + 2 * at);
            UNROLL for (int j = 0; j < 2; ++j) weight[i][j] = load_once(p.norm_weight + 4 * at + 16 * j);
        }
    }
    DEVICE void store(float eps) const {
        float sum = 0, total = 0;
        UNROLL for (int i = 0; i < kParts; ++i)
            if (place(i) < SIZE) sum = plus_products(sum, x[i], x[i]);
        sum = sum_of_warp(sum);
        if (lane_index() == 0) put_shared(kSumsAt + 4 * warp_index(), sum);
        sync_block();
        UNROLL for (int warp = 0; warp < kWarps; ++warp) total += in_shared(kSumsAt + 4 * warp);
        const float factor = reciprocal_root(total * (1.0f / SIZE) + eps);
        UNROLL for (int i = 0; i < kParts; ++i) {
            const int at = place(i);
            if (at >= SIZE) continue;
            Chunk y;
            UNROLL for (int j = 0; j < 4; ++j) {
                const uint32* w = weight[i][j / 2].r + 2 * (j % 2);
                y.r[j] = Bf16::pack(Bf16::first(x[i].r[j]) * factor * as_float(w[0]),
                                    Bf16::second(x[i].r[j]) * factor * as_float(w[1]));
            }
            store_shared(shared_memory + 2 * at, y);
        }
        sync_block();
    }
};

// The experts of the largest scores, of equal ones the first, and their weights, by one warp.
//
// A score's 16 bits, in the order of integers, and its place behind them are one key.
DEVICE void route(const Params& p) {
    uint32 keys[kKeys];
    float sum = 0, peak = as_float(0xff800000);
    UNROLL for (int i = 0; i < kKeys; ++i) {
        const uint32 expert = 32 * i + lane_index();
        keys[i] = 0;
        if (expert < EXPERTS) {
            const uint32 bits = reinterpret_cast<const uint16*>(p.scores)[expert];
            const uint32 order = bits & 0x8000 ? (bits == 0x8000 ? 0x8000 : ~bits & 0xffff) : bits | 0x8000;
            keys[i] = order << 16 | (0xffff - expert);
        }
    }
    const float shared_gate = bf16_at(p.scores, EXPERTS);
    const auto score_of = [](uint32 key) {
        const uint32 order = key >> 16;
        return as_float((order & 0x8000 ? order & 0x7fff : ~order & 0xffff) << 16);
    };
    UNROLL for (int i = 0; i < kKeys; ++i)
        if (keys[i]) peak = larger(peak, score_of(keys[i]));
    UNROLL for (int mask = 16; mask; mask /= 2) peak = larger(peak, from_lane_xor(peak, mask));
    UNROLL for (int i = 0; i < kKeys; ++i)
        if (keys[i]) sum += exponential(score_of(keys[i]) - peak);
    sum = sum_of_warp(sum);
    uint32 mine = 0;
    ROLLED for (int place = 0; place < PER_ROW; ++place) {
        uint32 best = 0;
        UNROLL for (int i = 0; i < kKeys; ++i) best = keys[i] > best ? keys[i] : best;
        best = largest_of_warp(best);
        UNROLL for (int i = 0; i < kKeys; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
        mine = lane_index() == place ? best : mine;
    }
    float weight = lane_index() < PER_ROW ? exponential(score_of(mine) - peak) * reciprocal(sum) : 0;
    if (IS_NORMALIZED) weight *= reciprocal(sum_of_warp(weight));
    if (lane_index() < PER_ROW) {
        reinterpret_cast<uint32*>(shared_memory + kExpertsAt)[lane_index()] = 0xffff - (mine & 0xffff);
        put_shared(kWeightsAt + 4 * lane_index(), weight);
    }
    if (lane_index() == 0) put_shared(kWeightsAt + 4 * PER_ROW, reciprocal(1 + exponential(-shared_gate)));
}

// A column of the output: a row of each expert's matrix.
struct Column {
    Row<kDeep> rows[PER_ROW];
    Row<kSharedDeep> shared;
    uint32 before;  // bits; to convert them would be to wait for them

    DEVICE void load_from(const Params& p, int column) {
        const auto* experts = reinterpret_cast<const uint32*>(shared_memory + kExpertsAt);
        UNROLL for (int e = 0; e < PER_ROW; ++e)
            rows[e].load_from(p.down + experts[e] * p.down_stride_e + column * p.down_stride_d);
        shared.load_from(p.shared_down + column * p.shared_down_stride);
        before = reinterpret_cast<const uint16*>(p.row)[column];
    }
    DEVICE void store_to(const Params& p, int column) const {
        float y = 0;
        UNROLL for (int e = 0; e < PER_ROW; ++e)
            y = fused_multiply_add(in_shared(kWeightsAt + 4 * e), rows[e].times(shared_memory + kHiddenAt + 2 * e * INNER), y);
        const float last = shared.times(shared_memory + kHiddenAt + 2 * PER_ROW * INNER);
        y = sum_of_warp(fused_multiply_add(in_shared(kWeightsAt + 4 * PER_ROW), last, y));
        if (lane_index() == 0) put_bf16(p.row, column, Bf16::first(before) + y);
    }
};

KERNEL(THREADS, 1) mix_row(const Params p) {
    const int warp = warp_index(), stride = kWarps * num_blocks(), place = warp * num_blocks() + block_index();
    Norm norm;
    norm.load_from(p);  // before any weight, or it would wait behind them
    Unit unit;
    const auto load_first = [&](int i) {
        if (i < kScores) unit.gate.load_from(p.router + i * p.router_stride);
        else if (i < kScores + SHARED)
            unit.load_pair(p.shared_gate_up + (i - kScores) * p.shared_gate_up_stride, SHARED, p.shared_gate_up_stride);
    };
    load_first(place);
    {
        const int thread = 32 * (place - kScores - SHARED) + lane_index();
        constexpr int kLines = 2 * SHARED / 128;
        if (thread >= 0 && thread < SIZE * kLines)
            prefetch(p.shared_down + thread / kLines * p.shared_down_stride + thread % kLines * 128);
    }
    norm.store(p.eps);
    for (int i = place; i < kScores + SHARED; i += stride) {
        if (i >= kScores) unit.store_hidden(p.hidden + 2 * (PER_ROW * INNER + i - kScores));
        else {
            const float score = sum_of_warp(unit.gate.times(shared_memory));
            if (lane_index() == 0) put_bf16(p.scores, i, score);
        }
        load_first(i + stride);
    }
    uint32 ticket = arrive(p.meeting);
    if (warp == 0) {
        wait_for_others(p.meeting, ticket);
        route(p);
    }
    sync_block();
    const auto* experts = reinterpret_cast<const uint32*>(shared_memory + kExpertsAt);
    // Blocks get weights at different rates: who is done with its first unit takes the next one.
    for (int i = place; i < PER_ROW * INNER;) {
        const uint32 number = take_number(p.meeting + 1);
        const uint8* expert = p.gate_up + experts[i / INNER] * p.gate_up_stride_e;
        unit.load_pair(expert + i % INNER * p.gate_up_stride_f, INNER, p.gate_up_stride_f);
        unit.store_hidden(p.hidden + 2 * i);
        i = stride + from_lane(number, 0);
    }

    int column_index = block_index() * kWarps + warp;
    Column column;
    // A fence would wait for loads of the thread that arrives for the block.
    if (warp > 0 && column_index < SIZE) column.load_from(p, column_index);
    ticket = arrive(p.meeting);
    if (warp == 0) {
        if (column_index < SIZE) column.load_from(p, column_index);
        wait_for_others(p.meeting, ticket);
    }
    sync_block();

    for (int i = 32 * warp + lane_index(); i < kHidden / kLane; i += THREADS)
        store_shared(shared_memory + kHiddenAt + 16 * i, load(p.hidden + 16 * i));
    sync_block();
    // All have passed the last number.
    if (block_index() == 0 && warp == 0 && lane_index() == 0) p.meeting[1] = 0;
    while (column_index < SIZE) {
        column.store_to(p, column_index);
        column_index += stride;
        if (column_index < SIZE) column.load_from(p, column_index);
    }
}
