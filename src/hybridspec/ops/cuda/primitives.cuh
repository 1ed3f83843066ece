// What a kernel needs of the machine: tensor-core products, copies, exchanges within a warp.
//
// Kernels use these names only, so that tests can compile the same kernel for a CPU with another file
// of this name. No standard header is included: run-time compilation has none.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define KERNEL(threads, blocks_per_multiprocessor) \
    extern "C" __global__ void __launch_bounds__(threads, blocks_per_multiprocessor)

extern __shared__ __align__(128) uint8 shared_memory[];

DEVICE uint32 lane_index() { return threadIdx.x & 31; }
DEVICE uint32 warp_index() { return threadIdx.x >> 5; }
DEVICE uint32 block_index() { return blockIdx.x; }
DEVICE uint32 num_blocks() { return gridDim.x; }

// 16 bytes: what one lane loads, stores or copies at once.
struct __align__(16) Chunk {
    uint32 r[4];
};

DEVICE Chunk load(const void* from) { return *static_cast<const Chunk*>(from); }
// Zero otherwise; no branch.
DEVICE Chunk load_if(bool live, const void* from) {
    Chunk chunk;
    asm("{.reg .pred live; setp.ne.b32 live, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
        "@live ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=r"(chunk.r[0]), "=r"(chunk.r[1]), "=r"(chunk.r[2]), "=r"(chunk.r[3])
        : "l"(from), "r"(static_cast<int>(live)));
    return chunk;
}
// Not kept in the first-level cache, and not moved behind a wait.
DEVICE Chunk load_once(const void* from) {
    Chunk chunk;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.r[0]), "=r"(chunk.r[1]), "=r"(chunk.r[2]), "=r"(chunk.r[3])
                 : "l"(from)
                 : "memory");
    return chunk;
}
// Into the second-level cache, a line of 128 bytes.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
DEVICE Chunk load_shared(const void* from) { return *static_cast<const Chunk*>(from); }
// In assembly, or the compiler may store four times 4 bytes to save moves.
DEVICE void store(void* to, const Chunk& chunk) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(chunk.r[0]), "r"(chunk.r[1]), "r"(chunk.r[2]),
                 "r"(chunk.r[3])
                 : "memory");
}
DEVICE void store_shared(void* to, const Chunk& chunk) { *static_cast<Chunk*>(to) = chunk; }
DEVICE void store_shared(void* to, uint32 first, uint32 second) { *static_cast<uint64*>(to) = uint64(second) << 32 | first; }

// ---- Copies from global to shared memory that a lane does not wait for ----

// `read_once`: the line is the first that the second-level cache gives up.
template <bool read_once>
DEVICE void copy_async(void* shared, const void* global) {
    uint32 address = static_cast<uint32>(__cvta_generic_to_shared(shared));
    if (read_once)
        asm volatile(
            "{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
            "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy;}" ::"r"(address), "l"(global)
            : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
// Zeros otherwise, and nothing is read.
DEVICE void copy_async_if(bool live, void* shared, const void* global) {
    uint32 address = static_cast<uint32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(live ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most `pending` of the groups that this lane committed are under way.
template <int pending>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- Within a warp ----

DEVICE void sync_warp() { __syncwarp(); }
DEVICE float from_lane(float value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE uint32 from_lane(uint32 value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE float from_lane_below(float value, int distance) { return __shfl_up_sync(~0u, value, distance); }
DEVICE float from_lane_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

DEVICE uint32 largest_of_warp(uint32 value) { return __reduce_max_sync(~0u, value); }

// The address of shared memory, of which the compiler does not know that all lanes have the same. If it does, it may
// put the address into a uniform register, which an asynchronous copy with a cache hint cannot have
// (docs/kernels/log/gdn_verify.md).
DEVICE uint8* opaque_shared_memory() {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(shared_memory));
    return static_cast<uint8*>(__cvta_shared_to_generic(from_lane(address, lane_index())));
}

// ---- Beyond a warp ----

// The next number, for the first lane; the others get 0.
DEVICE uint32 take_number(uint32* counter) { return lane_index() == 0 ? atomicAdd(counter, 1) : 0; }

DEVICE void sync_block() { __syncthreads(); }
// Meetings of all blocks of a cooperative launch. The counter is 0 before the first one: the first
// block adds what the others leave of 2^31, so that the last to arrive changes the counter's highest
// bit and leaves the others as they were.
//
// Say that this block is there, with all that it wrote; returns a ticket to the first thread.
DEVICE uint32 arrive(uint32* counter) {
    sync_block();
    uint32 ticket = 0;
    if (threadIdx.x == 0) {
        const uint32 part = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(counter), "r"(part) : "memory");
    }
    return ticket;
}
// Wait until all blocks are there: the first warp, which then has to meet the others of its block.
DEVICE void wait_for_others(uint32* counter, uint32 ticket) {
    uint32 now;
    if (threadIdx.x == 0)
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        while (((ticket ^ now) & 0x80000000u) == 0);
    __syncwarp();
}

// Transpose 8 x 8 values of 16 bits; a lane (g, t) = (lane / 4, lane % 4) holds row g, columns 2t, 2t+1.
DEVICE uint32 transpose(uint32 pair) {
    uint32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// ---- Numbers ----


DEVICE float exponential(float x) {  // 2^-22 relative; 0 below 2^-126
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}
DEVICE float logarithm(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result * 0.6931471805599453f;
}
DEVICE float reciprocal_root(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
DEVICE float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float larger_magnitude(float a, float b) {  // NaN if one is
    float result;
    asm("{.reg .f32 a, b; abs.f32 a, %1; abs.f32 b, %2; max.NaN.f32 %0, a, b;}" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float as_float(uint32 bits) { return __uint_as_float(bits); }
DEVICE uint32 as_bits(float x) { return __float_as_uint(x); }
DEVICE uint32 select_bytes(uint32 low, uint32 high, uint32 selector) { return __byte_perm(low, high, selector); }

// Two 16-bit numbers in a register, the first in the low half.
struct Bf16 {
    DEVICE static uint32 pack(float first, float second) {
        uint32 result;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
        return result;
    }
    DEVICE static float first(uint32 pair) { return as_float(pair << 16); }
    DEVICE static float second(uint32 pair) { return as_float(pair & 0xffff0000u); }
    DEVICE static float either(uint32 pair, bool second) { return as_float(select_bytes(pair, 0, second ? 0x3244 : 0x1044)); }
    // d = A B + c with A [16, 16] and B [16, 8], or A [16, 8] and B [8, 8]; registers as in PTX.
    DEVICE static void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
    DEVICE static void mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
};

struct Fp16 {
    DEVICE static uint32 pack(float first, float second) {
        uint32 result;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
        return result;
    }
    DEVICE static float first(uint32 pair) {
        float result;
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(result) : "r"(pair));
        return result;
    }
    DEVICE static float second(uint32 pair) {
        float result;
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(result) : "r"(pair));
        return result;
    }
    DEVICE static float either(uint32 pair, bool second) { return first(select_bytes(pair, 0, second ? 0x32 : 0x10)); }
    DEVICE static void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
    DEVICE static void mma_8(float (&d)[4], const uint32 (&a)[2], uint32 b, const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%7, %8, %9, %10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
};
