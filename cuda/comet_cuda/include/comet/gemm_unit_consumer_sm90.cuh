// A consumer warpgroup of the sm_90a GEMM whose sums stand in units: one multiply-add a result promotes a block.
//
// Sums stand in the unit of the block that was promoted last (gemm_units_sm90.cuh), so acc += sw * dot, with the two row
// scales sw in registers. When the unit changes the sums are multiplied by a factor while a product is under way, and
// after the last block by the unit itself. The zero points' part is a product over 32 blocks.
//
// kStream blocks at a time are one stream of products, FLIGHT of them under way at any moment, across blocks too: the next
// block's nibbles are loaded while this one is multiplied. Between streams nothing is under way (ptxas serializes wgmma
// that cross a branch). Tiles whose sums leave no registers for a second fragment have streams of one block. The last look
// ahead meets an empty stage, with which the producers close.
#pragma once

#include "comet/convert_i4.cuh"
#include "comet/gemm_sm90.cuh"
#include "comet/gemm_units_sm90.cuh"
#include "comet/pipeline.cuh"
#include "comet/wgmma.cuh"

namespace comet {

constexpr int kStream = kTileTokens <= 128 ? 4 : 1;      // blocks of a stream, all INT4
constexpr int kInt8Stream = kTileTokens <= 128 ? 2 : 1;  // or all INT8, which take more registers
constexpr int kSets = TOKEN_TILES;  // products a block, each with its results
static_assert(kAtoms % 2 == 0, "factors of two atoms are loaded together");
static_assert(ROW_TILES == 1 && CLUSTER == 1 && TOKEN_TILES >= FLIGHT, "a warpgroup has one row tile");

// One consumer warpgroup. Registers are scarce: sums and two products take 192 of them for 256 tokens.
struct UnitConsumer {
    unsigned ring, records;     // the first stage; the warpgroup's record, in a stage
    int thread;
    unsigned current, ahead;    // the stage of the next block, and the one after it,
    int turn;                   // whose number this is, plus STAGES in odd phases
    bool arrived, made;         // that stage; the next factors
    unsigned taken;             // factors; bit 31: products over blocks, modulo 2
    unsigned fragment[4][4];    // of the next block
    unsigned scales;            // of its rows, two bf16

    __device__ __forceinline__ UnitConsumer(unsigned ring, unsigned records, int thread)
        : ring(ring), records(records), thread(thread), current(ring), turn(0), taken(0) {
        mbarrier_wait(ring + kFullAt, 0);
        load(fragment, current);
        look_ahead();
    }

    // The nibbles of a stage, and its scales.
    __device__ __forceinline__ void load(unsigned (&a)[4][4], unsigned base) {
        const unsigned at = base + records + thread * 16;
        const uint4 first = load_shared_16(at), second = load_shared_16(at + 2048);
        scales = load_shared_4(base + records + kNibbleBytes + (thread >> 2) * 4);
        expand_fragment(first, second, a);
        pin(a);
    }

    // Turn to the next stage, and ask whether it has arrived: long before it is needed, since the answer takes a while.
    __device__ __forceinline__ void look_ahead() {
        turn = turn + 1 == 2 * STAGES ? 0 : turn + 1;
        const int stage = turn >= STAGES ? turn - STAGES : turn;
        // From lane 0, so that the compiler knows it to be uniform and computes descriptors once a warp.
        ahead = __shfl_sync(0xffffffffu, ring + stage * kStageBytes, 0);
        arrived = mbarrier_test(ring + kFullAt + 8 * stage, turn >= STAGES);
    }
    __device__ __forceinline__ void await_stage() const {
        if (!arrived) mbarrier_wait(ring + kFullAt + 8 * (turn >= STAGES ? turn - STAGES : turn), turn >= STAGES);
    }

    // Give the stage before this one back.
    __device__ __forceinline__ void release() const {
        const int stage = turn >= STAGES ? turn - STAGES : turn;
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(ring + kEmptyAt + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    }

    __device__ __forceinline__ void ask_for_factors() {
        const FactorSlot at(taken);
        made = mbarrier_test(ring + kFactorsFullAt + 8 * at.slot, at.parity);
    }
    __device__ __forceinline__ void await_factors() const {
        const FactorSlot at(taken);
        if (!made) mbarrier_wait(ring + kFactorsFullAt + 8 * at.slot, at.parity);
    }

    // One set of sums times its tokens' next factors, in place. One load serves two atoms.
    __device__ __forceinline__ void rescale(float (&acc)[kResults], int token_tile) const {
        const unsigned at = ring + kFactorsAt + FactorSlot(taken).slot * kFactorBytes + (thread & 3) * 16;
#pragma unroll
        for (int atom = 0; atom < kAtoms; atom += 2) {
            if (kSets * kResults > 96) __syncwarp();  // bounds what the compiler loads ahead
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
        if ((thread & 31) == 0) mbarrier_arrive(ring + kFactorsEmptyAt + 8 * FactorSlot(taken).slot);
        ++taken;
    }
    // All sums.
    __device__ __forceinline__ void rescale(float (&acc)[kSets][kResults]) {
        made = false;
        await_factors();
#pragma unroll
        for (int i = 0; i < kSets; ++i) rescale(acc[i], i);
        release_factors();
    }

    // kCount blocks; bit b of kChanges: the unit changes before block b. Step s promotes product s, of the block's
    // token tile s % kSets, while the next ones are under way, then starts product s + FLIGHT.
    template <bool kInt8, unsigned kChanges, int kCount>
    __device__ __forceinline__ void stream(float (&acc)[kSets][kResults]) {
        static_assert(kCount == 1 || kCount % 2 == 0, "blocks take the two fragments in turns and end with the first");
        constexpr int kSteps = kCount * kSets;
        unsigned dots[FLIGHT][kResults], other[4][4];
        float scale0 = 0, scale1 = 0;
        unsigned tiles = current, next_tiles = 0;  // of this block and of the next one
        const auto start = [&](int step, const unsigned (&a)[4][4], unsigned from) {
            wgmma_steps<kInt8>(dots[step % FLIGHT], a, activation_descriptor(from + step % kSets * (TOKENS * 128)));
            wgmma_commit();
        };
        if (kChanges & 1) ask_for_factors();
        pin(fragment);
#pragma unroll
        for (int step = 0; step < FLIGHT; ++step) start(step, fragment, tiles);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int block = step / kSets, tile = step % kSets;
            auto& dot = dots[step % FLIGHT];
            if (kChanges >> block & 1) {
                if (tile == 0) await_factors();
                __syncwarp();  // or the compiler moves multiplications in between the wgmma
                rescale(acc[tile], tile);
                if (tile == kSets - 1) release_factors();
            }
            if (kSteps - step > FLIGHT - 1) wgmma_wait<FLIGHT - 1>(dot);
            else wgmma_wait<0>(dot);
            if (tile == 0) {
                scale0 = __uint_as_float(scales << 16);
                scale1 = __uint_as_float(scales & 0xffff0000u);
            }
            if (tile == (kCount > 1 ? 0 : kSets - 1)) {
                await_stage();
                next_tiles = ahead;
                load(block % 2 || kCount == 1 ? fragment : other, next_tiles);
            }
            if (tile == kSets - 1) {
                release();
                look_ahead();
                if (kChanges >> block + 1 & 1) ask_for_factors();
            }
#pragma unroll
            for (int j = 0; j < kResults; ++j) {
                const float scale = j & 2 ? scale1 : scale0;
                const float value = kInt8 ? static_cast<float>(static_cast<int>(dot[j])) : __uint_as_float(dot[j]);
                acc[tile][j] = fmaf(scale, value, acc[tile][j]);
            }
            const int to = step + FLIGHT;
            if (to < kSteps) start(to, to / kSets % 2 ? other : fragment, to / kSets > block ? next_tiles : tiles);
            if (tile == kSets - 1) tiles = next_tiles;
        }
        current = tiles;
    }

    // acc -= the zero points' part of a group of blocks, as a product over blocks.
    __device__ __forceinline__ void subtract_zeros(float (&acc)[kSets][kResults]) {
        mbarrier_wait(ring + kTermsFullAt, taken >> 31);
        taken ^= 1u << 31;
        const unsigned tile = __shfl_sync(0xffffffffu, ring + kTermsAt, 0);
        unsigned place;  // read again, rather than kept in a register
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(place));
        const unsigned zeros = ring + kZerosAt + place / 128 * kZeroBytes + place % 128 * 16;
        uint4 a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = load_shared_16(zeros + j * 2048);
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[j].x), "+r"(a[j].y), "+r"(a[j].z), "+r"(a[j].w));
        float sums[2][kResults];  // not acc: the compiler orders all arithmetic on what wgmma has written
#pragma unroll
        for (int t = 0; t < 2; ++t) zero_product(sums[t], a, tile + t * (TOKENS * 128));
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
            auto& sum = sums[t % 2];
            if (t + 1 < TOKEN_TILES) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            else asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int j = 0; j < kResults; ++j) {
                asm volatile("" : "+f"(sum[j])::"memory");
                acc[t][j] += sum[j];
            }
            if (t + 2 < TOKEN_TILES) zero_product(sum, a, tile + (t + 2) * (TOKENS * 128));
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
            constexpr unsigned kInt8 = (1u << kInt8Stream) - 1;
            if (kStream > 1 && (last - left & 3) == 0 && left >= kStream && (mask & 15) == 0) {
                stream<false, kQuadChanges, kStream>(acc);
                done = kStream;
            } else if (kInt8Stream > 1 && left >= kInt8Stream && (mask & kInt8) == kInt8) {
                stream<true, kInt8, kInt8Stream>(acc);
                done = kInt8Stream;
            } else if (mask & 1) {
                stream<true, 1, 1>(acc);
            } else if (changes & 1) {
                stream<false, 1, 1>(acc);
            } else {
                stream<false, 0, 1>(acc);
            }
            mask >>= done;
            changes >>= done;
            left -= done;
        }
    }
};

// Partial sums of a tile that several clusters share: f32 in the workspace, a flag for each warpgroup. (One float an
// access: aligning more of them in registers costs spills.)
struct UnitExchange {
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
