// A consumer warpgroup of the sm_90a GEMM: nibbles to fragments, wgmma, promotion of exact integers to float32 sums.
#pragma once

#include "comet/convert_i4.cuh"
#include "comet/gemm_sm90.cuh"
#include "comet/pipeline.cuh"
#include "comet/wgmma.cuh"

namespace comet {

// A block's nibbles as one thread holds them while they wait, and its rows' scales and zero points.
struct Weights {
    uint4 first, second;
    unsigned scales, zeros;

    __device__ __forceinline__ void load(unsigned record, int thread) {
        first = load_shared_16(record + thread * 16);
        second = load_shared_16(record + 2048 + thread * 16);
        scales = load_shared_4(record + kNibbleBytes + (thread >> 2) * 4);
        if (ZERO && !ZERO_PRODUCT) zeros = load_shared_2(record + kNibbleBytes + 128 + (thread >> 2) * 2);
    }
};

// A block whose product is under way, or done and not yet promoted.
struct Product {
    unsigned dot[kResults];
    unsigned fragment[4][4];
    unsigned scales, zeros;
};

// Scale, scale (sum, sum) of tokens 2t, 2t + 1 of each atom; kept in registers where several row tiles use them, because
// the width of shared memory is what limits large tiles.
struct Meta {
    unsigned at;
    float4 kept[ROW_TILES > 1 ? kAtoms : 1];

    __device__ __forceinline__ float4 fetch(int i) const {
        if (!ZERO_PRODUCT) return load_shared_f4(at + i * 64);
        const float2 scales = load_shared_f2(at + i * 64);
        return make_float4(scales.x, scales.y, 0, 0);
    }
    __device__ __forceinline__ void load(unsigned address) {
        at = address;
        if (ROW_TILES > 1)
#pragma unroll
            for (int i = 0; i < kAtoms; ++i) kept[ROW_TILES > 1 ? i : 0] = fetch(i);
    }
    __device__ __forceinline__ float4 atom(int i) const { return ROW_TILES > 1 ? kept[ROW_TILES > 1 ? i : 0] : fetch(i); }
};

// acc += (sx * sw) * (dot - zero * sum): dot is the exact integer (times `unit`), so is the difference.
template <bool kInt8>
__device__ __forceinline__ void promote(float (&acc)[kResults], const Product& p, const Meta& meta) {
    constexpr float kUnit = kInt8 ? 1.0f : kE4m3Unit;
    const float scale0 = __uint_as_float(p.scales << 16), scale1 = __uint_as_float(p.scales & 0xffff0000u);
    const float zero0 = ZERO ? -kUnit * static_cast<float>(p.zeros & 0xffu) : -8 * kUnit;  // 8: offset binary
    const float zero1 = ZERO ? -kUnit * static_cast<float>(p.zeros >> 8) : -8 * kUnit;
    const auto value = [&](int i) {
        return kInt8 ? static_cast<float>(static_cast<int>(p.dot[i])) : __uint_as_float(p.dot[i]);
    };
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
        const float4 m = meta.atom(atom);
        float* a = acc + 4 * atom;
        const auto difference = [&](int i, float zero, float sum) {
            return ZERO_PRODUCT ? value(4 * atom + i) : fmaf(zero, sum, value(4 * atom + i));
        };
        a[0] = fmaf(m.x * scale0, difference(0, zero0, m.z), a[0]);
        a[1] = fmaf(m.y * scale0, difference(1, zero0, m.w), a[1]);
        a[2] = fmaf(m.x * scale1, difference(2, zero1, m.z), a[2]);
        a[3] = fmaf(m.y * scale1, difference(3, zero1, m.w), a[3]);
    }
}

// One consumer warpgroup's view of the ring.
struct Consumer {
    unsigned ring, full, empty, terms, terms_full, terms_empty, record_at, meta_at;
    int thread;
    int stage, parity;                // of the next block to load
    int term_buffer, term_parity;     // of the next zero-point product

    template <bool kInt8>
    __device__ __forceinline__ void start(Product& p, const Weights& weights, unsigned base) const {
        expand_fragment(weights.first, weights.second, p.fragment);
        p.scales = weights.scales;
        p.zeros = weights.zeros;
        wgmma_block<kInt8>(p.dot, p.fragment, activation_descriptor(base));
        wgmma_commit();
    }

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    // The stage's data are used up: say so to every cta that writes into it.
    __device__ __forceinline__ void release(int used) const {
        fence_proxy_async();  // before the stage is copied over what was loaded from it
        __syncwarp();
        const int lane = thread & 31;
        if (kCluster) {
            if (lane < CLUSTER) mbarrier_arrive_remote(empty + 8 * used, lane);
        } else if (lane == 0) {
            mbarrier_arrive(empty + 8 * used);
        }
    }

    template <int kPending>
    static __device__ __forceinline__ void settle(Product& p, int pending) {
        if (pending >= kPending) wgmma_wait<kPending>(p.dot);
        else if constexpr (kPending > 0) settle<kPending - 1>(p, pending);
    }

    // kCount blocks, ROW_TILES products each. FLIGHT products are under way while one is promoted, so that the tensor
    // cores work meanwhile and one pass through the latencies (barrier, shared memory, wgmma) serves several products.
    // All are drained at the end: the compiler serializes wgmma that cross the back edge of a loop.
    template <bool kInt8, int kCount>
    __device__ __forceinline__ void step(float (&acc)[ROW_TILES][kResults]) {
        constexpr int kProducts = kCount * ROW_TILES;
        Product products[FLIGHT];
        int used[kCount];
        Meta meta;
#pragma unroll
        for (int block = 0; block < kCount; ++block) {  // all waits first: no loop may stand between wgmma under way
            mbarrier_wait(full + 8 * stage, parity);
            used[block] = stage;
            advance();
        }
        const auto begin = [&](int index) {  // the index is known at compile time, once unrolled
            // From lane 0, so that the compiler knows it to be uniform and computes descriptors once a warp.
            const unsigned base = __shfl_sync(0xffffffffu, ring + used[index / ROW_TILES] * kStageBytes, 0);
            Weights weights;
            weights.load(base + record_at + index % ROW_TILES * kRecord, thread);
            start<kInt8>(products[index % FLIGHT], weights, base);
        };
#pragma unroll
        for (int i = 0; i < kProducts && i < FLIGHT; ++i) begin(i);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
            const int block = i / ROW_TILES, row_tile = i % ROW_TILES;
            if (row_tile == 0) meta.load(ring + used[block] * kStageBytes + meta_at);
            settle<FLIGHT - 1>(products[i % FLIGHT], kProducts - 1 - i);
            promote<kInt8>(acc[row_tile], products[i % FLIGHT], meta);
            if (row_tile == ROW_TILES - 1) release(used[block]);
            if (i + FLIGHT < kProducts) begin(i + FLIGHT);
        }
    }

    // acc -= the zero points' part of 32 blocks. `zero_terms` of the first row tile; `stride` from one to the next.
    __device__ __forceinline__ void subtract_zeros(
        float (&acc)[ROW_TILES][kResults], const uint4* zero_terms, long long stride) {
        mbarrier_wait(terms_full + 8 * term_buffer, term_parity);
        const unsigned tile = __shfl_sync(0xffffffffu, terms + term_buffer * kTermBytes, 0);
        const unsigned long long b = activation_descriptor(tile);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            uint4 a[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = load_constant_16(zero_terms + i * stride + j * 128 + thread);
#pragma unroll
            for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[j].x), "+r"(a[j].y), "+r"(a[j].z), "+r"(a[j].w));
            hold(acc[i]);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wgmma_k16_bf16(acc[i], a[2 * half], b + 4 * half, 1);      // high * high
                wgmma_k16_bf16(acc[i], a[2 * half], b + 4 * half + 2, 1);  // high * low
                wgmma_k16_bf16(acc[i], a[2 * half + 1], b + 4 * half, 1);  // low * high
            }
            wgmma_commit();
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold(acc[i]);
        }
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(terms_empty + 8 * term_buffer);
        term_buffer ^= 1;
        term_parity ^= term_buffer == 0;
    }

    static __device__ __forceinline__ void hold(float (&values)[kResults]) {
#pragma unroll
        for (int i = 0; i < kResults; ++i) asm volatile("" : "+f"(values[i])::"memory");
    }

    // `count` blocks of one kind.
    template <bool kInt8>
    __device__ __forceinline__ void run(float (&acc)[ROW_TILES][kResults], int count) {
#if BATCH * ROW_TILES == 1
        Weights weights;
        Product p;
        Meta meta;
        mbarrier_wait(full + 8 * stage, parity);
        weights.load(ring + stage * kStageBytes + record_at, thread);
        for (; count > 0; --count) {
            const int used = stage;
            const unsigned base = ring + used * kStageBytes;
            start<kInt8>(p, weights, base);
            advance();
            if (count > 1) {  // the next block's weights, while this one's product is under way
                mbarrier_wait(full + 8 * stage, parity);
                weights.load(ring + stage * kStageBytes + record_at, thread);
            }
            wgmma_wait<0>(p.dot);
            meta.load(base + meta_at);
            promote<kInt8>(acc[0], p, meta);
            release(used);
        }
#else
        for (; count >= BATCH; count -= BATCH) step<kInt8, BATCH>(acc);
        if (BATCH > 2 && (count & 2)) step<kInt8, 2>(acc);
        if (BATCH > 1 && (count & 1)) step<kInt8, 1>(acc);
#endif
    }
};

// First block after `block` (and at most `last`) that is not of its kind.
__device__ __forceinline__ int run_end(const unsigned* mask, int block, int last, bool is_int8) {
    const unsigned same = is_int8 ? 0xffffffffu : 0u;
    int word = block >> 5;
    unsigned other = (mask[word] ^ same) & (0xffffffffu << (block & 31));
    while (other == 0 && 32 * (word + 1) < last) other = mask[++word] ^ same;
    return other == 0 ? last : min(last, 32 * word + __ffs(other) - 1);
}

}  // namespace comet
