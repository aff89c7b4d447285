// Units of the sm_90a GEMM with scales shared in quads: when they change, their ratios, and the zero points' tokens' part.
//
// A quad is four consecutive blocks; its INT4 blocks have one scale a token (weight_layout.py), the *unit* of sums. Each
// INT8 block has its own. Consumers keep their sums in the unit of the block that they promoted last; what they multiply
// them by when it changes, the factors, is made here by warps of the producer warpgroup, straight from global memory.
#pragma once

#include "comet/gemm_producers_sm90.cuh"
#include "comet/gemm_sm90.cuh"
#include "comet/pipeline.cuh"

namespace comet {

constexpr float kLeastUnit = 0x1p-100f;  // smaller units count as this, so that factors stay finite
constexpr int kUnitWarps = (kTileTokens + 127) / 128;  // a lane for four tokens
constexpr int kFactorSlots = 8;                        // FACTOR_SLOTS in tiles_sm90.py
constexpr int kFactorBytes = kTileTokens * 4;
// Places in shared memory, from the start of the ring of stages; barriers come last.
constexpr unsigned kTermsAt = kStageBytes * STAGES, kFactorsAt = kTermsAt + kTermBytes;
constexpr unsigned kZerosAt = kFactorsAt + kFactorSlots * kFactorBytes;
constexpr unsigned kPerUnitAt = kZerosAt + kRecords * kZeroBytes;
constexpr unsigned kFullAt = kPerUnitAt + kUnitWarps * 512, kEmptyAt = kFullAt + 8 * STAGES;
constexpr unsigned kTermsFullAt = kEmptyAt + 8 * STAGES, kTermsEmptyAt = kTermsFullAt + 8;
constexpr unsigned kFactorsFullAt = kTermsEmptyAt + 8, kFactorsEmptyAt = kFactorsFullAt + 8 * kFactorSlots;
constexpr unsigned kSharedEnd = kFactorsEmptyAt + 8 * kFactorSlots;
static_assert(kUnitWarps <= 2, "two warps are free");
static_assert(kSharedEnd + 1024 <= 232448, "everything fits in shared memory");

// Factors: slots of TOKENS f32, in the order in which they are needed; written by two warps, read by all consumer warps.
// Slot and phase are the low bits of a count.
static_assert(kFactorSlots == 8, "slot and phase are four bits");
struct FactorSlot {
    unsigned slot, parity;
    __device__ __forceinline__ explicit FactorSlot(unsigned count)
        : slot(count % kFactorSlots), parity(count / kFactorSlots & 1) {}
};

// Four tokens' factors from each lane.
__device__ __forceinline__ void push_factors(unsigned ring, unsigned count, float4 value, int lane) {
    const FactorSlot at(count);
    mbarrier_wait(ring + kFactorsEmptyAt + 8 * at.slot, at.parity ^ 1);
    if (lane < kTileTokens / 4) {  // as `rescale` reads: tokens 2t, 2t + 1 of two atoms side by side
        const unsigned to = ring + kFactorsAt + at.slot * kFactorBytes + (lane >> 2) * 64 + (lane & 1) * 32 + (lane & 2) * 4;
        store_shared_8(to, __float_as_uint(value.x), __float_as_uint(value.y));
        store_shared_8(to + 16, __float_as_uint(value.z), __float_as_uint(value.w));
    }
    __syncwarp();
    if ((lane & 31) == 0) mbarrier_arrive(ring + kFactorsFullAt + 8 * at.slot);
}

// Bit b: the unit changes before block b, of 32 blocks with this mask of INT8 ones. The first block of a segment changes
// it too.
__device__ __forceinline__ unsigned unit_changes(unsigned mask) { return mask | mask << 1 | 0x11111111u; }

// a / b, one step of Newton's from correct rounding; no call, unlike the operator.
__device__ __forceinline__ float divide(float a, float b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    const float quotient = a * inverse;
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

__device__ __forceinline__ float4 divide(float4 a, float4 b) {
    return make_float4(divide(a.x, b.x), divide(a.y, b.y), divide(a.z, b.z), divide(a.w, b.w));
}

// What a lane reads of a block: scales and sums of its four tokens.
struct TokenMeta {
    float4 even, odd;  // scale, scale, sum, sum of the first two tokens, and of the other two

    __device__ __forceinline__ void load(const unsigned char* at, bool present) {
        even = odd = make_float4(1, 1, 0, 0);
        if (!present) return;
        even = load_l2(reinterpret_cast<const float4*>(at));
        odd = load_l2(reinterpret_cast<const float4*>(at + 16));
    }
    __device__ __forceinline__ float4 unit() const {
        return make_float4(fmaxf(even.x, kLeastUnit), fmaxf(even.y, kLeastUnit), fmaxf(odd.x, kLeastUnit),
                           fmaxf(odd.y, kLeastUnit));
    }
    __device__ __forceinline__ float4 terms(float4 per_unit) const {
        return make_float4(even.x * even.z * per_unit.x, even.y * even.w * per_unit.y, odd.x * odd.z * per_unit.z,
                           odd.y * odd.w * per_unit.w);
    }
};

// One or two warps: factors of a segment, and scale * sum of every token and block, in units of the group's last block,
// as the bf16 halves that `produce_terms` documents.
__device__ __forceinline__ void produce_units(
    const Operands& operands, unsigned ring, int lane, int cluster, int clusters) {
    const Schedule& schedule = operands.schedule;
    Segment segment;
    unsigned pushed = 0;  // factors, modulo 16; from bit 4 on, groups, modulo 2; from bit 5 on, segments
    const auto push = [&](float4 value) {
        push_factors(ring, pushed & 15, value, lane);
        pushed = (pushed & ~15u) | (pushed + 1 & 15);
    };
    const unsigned per_unit = ring + kPerUnitAt + lane * 16;
    wait_for_previous();
    for (; find_segment(schedule, cluster, clusters, pushed >> 5, segment); pushed += 32) {
        int row_group, token_tile;
        tile_place(schedule, segment.tile, row_group, token_tile);
        const int atom = token_tile * kTileAtoms + (lane >> 1);
        const bool present = lane < kTileTokens / 4 && atom < operands.atoms;
        float4 unit = make_float4(0, 0, 0, 0);  // the first factor meets sums of zero
        for (int start = segment.first & ~(kTermBlocks - 1); start < segment.last; start += kTermBlocks) {
            const int end = min(start + kTermBlocks, segment.last);
            unsigned valid = 0xffffffffu >> (start + kTermBlocks - end);
            unsigned changes = unit_changes(operands.int8_mask[start / kTermBlocks]);
            if (start < segment.first) {
                valid &= 0xffffffffu << (segment.first - start);
                changes |= 1u << (segment.first - start);
            }
            changes &= valid;
            unsigned from = ((end - 1) * operands.atoms + atom) * 64 + (lane & 1) * 32;  // meta has less than 4 GB
            TokenMeta m;
            m.load(operands.meta + from, present);
            store_shared_f4(per_unit, divide(make_float4(1, 1, 1, 1), m.unit()));  // kept there for want of registers
            from -= (end - 1 - start) * operands.atoms * 64;
            for (unsigned block = 0; block < kTermBlocks; ++block) {
                m.load(operands.meta + from, present && (valid >> block & 1));
                from += operands.atoms * 64;
                if (changes >> block & 1) {
                    const float4 old = unit;
                    unit = m.unit();
                    push(divide(old, unit));
                }
                if (block == 0) mbarrier_wait(ring + kTermsEmptyAt, ~pushed >> 4 & 1);
                if (lane < kTileTokens / 4) {
                    const float4 v = m.terms(load_shared_f4(per_unit));
                    const float values[4] = {v.x, v.y, v.z, v.w};
                    const unsigned row = 4 * (lane & 1);  // of the swizzle atom: the lane's first token
                    const unsigned to = ring + kTermsAt + (lane >> 1) * 1024 + row * 128;
                    const unsigned at = (block & 16) * 4 + (block & 15) * 2;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        unsigned high, low;
                        split_halves(values[i], 0, high, low);
                        store_shared_2(to + i * 128 + (at ^ ((row + i) * 16)), high);
                        store_shared_2(to + i * 128 + ((at + 32) ^ ((row + i) * 16)), low);
                    }
                }
            }
            fence_proxy_async();
            __syncwarp();
            if ((lane & 31) == 0) mbarrier_arrive(ring + kTermsFullAt);
            pushed ^= 16;
        }
        push(unit);
    }
}

}  // namespace comet
