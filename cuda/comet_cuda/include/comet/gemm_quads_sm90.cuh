// A consumer warpgroup of the sm_90a GEMM with scales shared in quads: one multiply-add a result promotes a block.
//
// Sums stand in the unit of the block that was promoted last (gemm_units_sm90.cuh), so acc += sw * dot, with the two row
// scales sw in registers. When the unit changes the sums are multiplied by a factor while a product is under way, and
// after the last block by the unit itself. The zero points' part is a product over 32 blocks. Nibbles of the next block
// are loaded ahead, also across segments: the producers close with an empty stage.
//
// Nothing is under way at the end of a block, and one thing follows: warpgroups that start together stay together, and the
// tensor cores idle while both promote. TURNS makes them alternate.
#pragma once

#include "comet/convert_i4.cuh"
#include "comet/gemm_sm90.cuh"
#include "comet/gemm_units_sm90.cuh"
#include "comet/pipeline.cuh"
#include "comet/wgmma.cuh"

namespace comet {

constexpr int kSets = ROW_TILES * TOKEN_TILES;         // products a warpgroup and block, each with its results
constexpr int kTurnBarrier = kGroupBarrier + ROW_WGS;  // one a warpgroup
static_assert(kAtoms % 2 == 0, "factors of two atoms are loaded together");
static_assert(!TURNS || ROW_WGS == 2, "two take turns");

// One consumer warpgroup. Registers are scarce: two sets of sums and a product take 192 of them for 128 tokens.
struct QuadConsumer {
    unsigned ring, records;           // the first stage; the warpgroup's first record, in a stage
    int thread;
    unsigned base;                    // the next stage,
    int turn;                         // its number, plus STAGES in odd phases
    unsigned factors, products;       // taken: factors, products over blocks
    unsigned fragment[4][4], scales;  // of the next product

    __device__ __forceinline__ QuadConsumer(unsigned ring, unsigned records, int thread)
        : ring(ring), records(records), thread(thread), base(ring), turn(0), factors(0), products(0) {
        if (TURNS && second()) named_arrive(kTurnBarrier, 256);  // the first one begins
        mbarrier_wait(ring + kFullAt, 0);
        load(base + records);
    }

    // Take the turn that the second warpgroup gave last, so that no barrier is left half full.
    __device__ __forceinline__ void finish() const {
        if (TURNS && !second()) named_sync(kTurnBarrier, 256);
    }

    // Is this the second of two warpgroups?
    __device__ __forceinline__ bool second() const { return records != kCodesBytes; }

    __device__ __forceinline__ void load(unsigned record) {
        const unsigned at = record + thread * 16;
        const uint4 first = load_shared_16(at), second = load_shared_16(at + 2048);
        scales = load_shared_4(record + kNibbleBytes + (thread >> 2) * 4);
        expand_fragment(first, second, fragment);
    }

    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        const int lane = thread & 31;
        if (kCluster) {
            if (lane < CLUSTER) mbarrier_arrive_remote(ring + kEmptyAt + 8 * stage, lane);
        } else if (lane == 0) {
            mbarrier_arrive(ring + kEmptyAt + 8 * stage);
        }
    }

    __device__ __forceinline__ void await_factors() const {
        const FactorSlot at(factors);
        mbarrier_wait(ring + kFactorsFullAt + 8 * at.slot, at.parity);
    }

    // One set of sums times its tokens' next factors, in place. One load serves two atoms.
    __device__ __forceinline__ void rescale(float (&acc)[kResults], int token_tile) const {
        const unsigned at = ring + kFactorsAt + FactorSlot(factors).slot * kFactorBytes + (thread & 3) * 16;
#pragma unroll
        for (int atom = 0; atom < kAtoms; atom += 2) {
            if (kSets * kResults > 96 && atom % 4 == 0) __syncwarp();  // bounds what the compiler loads ahead
            const float4 f = load_shared_f4(at + (token_tile * kAtoms + atom) * 32);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float by = j < 4 ? (j & 1 ? f.y : f.x) : (j & 1 ? f.w : f.z);
                asm volatile("mul.f32 %0, %0, %1;" : "+f"(acc[4 * atom + j]) : "f"(by));
            }
        }
    }
    __device__ __forceinline__ void release_factors() {
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(ring + kFactorsEmptyAt + 8 * FactorSlot(factors).slot);
        ++factors;
    }
    // All sums.
    __device__ __forceinline__ void rescale(float (&acc)[kSets][kResults]) {
        await_factors();
#pragma unroll
        for (int i = 0; i < kSets; ++i) rescale(acc[i], i % TOKEN_TILES);
        release_factors();
    }

    // One block; kChange: the unit changes before it. Two products are under way while another one is promoted.
    template <bool kInt8, bool kChange>
    __device__ __forceinline__ void block(float (&acc)[kSets][kResults]) {
        constexpr int kFlight = TOKEN_TILES > 1 && FLIGHT > 1 ? 2 : 1;
        const unsigned from = base;
        const int used = turn >= STAGES ? turn - STAGES : turn;
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            unsigned dots[kFlight][kResults];
            const float scale0 = __uint_as_float(scales << 16), scale1 = __uint_as_float(scales & 0xffff0000u);
            pin(fragment);
            if (TURNS) named_sync(kTurnBarrier + second(), 256);
#pragma unroll
            for (int i = 0; i < kFlight; ++i) {
                wgmma_steps<kInt8>(dots[i], fragment, activation_descriptor(from + i * (TOKENS * 128)));
                wgmma_commit();
            }
            if (kChange && row_tile == 0) await_factors();
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i) {
                auto& dot = dots[i % kFlight];
                float* a = acc[row_tile * TOKEN_TILES + i];
                if (kChange) {
                    __syncwarp();  // or the compiler moves multiplications in between the wgmma
                    rescale(acc[row_tile * TOKEN_TILES + i], i);
                }
                if (i + 1 == TOKEN_TILES && row_tile + 1 == ROW_TILES) {
                    turn = turn + 1 == 2 * STAGES ? 0 : turn + 1;
                    const int stage = turn >= STAGES ? turn - STAGES : turn;
                    // From lane 0, so that the compiler knows it to be uniform and computes descriptors once a warp.
                    base = __shfl_sync(0xffffffffu, ring + stage * kStageBytes, 0);
                    mbarrier_wait(ring + kFullAt + 8 * stage, turn >= STAGES);
                }
                if (kFlight > 1 && i + 1 < TOKEN_TILES) wgmma_wait<kFlight - 1>(dot);
                else wgmma_wait<0>(dot);
                if (TURNS && i == max(TOKEN_TILES - 2, 0)) named_arrive(kTurnBarrier + !second(), 256);
                if (i + 1 == TOKEN_TILES) {
                    load(records + (row_tile + 1 < ROW_TILES ? from + (row_tile + 1) * kCopied : base));
                    if (row_tile + 1 == ROW_TILES) {
                        release(used);
                        if (kChange) release_factors();
                    }
                }
                const auto value = [&](int j) {
                    return kInt8 ? static_cast<float>(static_cast<int>(dot[j])) : __uint_as_float(dot[j]);
                };
#pragma unroll
                for (int j = 0; j < kResults; ++j)
                    a[j] = fmaf(j & 2 ? scale1 : scale0, value(j), a[j]);
                if (i + kFlight < TOKEN_TILES) {
                    wgmma_steps<kInt8>(dot, fragment, activation_descriptor(from + (i + kFlight) * (TOKENS * 128)));
                    wgmma_commit();
                }
            }
        }
    }

    // acc -= the zero points' part of a group of blocks, as a product over blocks.
    __device__ __forceinline__ void subtract_zeros(float (&acc)[kSets][kResults]) {
        mbarrier_wait(ring + kTermsFullAt, products & 1);
        ++products;
        const unsigned tile = __shfl_sync(0xffffffffu, ring + kTermsAt, 0);
        const unsigned zeros = ring + kZerosAt + (records - kCodesBytes) / kCopied * kZeroBytes + thread * 16;
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            uint4 a[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = load_shared_16(zeros + i * kZeroBytes + j * 2048);
#pragma unroll
            for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[j].x), "+r"(a[j].y), "+r"(a[j].z), "+r"(a[j].w));
            constexpr int kFlight = TOKEN_TILES > 1 && TOKENS <= 64 ? 2 : 1;
            float sums[kFlight][kResults];  // not acc: the compiler orders all arithmetic on what wgmma has written
#pragma unroll
            for (int t = 0; t < kFlight; ++t) zero_product(sums[t], a, tile + t * (TOKENS * 128));
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t) {
                auto& sum = sums[t % kFlight];
                if (kFlight > 1 && t + 1 < TOKEN_TILES) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                else asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int j = 0; j < kResults; ++j) {
                    asm volatile("" : "+f"(sum[j])::"memory");
                    acc[i * TOKEN_TILES + t][j] += sum[j];
                }
                if (t + kFlight < TOKEN_TILES) zero_product(sum, a, tile + (t + kFlight) * (TOKENS * 128));
            }
        }
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(ring + kTermsEmptyAt);
    }
    static __device__ __forceinline__ void zero_product(float (&sum)[kResults], const uint4 (&a)[4], unsigned tokens) {
        const unsigned long long b = activation_descriptor(tokens);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wgmma_k16_bf16(sum, a[2 * half], b + 4 * half, half);   // high * high
            wgmma_k16_bf16(sum, a[2 * half], b + 4 * half + 2, 1);  // high * low
            wgmma_k16_bf16(sum, a[2 * half + 1], b + 4 * half, 1);  // low * high
        }
        wgmma_commit();
    }

    // Blocks first .. last - 1 of one group of 32; `fresh`: they begin a segment.
    __device__ __forceinline__ void run(
        float (&acc)[kSets][kResults], const unsigned* int8_mask, int first, int last, bool fresh) {
        unsigned mask = int8_mask[first >> 5];
        unsigned changes = unit_changes(mask) >> (first & 31) | fresh;
        mask >>= first & 31;
        for (int left = last - first; left > 0;) {
            int done = 1;
            if (mask & 1) {
                block<true, true>(acc);
            } else if ((mask & 15) == 0 && (last - left & 3) == 0 && left >= 4) {  // a whole quad, without branches
                block<false, true>(acc);
#if BATCH == 4
#pragma unroll
#else
#pragma unroll 1
#endif
                for (int i = 1; i < 4; ++i) block<false, false>(acc);
                done = 4;
            } else if (changes & 1) {
                block<false, true>(acc);
            } else {
                block<false, false>(acc);
            }
            mask >>= done;
            changes >>= done;
            left -= done;
        }
    }
};

// Partial sums of a tile that several clusters share: f32 in the workspace, a flag for each warpgroup. (One float an
// access: aligning more of them in registers costs spills.)
struct QuadExchange {
    static constexpr int kFloats = kSets * kResults;  // of a thread
    float* partials;  // [cluster, cta, warpgroup, kFloats, 128]
    unsigned* flags;  // [cluster, cta, warpgroup]: 1 when the partial sum is there; taken back to 0 by its reader
    unsigned rank;
    int group, thread;

    __device__ __forceinline__ long long slot(int cluster) const {
        return (static_cast<long long>(cluster) * CLUSTER + rank) * ROW_WGS + group;
    }
    __device__ __forceinline__ float* place(int cluster) const {
        return partials + slot(cluster) * (kFloats * 128) + thread;
    }

    __device__ __forceinline__ void give(const float (&acc)[kSets][kResults], int cluster) const {
        float* to = place(cluster);
#pragma unroll
        for (int i = 0; i < kFloats; ++i) to[i * 128] = acc[i / kResults][i % kResults];
        named_sync(kGroupBarrier + group, 128);
        if (thread == 0) store_release(flags + slot(cluster), 1);
    }

    // Add the partial sums of clusters first .. last, in this order; flags are polled side by side.
    __device__ __forceinline__ void take(float (&acc)[kSets][kResults], int first, int last) const {
        constexpr int kAtOnce = kFloats < 32 ? kFloats : 32;
        for (int other = first + thread; other <= last; other += 128) {
            while (load_acquire(flags + slot(other)) == 0) {
            }
            flags[slot(other)] = 0;
        }
        named_sync(kGroupBarrier + group, 128);
        for (int other = first; other <= last; ++other) {
            const float* from = place(other);
#pragma unroll
            for (int start = 0; start < kFloats; start += kAtOnce) {
                float parts[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) parts[i] = load_l2(from + (start + i) * 128);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) acc[(start + i) / kResults][(start + i) % kResults] += parts[i];
            }
        }
    }
};

}  // namespace comet
