// The producers of the sm_90a GEMM for integer scales: tiles of weights and activations into a ring of stages.
//
// A stage is full when both have brought theirs, empty when all consumer warps have read it.
#pragma once

#include "comet/gemm_integer.cuh"
#include "comet/pipeline.cuh"

namespace comet {

// The ring of stages, as one thread or warpgroup walks it.
struct Place {
    unsigned ring;
    int stage;
    unsigned parity;
    __device__ __forceinline__ Place(unsigned ring, unsigned parity) : ring(ring), stage(0), parity(parity) {}
    __device__ __forceinline__ unsigned at() const { return ring + stage * kStageBytes; }
    __device__ __forceinline__ unsigned full() const { return ring + kFullAt + 8 * stage; }
    __device__ __forceinline__ unsigned empty() const { return ring + kEmptyAt + 8 * stage; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Two producers. The weights' one, a thread, does not wait for the previous kernel, on which weights do not depend.
__device__ __forceinline__ void produce_weights(const Operands& operands, Place place, int cta, int ctas) {
    const Schedule& schedule = operands.schedule;
    const unsigned long long policy = l2_evict_first();
    const long long row_bytes = static_cast<long long>(schedule.blocks) * kRecord;
    Segment segment;
    for (Worker worker(schedule, cta, ctas); worker.next(segment);) {
        int row_group, token_tile;
        tile_place(schedule, segment.tile, row_group, token_tile);
        const int first = row_group * ROW_WGS, count = min(ROW_WGS, operands.row_tiles - first);
        const unsigned char* from = operands.weight + first * row_bytes + static_cast<long long>(segment.first) * kRecord;
        for (int block = segment.first; block < segment.last; ++block) {
            mbarrier_wait(place.empty(), place.parity);
            mbarrier_expect(place.full(), count * kRecord);
#pragma unroll
            for (int group = 0; group < ROW_WGS; ++group)
                if (group < count)
                    bulk_copy(place.at() + kRecordsAt + group * kRecord, from + group * row_bytes, kRecord, place.full(), policy);
            from += kRecord;
            place.advance();
        }
    }
}

// Activations of a tile from a block on.
struct Activations {
    const unsigned char *codes, *multiples;
    int atoms;
    __device__ __forceinline__ Activations(const Operands& operands, int tile, int block) {
        int row_group, token_tile;
        tile_place(operands.schedule, tile, row_group, token_tile);
        const long long at = static_cast<long long>(block) * operands.atoms + token_tile * kTileAtoms;
        codes = operands.codes + at * 1024;
        multiples = operands.multiples + at * 32;
        atoms = min(kTileAtoms, operands.atoms - token_tile * kTileAtoms);
    }
    // One block to a stage; goes on to the next block.
    __device__ __forceinline__ void copy(const Operands& operands, const Place& to, bool eight, unsigned long long policy) {
        mbarrier_expect(to.full(), atoms * (eight ? 1024 + 32 : 1024));
        bulk_copy(to.at(), codes, atoms * 1024, to.full(), policy);
        if (eight) bulk_copy(to.at() + kCodesBytes, multiples, atoms * 32, to.full(), policy);
        codes += operands.atoms * 1024;
        multiples += operands.atoms * 32;
    }
};

// A warp: its lanes fill the stages for the first time side by side, since all of a GEMM of few tokens waits for that; one
// goes on.
__device__ __forceinline__ void produce_activations(const Operands& operands, unsigned ring, int lane, int cta, int ctas) {
    static_assert(STAGES <= 32, "a lane each");
    const Schedule& schedule = operands.schedule;
    const unsigned long long policy = l2_evict_last();
    Segment segment;
    wait_for_previous();
    if (lane < STAGES) {
        int before = lane;  // blocks
        for (Worker worker(schedule, cta, ctas); worker.next(segment); before -= segment.last - segment.first) {
            const int block = segment.first + before;
            if (block >= segment.last) continue;
            Place stage(ring, 0);
            stage.stage = lane;
            Activations(operands, segment.tile, block).copy(operands, stage, block < operands.int8_blocks, policy);
            break;
        }
    }
    if (lane > 0) return;
    Place place(ring, 0);  // stages have been filled once
    int filled = STAGES;
    for (Worker worker(schedule, cta, ctas); worker.next(segment);) {
        const int first = min(segment.first + filled, segment.last);
        filled -= first - segment.first;
        Activations from(operands, segment.tile, first);
        for (int block = first; block < segment.last; ++block) {
            mbarrier_wait(place.empty(), place.parity);
            from.copy(operands, place, block < operands.int8_blocks, policy);
            place.advance();
        }
    }
}

}  // namespace comet
