// Units of the sm_90a GEMM: when they change, their ratios, and the zero points' tokens' part.
//
// A block's unit is its scale of a token. Where scales are shared, a quad is four consecutive blocks whose INT4 blocks have
// one scale a token (weight_layout.py); each INT8 block has its own. Consumers keep their sums in the unit of the block
// that they promoted last; what they multiply them by when it changes, the factors, is made here by warps of the producer
// warpgroup from what each stage brings.
#pragma once

#include "comet/gemm_producers_sm90.cuh"
#include "comet/gemm_sm90.cuh"
#include "comet/pipeline.cuh"

namespace comet {

constexpr float kLeastUnit = 0x1p-100f;  // smaller units count as this, so that factors stay finite
constexpr int kUnitWarps = kTileTokens > 32 ? 2 : 1;
constexpr int kFactorSlots = 4;                        // FACTOR_SLOTS in tiles_sm90.py
constexpr int kFactorBytes = kTileTokens * 4;
// Places in shared memory, from the start of the ring of stages; barriers come last.
constexpr unsigned kTermsAt = kStageBytes * STAGES, kFactorsAt = kTermsAt + kTermBytes;
constexpr unsigned kZerosAt = kFactorsAt + kFactorSlots * kFactorBytes;
constexpr unsigned kFullAt = kZerosAt + kRecords * kZeroBytes, kEmptyAt = kFullAt + 8 * STAGES;
constexpr unsigned kTermsFullAt = kEmptyAt + 8 * STAGES, kTermsEmptyAt = kTermsFullAt + 8;
constexpr unsigned kFactorsFullAt = kTermsEmptyAt + 8, kFactorsEmptyAt = kFactorsFullAt + 8 * kFactorSlots;
constexpr unsigned kSharedEnd = kFactorsEmptyAt + 8 * kFactorSlots;
static_assert(kUnitWarps <= 2, "two warps are free");
static_assert(kSharedEnd + 1024 <= 232448, "everything fits in shared memory");

// Factors: slots of TOKENS f32, in the order in which they are needed; written by two warps, read by all consumer warps.
// Slot and phase are the low bits of a count.
static_assert(kFactorSlots <= 8, "slot and phase are at most four bits");
struct FactorSlot {
    unsigned slot, parity;
    __device__ __forceinline__ explicit FactorSlot(unsigned count)
        : slot(count % kFactorSlots), parity(count / kFactorSlots & 1) {}
};

// Bit b: the unit changes before block b, of 32 blocks with this mask of INT8 ones. The first block of a segment changes
// it too.
__device__ __forceinline__ unsigned unit_changes(unsigned mask) {
    return SHARE == 1 ? 0xffffffffu : mask | mask << 1 | 0x11111111u;
}
constexpr unsigned kQuadChanges = SHARE == 1 ? 15 : 1;  // of a quad of INT4 blocks

// a / b, one step of Newton's from correct rounding; no call, unlike the operator.
__device__ __forceinline__ float divide(float a, float b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    const float quotient = a * inverse;
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// One or two warps: factors of a segment, and scale * sum of every token and block, in units of the group's last block,
// as the bf16 halves that `produce_terms` documents. Scales and sums come with the stages, but for that last block's. A
// lane has every 32nd or 64th token: 32 neighbours' halves fall into different banks, or four into one.
struct UnitProducer {
    static constexpr int kEach = (kTileTokens + 32 * kUnitWarps - 1) / (32 * kUnitWarps);  // tokens of a lane
    unsigned ring, first;            // the first stage; the lane's first token, in the tile
    unsigned made = 0;               // factors; bit 31: groups, modulo 2

    __device__ __forceinline__ unsigned token(int i) const { return first + 32 * kUnitWarps * i; }

    // A token's scale, or with kSum its sum, in a stage; 1 and 0 where there is no token or no block.
    template <int kSum>
    __device__ __forceinline__ float meta(int stage, int i, bool present) const {
        const unsigned at = ring + stage * kStageBytes + kCodesBytes + (first >> 1) * 16 + (first & 1) * 4;
        return present ? __uint_as_float(load_shared_4(at + i * (256 * kUnitWarps) + 8 * kSum)) : 1 - kSum;
    }

    // A token's factor, as `rescale` reads them: tokens 2t, 2t + 1 of two atoms side by side.
    __device__ __forceinline__ void put_factor(unsigned slot, int i, float value) const {
        const unsigned to = ring + kFactorsAt + slot * kFactorBytes + (first >> 4) * 64 + (first >> 1 & 3) * 16 +
                            (first >> 3 & 1) * 8 + (first & 1) * 4;
        if (token(i) < kTileTokens) store_shared_4(to + i * (128 * kUnitWarps), __float_as_uint(value));
    }
    __device__ __forceinline__ void factors_made() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(ring + kFactorsFullAt + 8 * FactorSlot(made).slot);
        ++made;
    }

    // A token's term of one block of a group.
    __device__ __forceinline__ void put_term(unsigned block, int i, float value) const {
        const unsigned row = (first & 7) * 16, at = (block & 16) * 4 + (block & 15) * 2;
        const unsigned to = ring + kTermsAt + (first >> 3) * 1024 + row * 8 + i * (4096 * kUnitWarps);
        unsigned high, low;
        split_halves(value, 0, high, low);
        if (token(i) < kTileTokens) {
            store_shared_2(to + (at ^ row), high);
            store_shared_2(to + ((at + 32) ^ row), low);
        }
    }

    __device__ __forceinline__ void run(const Operands& operands, int cluster, int clusters) {
        const Schedule& schedule = operands.schedule;
        Segment segment;
        int turn = 0;  // the stage, plus STAGES in odd phases
        wait_for_previous();
        for (int index = 0; find_segment(schedule, cluster, clusters, index, segment); ++index) {
            int row_group, token_tile;
            tile_place(schedule, segment.tile, row_group, token_tile);
            const unsigned tokens = min(kTileTokens, 8 * (operands.atoms - token_tile * kTileAtoms));  // with their padding
            float per_unit[kEach], unit[kEach] = {};  // the first factor meets sums of zero
            for (int start = segment.first & ~(kTermBlocks - 1); start < segment.last; start += kTermBlocks) {
                const int end = min(start + kTermBlocks, segment.last);
                unsigned valid = 0xffffffffu >> (start + kTermBlocks - end);
                unsigned changes = unit_changes(operands.int8_mask[start / kTermBlocks]);
                if (start < segment.first) {
                    valid &= 0xffffffffu << (segment.first - start);
                    changes |= 1u << (segment.first - start);
                }
                changes &= valid;
                const unsigned char* last = operands.meta + (first >> 1) * 16 + (first & 1) * 4 +
                    (static_cast<long long>(end - 1) * operands.atoms + token_tile * kTileAtoms) * 64;
#pragma unroll
                for (int i = 0; i < kEach; ++i) {
                    const auto at = reinterpret_cast<const float*>(last + i * (256 * kUnitWarps));
                    per_unit[i] = divide(1, fmaxf(token(i) < tokens ? load_l2(at) : 1, kLeastUnit));
                }
                for (unsigned block = 0; block < kTermBlocks; ++block) {
                    const bool here = valid >> block & 1;
                    const int stage = turn >= STAGES ? turn - STAGES : turn;
                    if (here) mbarrier_wait(ring + kFullAt + 8 * stage, turn >= STAGES);
                    if (changes >> block & 1) {
                        const FactorSlot at(made);
                        mbarrier_wait(ring + kFactorsEmptyAt + 8 * at.slot, at.parity ^ 1);
#pragma unroll
                        for (int i = 0; i < kEach; ++i) {
                            const float next = fmaxf(meta<0>(stage, i, here && token(i) < tokens), kLeastUnit);
                            put_factor(at.slot, i, divide(unit[i], next));
                            unit[i] = next;
                        }
                        factors_made();
                    }
                    if (block == 0) mbarrier_wait(ring + kTermsEmptyAt, ~made >> 31);
#pragma unroll
                    for (int i = 0; i < kEach; ++i) {
                        const bool present = here && token(i) < tokens;
                        put_term(block, i, meta<0>(stage, i, present) * meta<1>(stage, i, present) * per_unit[i]);
                    }
                    if (here) {
                        __syncwarp();
                        if ((threadIdx.x & 31) == 0) mbarrier_arrive(ring + kEmptyAt + 8 * stage);
                        turn = turn + 1 == 2 * STAGES ? 0 : turn + 1;
                    }
                }
                fence_proxy_async();
                __syncwarp();
                if ((threadIdx.x & 31) == 0) mbarrier_arrive(ring + kTermsFullAt);
                made ^= 1u << 31;
            }
            const FactorSlot at(made);
            mbarrier_wait(ring + kFactorsEmptyAt + 8 * at.slot, at.parity ^ 1);
#pragma unroll
            for (int i = 0; i < kEach; ++i) put_factor(at.slot, i, unit[i]);
            factors_made();
        }
    }
};

}  // namespace comet
