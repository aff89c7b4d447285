// Producer threads of the sm_90a GEMM: weights, activations, and the activations' part of the zero-point product.
#pragma once

#include "comet/gemm_sm90.cuh"
#include "comet/pipeline.cuh"

namespace comet {

// The ring of stages, as a producer walks it: wait until a stage is free, announce bytes, copy, go on.
struct Ring {
    unsigned base, full, empty;
    int stage, parity;

    __device__ __forceinline__ void acquire(unsigned bytes) const {
        mbarrier_wait(empty + 8 * stage, parity);
        mbarrier_expect(full + 8 * stage, bytes);
    }
    __device__ __forceinline__ unsigned at() const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Two producer threads, in two warps, so that each has little to do a stage. The weights' one never waits for the
// previous kernel, on which weights do not depend: the first stages are under way before that one has ended.
__device__ __forceinline__ void produce_weights(
    const Operands& operands, Ring ring, unsigned rank, int cluster, int clusters) {
    const Schedule& schedule = operands.schedule;
    const unsigned long long policy = l2_evict_first();
    const long long group_bytes = static_cast<long long>(schedule.blocks) * kRecord;
    Segment segment;
    for (Worker worker(schedule, cluster, clusters); worker.next(segment);) {
        int row_group, token_tile;
        tile_place(schedule, segment.tile, row_group, token_tile);
        const int first = (row_group * CLUSTER + rank) * kRecords;
        const int groups = max(0, min(kRecords, operands.row_tiles - first));
        const unsigned char* from = operands.weight + first * group_bytes + segment.first * kRecord;
        for (int count = segment.last - segment.first; count > 0; --count) {
            ring.acquire(groups * kRecord);
            const unsigned to = ring.at() + kCodesBytes + kMetaBytes;
#pragma unroll
            for (int group = 0; group < kRecords; ++group)
                if (group < groups)
                    bulk_copy(to + group * kRecord, from + group * group_bytes, kRecord, ring.barrier(), policy);
            from += kRecord;
            ring.advance();
        }
    }
}

__device__ __forceinline__ void produce_activations(
    const Operands& operands, Ring ring, unsigned rank, int cluster, int clusters) {
    const Schedule& schedule = operands.schedule;
    const unsigned long long policy = l2_evict_last();
    const unsigned short everyone = (1u << CLUSTER) - 1;
    const int skipped = rank * kAtomShare;  // atoms of the tile that ctas before this one load
    Segment segment;
    wait_for_previous();
    for (Worker worker(schedule, cluster, clusters); worker.next(segment);) {
        int row_group, token_tile;
        tile_place(schedule, segment.tile, row_group, token_tile);
        const int atoms = min(kAtoms, operands.atoms - token_tile * kAtoms);
        const int mine = max(0, min(min(kAtomShare, kAtoms - skipped), atoms - skipped));
        const long long at = static_cast<long long>(segment.first) * operands.atoms + token_tile * kAtoms + skipped;
        const unsigned char* codes = operands.codes + at * 1024;
        const unsigned char* meta = operands.meta + at * 64;
        for (int count = segment.last - segment.first; count > 0; --count) {
            ring.acquire(atoms * (1024 + 64));
            const unsigned to = ring.at() + skipped * 1024, meta_to = ring.at() + kCodesBytes + skipped * 64;
            if (!kCluster) {
                bulk_copy(to, codes, mine * 1024, ring.barrier(), policy);
                bulk_copy(meta_to, meta, mine * 64, ring.barrier(), policy);
            } else if (mine > 0) {
                bulk_copy_multicast(to, codes, mine * 1024, ring.barrier(), everyone, policy);
                bulk_copy_multicast(meta_to, meta, mine * 64, ring.barrier(), everyone, policy);
            }
            codes += operands.atoms * 1024;
            meta += operands.atoms * 64;
            ring.advance();
        }
    }
}

__device__ __forceinline__ void split_halves(float a, float b, unsigned& high, unsigned& low) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(b), "f"(a));
    a -= __uint_as_float(high << 16);
    b -= __uint_as_float(high & 0xffff0000u);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(b), "f"(a));
}

// One warp: sx * sum of every token and block of a segment, in bf16 halves, as wgmma's B operand. A token's row of 128
// bytes holds the high halves of 16 blocks, their low halves, then the same for the next 16; blocks outside are zero.
__device__ __forceinline__ void produce_terms(
    const Operands& operands, unsigned terms, unsigned full, unsigned empty, int lane,
    int cluster, int clusters) {
    const Schedule& schedule = operands.schedule;
    constexpr int kPairs = TOKENS / 2, kUnits = kPairs * kTermBlocks / 4;  // a unit: two tokens, four blocks
    Segment segment;
    int buffer = 0, parity = 1;
    wait_for_previous();
    for (Worker worker(schedule, cluster, clusters); worker.next(segment);) {
        int row_group, token_tile;
        tile_place(schedule, segment.tile, row_group, token_tile);
        const int atoms = min(kAtoms, operands.atoms - token_tile * kAtoms);
        for (int start = segment.first & ~(kTermBlocks - 1); start < segment.last; start += kTermBlocks) {
            mbarrier_wait(empty + 8 * buffer, parity);
            for (int unit = lane; unit < kUnits; unit += 32) {
                const int pair = unit % kPairs, quad = unit / kPairs, atom = pair >> 2, block = start + 4 * quad;
                const unsigned char* from =
                    operands.meta + (static_cast<long long>(block) * operands.atoms + token_tile * kAtoms) * 64 + pair * 16;
                float even[4], odd[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float4 m = make_float4(0, 0, 0, 0);
                    if (atom < atoms && block + i >= segment.first && block + i < segment.last)
                        m = load_l2(reinterpret_cast<const float4*>(from + static_cast<long long>(i) * operands.atoms * 64));
                    even[i] = m.x * m.z;
                    odd[i] = m.y * m.w;
                }
                const int at = (quad >> 2) * 64 + (quad & 3) * 8;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float* v = e ? odd : even;
                    unsigned high[2], low[2];
                    split_halves(v[0], v[1], high[0], low[0]);
                    split_halves(v[2], v[3], high[1], low[1]);
                    const int row = 2 * (pair & 3) + e;
                    const unsigned base = terms + buffer * kTermBytes + atom * 1024 + row * 128;
                    store_shared_8(base + ((at ^ (row * 16)) & 127), high[0], high[1]);
                    store_shared_8(base + (((at + 32) ^ (row * 16)) & 127), low[0], low[1]);
                }
            }
            fence_proxy_async();
            mbarrier_arrive(full + 8 * buffer);
            buffer ^= 1;
            parity ^= buffer == 0;
        }
    }
}

}  // namespace comet
