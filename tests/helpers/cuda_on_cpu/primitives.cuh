// The names of hybridspec/ops/cuda/primitives.cuh for a CPU: every lane of a warp is a fiber.
//
// What lanes do together is an exchange: each leaves its value and lets the next lane run; when its
// turn comes again all have left theirs. A lane is therefore never more than one exchange ahead of
// another, so two buffers do. Between exchanges lanes run upwards, then downwards, by turns that differ
// from block to block. Lanes that are not all at the same exchange abort the process, and so does what
// lies past the shared memory of the launch; copies are carried out where they are waited for, and
// shared memory starts as NaN.
//
// Warps run one after the other, each to its end or to where it waits for its block; blocks too, each
// to its end or to where it waits for the others.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

typedef uint8_t uint8;
typedef uint16_t uint16;
typedef uint32_t uint32;
typedef uint64_t uint64;

#define DEVICE inline
#define UNROLL
#define ROLLED
#define KERNEL(threads, blocks_per_multiprocessor) \
    constexpr int kThreads = threads;              \
    extern "C" void

inline uint8 shared_memory[227 * 1024];

struct alignas(16) Chunk {
    uint32 r[4];
};

namespace cpu {

struct Left {  // what a lane leaves at an exchange
    int place, number;
    uint32 words[8];
};
struct Copy {
    void* to;
    const void* from;
};
enum class State { running, at_block, at_grid, done };
constexpr int kStackBytes = 1 << 18;
struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    State state;
    int count;  // exchanges so far
    Left left[2];
    std::vector<std::vector<Copy>> groups;  // committed and under way
    std::vector<Copy> open;
};

inline Lane* lanes;  // of the warp that runs
inline ucontext_t scheduler;
inline int lane, warp, block, blocks, shared_bytes;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "block %d warp %d lane %d: %s\n", block, warp, lane, what);
    std::abort();
}

inline void check_shared(const void* address, int bytes = 16) {
    const auto* first = static_cast<const uint8*>(address);
    if (first < shared_memory || first + bytes > shared_memory + shared_bytes) fail("past the shared memory");
}

// Leave words and wait for those of all lanes; `place` tells exchanges apart. Returns the buffer.
inline int exchange(int place, std::initializer_list<uint32> words) {
    const int self = lane, number = lanes[self].count++, turn = number % 2;
    Left& left = lanes[self].left[turn];
    left.place = place, left.number = number;
    std::copy(words.begin(), words.end(), left.words);
    swapcontext(&lanes[self].context, &scheduler);
    for (int other = 0; other < 32; ++other)
        if (lanes[other].left[turn].place != place || lanes[other].left[turn].number != number)
            fail("lanes are at different exchanges");
    return turn;
}
// Rest until the others of the block, or of the grid, are as far.
inline void wait_in(State state) {
    lanes[lane].state = state;
    swapcontext(&lanes[lane].context, &scheduler);
}
inline uint32 word(int turn, int of, int index) { return lanes[of & 31].left[turn].words[index]; }

inline float real(uint32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32 bits(float x) {
    uint32 b;
    std::memcpy(&b, &x, 4);
    return b;
}

}  // namespace cpu

inline uint32 lane_index() { return cpu::lane; }
inline uint32 warp_index() { return cpu::warp; }
inline uint32 block_index() { return cpu::block; }
inline uint32 num_blocks() { return cpu::blocks; }

inline Chunk load(const void* from) {
    Chunk chunk;
    if (reinterpret_cast<uintptr_t>(from) % 16) cpu::fail("a load that is not aligned");
    std::memcpy(&chunk, from, 16);
    return chunk;
}
inline Chunk load_once(const void* from) { return load(from); }
inline void prefetch(const void*) {}
inline Chunk load_if(bool live, const void* from) { return live ? load(from) : Chunk{{0, 0, 0, 0}}; }
inline Chunk load_shared(const void* from) {
    cpu::check_shared(from);
    return load(from);
}
inline void store(void* to, const Chunk& chunk) {
    if (reinterpret_cast<uintptr_t>(to) % 16) cpu::fail("a store that is not aligned");
    std::memcpy(to, &chunk, 16);
}
inline void store_shared(void* to, const Chunk& chunk) {
    cpu::check_shared(to, 16);
    store(to, chunk);
}
inline void store_shared(void* to, uint32 first, uint32 second) {
    cpu::check_shared(to, 8);
    const uint32 both[2] = {first, second};
    std::memcpy(to, both, 8);
}

template <bool read_once>
inline void copy_async(void* shared, const void* global) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
        cpu::fail("a copy that is not aligned");
    cpu::check_shared(shared);
    cpu::lanes[cpu::lane].open.push_back({shared, global});
}
alignas(16) inline const uint8 zeros[16] = {};
inline void copy_async_if(bool live, void* shared, const void* global) {
    copy_async<false>(shared, live ? global : zeros);
}
inline void copy_async_commit() {
    auto& mine = cpu::lanes[cpu::lane];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}
template <int pending>
inline void copy_async_wait() {
    auto& groups = cpu::lanes[cpu::lane].groups;
    while (static_cast<int>(groups.size()) > pending) {
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

inline void sync_warp() { cpu::exchange(1, {}); }
inline float from_lane(float value, int of) {
    return cpu::real(cpu::word(cpu::exchange(2, {cpu::bits(value)}), of, 0));
}
inline uint32 from_lane(uint32 value, int of) { return cpu::word(cpu::exchange(13, {value}), of, 0); }
inline uint32 take_number(uint32* counter) { return cpu::lane == 0 ? (*counter)++ : 0; }
inline float from_lane_below(float value, int distance) {
    const int of = cpu::lane - distance;
    return cpu::real(cpu::word(cpu::exchange(3, {cpu::bits(value)}), of < 0 ? cpu::lane : of, 0));
}
inline float from_lane_xor(float value, int mask) {
    return cpu::real(cpu::word(cpu::exchange(4, {cpu::bits(value)}), cpu::lane ^ mask, 0));
}
inline uint32 largest_of_warp(uint32 value) {
    const int turn = cpu::exchange(10, {value});
    for (int other = 0; other < 32; ++other) value = std::max(value, cpu::word(turn, other, 0));
    return value;
}

inline void sync_block() {
    cpu::exchange(11, {});
    cpu::wait_in(cpu::State::at_block);
}
inline uint32 arrive(uint32* counter) {
    sync_block();
    if (cpu::warp > 0 || cpu::lane > 0) return 0;
    const uint32 ticket = *counter;
    *counter += cpu::block == 0 ? 0x80000000u - (cpu::blocks - 1) : 1;
    return ticket;
}
inline void wait_for_others(uint32* counter, uint32 ticket) {
    if (cpu::warp > 0) cpu::fail("only the first warp waits for other blocks");
    cpu::exchange(12, {});
    cpu::wait_in(cpu::State::at_grid);
    if (cpu::lane == 0 && !((ticket ^ *counter) & 0x80000000u)) cpu::fail("not all blocks have arrived");
}

inline uint8* opaque_shared_memory() { return shared_memory; }
inline uint32 transpose(uint32 pair) {
    const int turn = cpu::exchange(5, {pair}), g = cpu::lane / 4, t = cpu::lane % 4;
    uint32 result = 0;
    for (int i = 0; i < 2; ++i)  // rows 2t and 2t + 1, column g
        result |= (cpu::word(turn, 4 * (2 * t + i) + g / 2, 0) >> (16 * (g % 2)) & 0xffff) << (16 * i);
    return result;
}

inline float exponential(float x) { return std::exp(x); }
inline float logarithm(float x) { return std::log(x); }
inline float reciprocal_root(float x) { return 1 / std::sqrt(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float larger_magnitude(float a, float b) {
    return a != a || b != b ? NAN : std::max(std::fabs(a), std::fabs(b));
}
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float as_float(uint32 bits) { return cpu::real(bits); }
inline uint32 as_bits(float x) { return x != x ? 0x7fffffffu : cpu::bits(x); }  // the NaN of arithmetic there
inline uint32 select_bytes(uint32 low, uint32 high, uint32 selector) {
    const uint64 both = static_cast<uint64>(high) << 32 | low;
    uint32 result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<uint32>(both >> (8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
    return result;
}

struct Bf16 {
    static uint32 round(float x) {
        const uint32 b = cpu::bits(x);
        if (x != x) return 0x7fff;
        return (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
    static uint32 pack(float first, float second) { return round(first) | round(second) << 16; }
    static float first(uint32 pair) { return cpu::real(pair << 16); }
    static float second(uint32 pair) { return cpu::real(pair & 0xffff0000u); }
    static float either(uint32 pair, bool is_second) { return is_second ? second(pair) : first(pair); }
    static void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]);
    static void mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]);
};
struct Fp16 {
    static uint32 round(float x) {
        const _Float16 half = static_cast<_Float16>(x);
        uint16 b;
        std::memcpy(&b, &half, 2);
        return b;
    }
    static float widen(uint32 b) {
        const uint16 low = static_cast<uint16>(b);
        _Float16 half;
        std::memcpy(&half, &low, 2);
        return static_cast<float>(half);
    }
    static uint32 pack(float first, float second) { return round(first) | round(second) << 16; }
    static float first(uint32 pair) { return widen(pair & 0xffff); }
    static float second(uint32 pair) { return widen(pair >> 16); }
    static float either(uint32 pair, bool is_second) { return is_second ? second(pair) : first(pair); }
    static void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]);
    static void mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]);
};

namespace cpu {

// c += A B with A [16, depth] and B [depth, 8]; words are those of A, then those of B.
template <class Type>
void mma(float (&c)[4], int place, int depth, std::initializer_list<uint32> operands) {
    const int turn = exchange(place, operands), g = lane / 4, t = lane % 4, words_of_a = depth / 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < depth; ++k) {
            const uint32 a = word(turn, row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2);
            const uint32 b = word(turn, column * 4 + k % 8 / 2, words_of_a + k / 8);
            sum += static_cast<double>(k % 2 ? Type::second(a) : Type::first(a)) *
                   (k % 2 ? Type::second(b) : Type::first(b));
        }
        c[i] = static_cast<float>(sum);
    }
}

}  // namespace cpu

inline void Bf16::mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
    float sums[4] = {c[0], c[1], c[2], c[3]};
    cpu::mma<Bf16>(sums, 6, 16, {a[0], a[1], a[2], a[3], b0, b1});
    std::copy(sums, sums + 4, d);
}
inline void Bf16::mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]) {
    float sums[4] = {c[0], c[1], c[2], c[3]};
    cpu::mma<Bf16>(sums, 7, 8, {a[0], a[1], b});
    std::copy(sums, sums + 4, d);
}
inline void Fp16::mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
    float sums[4] = {c[0], c[1], c[2], c[3]};
    cpu::mma<Fp16>(sums, 8, 16, {a[0], a[1], a[2], a[3], b0, b1});
    std::copy(sums, sums + 4, d);
}
inline void Fp16::mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]) {
    float sums[4] = {c[0], c[1], c[2], c[3]};
    cpu::mma<Fp16>(sums, 9, 8, {a[0], a[1], b});
    std::copy(sums, sums + 4, d);
}

namespace cpu {

using Warp = Lane[32];
struct Block {
    std::unique_ptr<Warp[]> warps;
    std::vector<uint8> shared;
};

inline bool are_all(const Block& block, int warps, State state) {
    for (int w = 0; w < warps; ++w)
        for (const Lane& each : block.warps[w])
            if (each.state != state) return false;
    return true;
}
inline void release(Block& block, int warps, State from) {
    for (int w = 0; w < warps; ++w)
        for (Lane& each : block.warps[w])
            if (each.state == from) each.state = State::running;
}

// Run a warp until it waits or ends; it continues in an order of its lanes that differs by block.
inline void run_warp() {
    bool running = true;
    for (int round = block; running; ++round) {
        running = false;
        for (int i = 0; i < 32; ++i) {
            lane = round % 2 ? 31 - i : i;
            if (lanes[lane].state == State::running) swapcontext(&scheduler, &lanes[lane].context);
            running |= lanes[lane].state == State::running;
        }
    }
}

// Run a block until it waits for others or ends.
inline void run_block(Block& self, int warps) {
    std::memcpy(shared_memory, self.shared.data(), self.shared.size());
    for (;;) {
        for (warp = 0; warp < warps; ++warp) {
            lanes = self.warps[warp];
            run_warp();
        }
        if (!are_all(self, warps, State::at_block)) break;
        release(self, warps, State::at_block);
    }
    std::memcpy(self.shared.data(), shared_memory, self.shared.size());
}

// Run `kernel(params)` for all blocks of `threads` threads.
template <class Params>
void run(void (*kernel)(Params), const Params& params, int num_blocks, int threads, int bytes) {
    static void (*the_kernel)(Params);
    static Params the_params;
    the_kernel = kernel, the_params = params, blocks = num_blocks, shared_bytes = bytes;
    const int warps = threads / 32;
    std::vector<Block> waiting;
    std::unique_ptr<Warp[]> spare;
    for (block = 0; block < num_blocks; ++block) {
        Block self{spare ? std::move(spare) : std::unique_ptr<Warp[]>(new Warp[warps]), {}};
        self.shared.assign(sizeof shared_memory, 0xff);
        for (int w = 0; w < warps; ++w)
            for (Lane& each : self.warps[w]) {
                each.state = State::running, each.count = 0;
                for (Left& left : each.left) left.number = -1;
                each.groups.clear(), each.open.clear();
                getcontext(&each.context);
                each.context.uc_stack.ss_sp = each.stack.get();
                each.context.uc_stack.ss_size = kStackBytes;
                each.context.uc_link = nullptr;
                makecontext(&each.context, +[] {
                    the_kernel(the_params);
                    lanes[lane].state = State::done;
                    setcontext(&scheduler);
                }, 0);
            }
        run_block(self, warps);
        if (are_all(self, warps, State::done)) spare = std::move(self.warps);
        else waiting.push_back(std::move(self));
    }
    while (!waiting.empty()) {
        if (static_cast<int>(waiting.size()) != num_blocks) fail("some blocks have ended, others wait for them");
        for (Block& each : waiting) release(each, 1, State::at_grid);
        for (block = 0; block < num_blocks; ++block) run_block(waiting[block], warps);
        if (are_all(waiting.back(), warps, State::done)) break;
    }
}

}  // namespace cpu
