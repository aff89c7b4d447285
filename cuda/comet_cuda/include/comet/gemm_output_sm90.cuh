// Results of the sm_90a GEMMs: stores to y, and partial sums exchanged between clusters. Included after the sizes.
#pragma once

#include "comet/pipeline.cuh"

namespace comet {

__device__ __forceinline__ unsigned pack_two(float low, float high) {
    unsigned packed;
#if OUT == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ unsigned transpose_8x8(unsigned fragment) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
    return result;
}

// The results of a warpgroup, 64 rows of some atoms of 8 tokens, four a thread and atom -> y [tokens, rows]. A 16-bit transpose in registers gives each thread four
// consecutive rows of one token: 8 bytes, 32 a quad.
template <int kSums>
__device__ __forceinline__ void store(
    float (&acc)[kSums], const Operands& operands, int row_tile, int first_token, int thread) {
    const int tokens = operands.tokens, rows = operands.rows;
    const float* bias = operands.bias;
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int row16 = row_tile * 64 + (thread >> 5) * 16;
    const int row0 = row16 + 4 * (g >> 1) + (g & 1), row1 = row0 + 2;  // rows of fragment rows g and g + 8
    float bias0 = 0, bias1 = 0;
    if (bias != nullptr) {
        bias0 = row0 < rows ? bias[row0] : 0.0f;
        bias1 = row1 < rows ? bias[row1] : 0.0f;
    }
#if OUT == 2
    float* y = static_cast<float*>(operands.out);
#pragma unroll
    for (int atom = 0; atom < kSums / 4; ++atom)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + atom * 8 + 2 * t + (i & 1), row = i < 2 ? row0 : row1;
            if (token < tokens && row < rows)
                y[static_cast<long long>(token) * rows + row] = acc[4 * atom + i] + (i < 2 ? bias0 : bias1);
        }
#else
    unsigned short* y = static_cast<unsigned short*>(operands.out);
    const int row = row16 + 4 * t;
    const bool whole = row + 4 <= rows && (rows & 3) == 0;
#pragma unroll
    for (int atom = 0; atom < kSums / 4; ++atom) {
        const float* a = acc + 4 * atom;
        const unsigned low = transpose_8x8(pack_two(a[0] + bias0, a[1] + bias0));
        const unsigned high = transpose_8x8(pack_two(a[2] + bias1, a[3] + bias1));
        const int token = first_token + atom * 8 + g;
        unsigned short* to = y + static_cast<long long>(token) * rows + row;
        if (token < tokens) {
            if (whole) {
                *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
            } else {
                if (row < rows) to[0] = low & 0xffff;
                if (row + 1 < rows) to[1] = low >> 16;
                if (row + 2 < rows) to[2] = high & 0xffff;
                if (row + 3 < rows) to[3] = high >> 16;
            }
        }
    }
#endif
}

#ifdef ROW_TILES
// Partial sums of a tile that several clusters share: f32 in the workspace, a flag for each warpgroup.
struct Exchange {
    static constexpr int kVectors = ROW_TILES * kResults / 4;
    float4* partials;  // [cluster, cta, warpgroup, kVectors, 128]
    unsigned* flags;   // [cluster, cta, warpgroup]: 1 when the partial sum is there; taken back to 0 by its reader
    unsigned rank;
    int group, thread;

    __device__ __forceinline__ long long slot(int cluster) const {
        return (static_cast<long long>(cluster) * CLUSTER + rank) * ROW_WGS + group;
    }

    __device__ __forceinline__ float4* place(int cluster) const {
        return partials + slot(cluster) * (kVectors * 128) + thread;
    }

    __device__ __forceinline__ void give(const float (&acc)[ROW_TILES][kResults], int cluster) const {
        float4* to = place(cluster);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const float* a = &acc[i / (kResults / 4)][4 * i % kResults];
            to[i * 128] = make_float4(a[0], a[1], a[2], a[3]);
        }
        named_sync(kGroupBarrier + group, 128);
        if (thread == 0) store_release(flags + slot(cluster), 1);
    }

    // Add the partial sums of clusters first .. last, in this order. Their flags are polled side by side, and the loads
    // of several partial sums are under way at once, because each costs a round trip to L2.
    __device__ __forceinline__ void take(float (&acc)[ROW_TILES][kResults], int first, int last) const {
        constexpr int kAtOnce = kVectors >= 8 ? 1 : kVectors >= 2 ? 2 : 4;
        for (int other = first + thread; other <= last; other += 128) {
            while (load_acquire(flags + slot(other)) == 0) {
            }
            flags[slot(other)] = 0;
        }
        named_sync(kGroupBarrier + group, 128);
        for (int other = first; other <= last; other += kAtOnce) {
            float4 parts[kAtOnce][kVectors];
#pragma unroll
            for (int i = 0; i < kAtOnce * kVectors; ++i) {
                const int from = other + i / kVectors;
                parts[i / kVectors][i % kVectors] =
                    from <= last ? load_l2(place(from) + i % kVectors * 128) : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce * kVectors; ++i) {
                const float4 part = parts[i / kVectors][i % kVectors];
                float* a = &acc[i % kVectors / (kResults / 4)][4 * (i % kVectors) % kResults];
                a[0] += part.x;
                a[1] += part.y;
                a[2] += part.z;
                a[3] += part.w;
            }
        }
    }
};
#endif

}  // namespace comet
