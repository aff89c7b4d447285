// w4ax_gemm for Hopper: Y^T = W X^T, 4-bit weights from registers, activations from shared memory, integer-exact.
//
// In: tiled operands (weight_layout.py). Out: y [tokens, rows]. One cta an SM (or two), persistent: one producer thread
// keeps a ring of stages full with bulk copies; each consumer warpgroup owns 64 weight rows, expands its nibbles into A
// fragments and runs one wgmma group a block of 128 channels: e4m3 where the activations are INT4, u8 x s8 where they are
// INT8. Both give the exact integer sum. While one warpgroup promotes its sums to float32 (times sx * sw, minus the zero
// point's share), the other one's wgmma keeps the tensor cores busy. There is no cta barrier in the main loop. A cluster
// of ctas shares the activations: each loads a part and multicasts it. See comet/tile_schedule.cuh for who does what.
//
// Compile-time: TOKENS (n), ROW_WGS (consumer warpgroups), CLUSTER (ctas), STAGES, CTAS_PER_SM, ZERO (0/1: zero points),
// OUT (0 bf16, 1 f16, 2 f32), CONSUMER_REGS, PRODUCER_REGS, ORDERED (0/1: warpgroups take turns at the tensor cores).
#include "comet/convert_i4.cuh"
#include "comet/pipeline.cuh"
#include "comet/tile_schedule.cuh"
#include "comet/wgmma.cuh"

using namespace comet;

constexpr int kAtoms = TOKENS / 8;
constexpr int kResults = TOKENS / 2;  // f32 a thread
constexpr int kNibbleBytes = 4096;
constexpr int kRecord = ZERO ? 4288 : 4224;  // weight_layout.record_bytes
constexpr int kCodesBytes = TOKENS * 128;
constexpr int kMetaBytes = TOKENS * 8;
constexpr int kStageBytes = (kCodesBytes + kMetaBytes + ROW_WGS * kRecord + 1023) / 1024 * 1024;
constexpr int kThreads = 128 * (ROW_WGS + 1);
constexpr int kAtomShare = (kAtoms + CLUSTER - 1) / CLUSTER;  // atoms that one cta of a cluster loads
constexpr bool kCluster = CLUSTER > 1;
constexpr float kE4m3Unit = 1.0f / 512;  // a zero-extended nibble read as e4m3 is code * 2^-9
constexpr int kMaskWords = 16;           // up to 512 blocks
constexpr int kTurnBarrier = 1;          // named barriers 1..ROW_WGS: turns; then one a warpgroup
constexpr int kGroupBarrier = 1 + ROW_WGS;
static_assert(kRecord % 16 == 0 && kStageBytes * STAGES + 1024 + 16 * STAGES <= 232448, "stages fit in shared memory");

struct Int8Mask {
    unsigned words[kMaskWords];  // bit b: block b holds INT8 activations
};

struct Operands {
    const unsigned char* weight;  // [row tiles, blocks, kRecord]
    const unsigned char* codes;   // [blocks, atoms, 1024]
    const unsigned char* meta;    // [blocks, atoms, 64]
    int tokens, rows, atoms, row_tiles;
};

// The producer: one thread. Weights do not depend on the previous kernel, so the first stages' weights are under way
// before that one has ended.
struct Producer {
    const Operands& operands;
    const Schedule& schedule;
    unsigned ring, full, empty, rank;
    unsigned long long weight_policy, activation_policy;

    __device__ __forceinline__ void weights(int tile, int block, int stage) const {
        int row_group, token_tile;
        tile_place(schedule, tile, row_group, token_tile);
        const int first = (row_group * CLUSTER + rank) * ROW_WGS;
        const int groups = max(0, min(ROW_WGS, operands.row_tiles - first));
        const int atoms = min(kAtoms, operands.atoms - token_tile * kAtoms);
        mbarrier_expect(full + 8 * stage, groups * kRecord + atoms * (1024 + 64));
        const unsigned to = ring + stage * kStageBytes + kCodesBytes + kMetaBytes;
        const unsigned char* from =
            operands.weight + (static_cast<long long>(first) * schedule.blocks + block) * kRecord;
        for (int group = 0; group < groups; ++group)
            bulk_copy(
                to + group * kRecord, from + static_cast<long long>(group) * schedule.blocks * kRecord, kRecord,
                full + 8 * stage, weight_policy);
    }

    __device__ __forceinline__ void activations(int tile, int block, int stage) const {
        int row_group, token_tile;
        tile_place(schedule, tile, row_group, token_tile);
        const int first = token_tile * kAtoms + rank * kAtomShare;
        const int count = min(min(kAtomShare, kAtoms - static_cast<int>(rank) * kAtomShare), operands.atoms - first);
        if (count <= 0) return;
        const long long at = static_cast<long long>(block) * operands.atoms + first;
        const unsigned to = ring + stage * kStageBytes + rank * kAtomShare * 1024;
        const unsigned meta_to = ring + stage * kStageBytes + kCodesBytes + rank * kAtomShare * 64;
        if (kCluster) {
            const unsigned short everyone = (1u << CLUSTER) - 1;
            bulk_copy_multicast(
                to, operands.codes + at * 1024, count * 1024, full + 8 * stage, everyone, activation_policy);
            bulk_copy_multicast(
                meta_to, operands.meta + at * 64, count * 64, full + 8 * stage, everyone, activation_policy);
        } else {
            bulk_copy(to, operands.codes + at * 1024, count * 1024, full + 8 * stage, activation_policy);
            bulk_copy(meta_to, operands.meta + at * 64, count * 64, full + 8 * stage, activation_policy);
        }
    }

    __device__ __forceinline__ void run(int cluster, int clusters) const {
        Segment segment;
        int ahead = 0;
        for (Worker worker(schedule, cluster, clusters); ahead < STAGES && worker.next(segment);)
            for (int block = segment.first; block < segment.last && ahead < STAGES; ++block, ++ahead)
                weights(segment.tile, block, ahead);
        wait_for_previous();
        int stage = 0, parity = 1;
        for (Worker worker(schedule, cluster, clusters); worker.next(segment);)
            for (int block = segment.first; block < segment.last; ++block) {
                if (ahead > 0) {
                    --ahead;
                } else {
                    mbarrier_wait<kCluster>(empty + 8 * stage, parity);
                    weights(segment.tile, block, stage);
                }
                activations(segment.tile, block, stage);
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
    }
};

// A block's weights as one thread holds them while they wait: nibbles, two scales, two zero points.
struct Weights {
    uint4 first, second;
    unsigned scales, zeros;

    __device__ __forceinline__ void load(unsigned record, int thread) {
        first = load_shared_16(record + thread * 16);
        second = load_shared_16(record + 2048 + thread * 16);
        scales = load_shared_4(record + kNibbleBytes + (thread >> 2) * 4);
        if (ZERO) zeros = load_shared_2(record + kNibbleBytes + 128 + (thread >> 2) * 2);
    }
};

// acc += (sx * sw) * (dot - zero * sum): dot is the exact integer (times `unit`), so is the difference.
template <typename Result>
__device__ __forceinline__ void promote(
    float (&acc)[kResults], const Result (&dot)[kResults], unsigned meta, const Weights& w, float unit) {
    const float scale0 = __uint_as_float(w.scales << 16), scale1 = __uint_as_float(w.scales & 0xffff0000u);
    float zero0 = 0, zero1 = 0;
    if (ZERO) {
        zero0 = -unit * static_cast<float>(w.zeros & 0xffu);
        zero1 = -unit * static_cast<float>(w.zeros >> 8);
    } else {
        zero0 = zero1 = -unit * 8;  // offset binary
    }
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
        const float4 m = load_shared_f4(meta + atom * 64);  // scale, scale, sum, sum of tokens 2t, 2t + 1
        float* a = acc + 4 * atom;
        const Result* d = dot + 4 * atom;
        a[0] = fmaf(m.x * scale0, fmaf(zero0, m.z, static_cast<float>(d[0])), a[0]);
        a[1] = fmaf(m.y * scale0, fmaf(zero0, m.w, static_cast<float>(d[1])), a[1]);
        a[2] = fmaf(m.x * scale1, fmaf(zero1, m.z, static_cast<float>(d[2])), a[2]);
        a[3] = fmaf(m.y * scale1, fmaf(zero1, m.w, static_cast<float>(d[3])), a[3]);
    }
}

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

// The 64 x TOKENS results of a warpgroup -> y [tokens, rows]. A 16-bit transpose in registers gives each thread four
// consecutive rows of one token: 8 bytes, 32 a quad.
__device__ __forceinline__ void store(
    float (&acc)[kResults], void* out, const float* bias, int row_tile, int first_token, int tokens, int rows,
    int thread) {
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    const int row16 = row_tile * 64 + (thread >> 5) * 16;
    const int row0 = row16 + 4 * (g >> 1) + (g & 1), row1 = row0 + 2;  // rows of fragment rows g and g + 8
    float bias0 = 0, bias1 = 0;
    if (bias != nullptr) {
        bias0 = row0 < rows ? bias[row0] : 0.0f;
        bias1 = row1 < rows ? bias[row1] : 0.0f;
    }
#if OUT == 2
    float* y = static_cast<float*>(out);
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + atom * 8 + 2 * t + (i & 1), row = i < 2 ? row0 : row1;
            if (token < tokens && row < rows)
                y[static_cast<long long>(token) * rows + row] = acc[4 * atom + i] + (i < 2 ? bias0 : bias1);
        }
#else
    unsigned short* y = static_cast<unsigned short*>(out);
    const int row = row16 + 4 * t;
    const bool whole = row + 4 <= rows && (rows & 3) == 0;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
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

// Partial sums of a tile that several clusters share: f32 in the workspace, a flag for each warpgroup.
struct Exchange {
    float4* partials;  // [cluster, cta, warpgroup, kResults / 4, 128]
    unsigned* flags;   // [cluster, cta, warpgroup]: 1 when the partial sum is there; taken back to 0 by its reader
    unsigned rank;
    int group, thread;

    __device__ __forceinline__ long long slot(int cluster) const {
        return (static_cast<long long>(cluster) * CLUSTER + rank) * ROW_WGS + group;
    }

    __device__ __forceinline__ void give(const float (&acc)[kResults], int cluster) const {
        float4* to = partials + slot(cluster) * (kResults / 4 * 128) + thread;
#pragma unroll
        for (int i = 0; i < kResults / 4; ++i)
            to[i * 128] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        named_sync(kGroupBarrier + group, 128);
        if (thread == 0) store_release(flags + slot(cluster), 1);
    }

    __device__ __forceinline__ void take(float (&acc)[kResults], int cluster) const {
        if (thread == 0) {
            while (load_acquire(flags + slot(cluster)) == 0) {
            }
            flags[slot(cluster)] = 0;
        }
        named_sync(kGroupBarrier + group, 128);
        const float4* from = partials + slot(cluster) * (kResults / 4 * 128) + thread;
#pragma unroll
        for (int i = 0; i < kResults / 4; ++i) {
            const float4 part = load_l2(from + i * 128);
            acc[4 * i] += part.x;
            acc[4 * i + 1] += part.y;
            acc[4 * i + 2] += part.z;
            acc[4 * i + 3] += part.w;
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, CTAS_PER_SM) w4ax_gemm_sm90(
    const unsigned char* weight, const unsigned char* codes, const unsigned char* meta, const float* bias, void* out,
    float4* partials, unsigned* flags, int tokens, int rows, int blocks, int stream_tiles, int band,
    const __grid_constant__ Int8Mask int8_mask) {
    extern __shared__ unsigned char shared[];
    const unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    const unsigned full = ring + STAGES * kStageBytes, empty = full + 8 * STAGES;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;  // uniform in a warp
    const unsigned rank = kCluster ? cluster_cta_rank() : 0;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    const Operands operands{weight, codes, meta, tokens, rows, (tokens + 7) >> 3, (rows + 63) >> 6};
    Schedule schedule;
    schedule.row_groups = (operands.row_tiles + ROW_WGS * CLUSTER - 1) / (ROW_WGS * CLUSTER);
    schedule.token_tiles = (tokens + TOKENS - 1) / TOKENS;
    schedule.tiles = schedule.row_groups * schedule.token_tiles;
    schedule.stream_tiles = stream_tiles;
    schedule.band = band;
    schedule.blocks = blocks;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, CLUSTER * ROW_WGS * 4);
        }
        mbarrier_init_fence();
    }
    if (kCluster) cluster_sync();
    else __syncthreads();
    launch_dependents();

    if (warpgroup == ROW_WGS) {
        registers_down<PRODUCER_REGS>();
        if (thread == 0) {
            const Producer producer{operands, schedule,        ring,          full, empty,
                                    rank,     l2_evict_first(), l2_evict_last()};
            producer.run(cluster, clusters);
        }
    } else {
        registers_up<CONSUMER_REGS>();
        wait_for_previous();
        const int group = warpgroup, lane = thread & 31;
        const Exchange exchange{partials, flags, rank, group, thread};
        const unsigned record_at = kCodesBytes + kMetaBytes + group * kRecord;
        const unsigned meta_at = kCodesBytes + (lane & 3) * 16;
        int stage = 0, parity = 0;
        if (ORDERED && group == ROW_WGS - 1) named_arrive(kTurnBarrier, 256);

        Segment segment;
        for (Worker worker(schedule, cluster, clusters); worker.next(segment);) {
            float acc[kResults];
#pragma unroll
            for (int i = 0; i < kResults; ++i) acc[i] = 0;
            Weights weights;
            mbarrier_wait<kCluster>(full + 8 * stage, parity);
            weights.load(ring + stage * kStageBytes + record_at, thread);
            for (int block = segment.first; block < segment.last; ++block) {
                const unsigned base = ring + stage * kStageBytes;
                const unsigned release = empty + 8 * stage;
                const bool is_int8 = (int8_mask.words[block >> 5] >> (block & 31)) & 1;
                unsigned fragment[4][4];
                expand_fragment(weights.first, weights.second, fragment);
                const Weights current = weights;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
                if (block + 1 < segment.last) mbarrier_wait<kCluster>(full + 8 * stage, parity);
                weights.load(ring + stage * kStageBytes + record_at, thread);  // after the last block: unused
                if (ORDERED) named_sync(kTurnBarrier + group, 256);
                if (is_int8) {
                    int dot[kResults];
                    wgmma_block(dot, fragment, activation_descriptor(base));
                    if (ORDERED) named_arrive(kTurnBarrier + (group + 1) % ROW_WGS, 256);
                    wgmma_wait(dot);
                    promote(acc, dot, base + meta_at, current, 1.0f);
                } else {
                    float dot[kResults];
                    wgmma_block(dot, fragment, activation_descriptor(base));
                    if (ORDERED) named_arrive(kTurnBarrier + (group + 1) % ROW_WGS, 256);
                    wgmma_wait(dot);
                    promote(acc, dot, base + meta_at, current, kE4m3Unit);
                }
                __syncwarp();
                if (kCluster) {
                    if (lane < CLUSTER) mbarrier_arrive_remote(release, lane);
                } else if (lane == 0) {
                    mbarrier_arrive(release);
                }
            }
            int row_group, token_tile;
            tile_place(schedule, segment.tile, row_group, token_tile);
            const int row_tile = (row_group * CLUSTER + rank) * ROW_WGS + group;
            if (segment.first > 0) {
                exchange.give(acc, cluster);
            } else {
                for (int other = cluster + 1;
                     segment.last < blocks &&
                     Worker::range_start(schedule, other, clusters) < (segment.tile + 1) * blocks;
                     ++other)
                    exchange.take(acc, other);
                store(acc, out, bias, row_tile, token_tile * TOKENS, tokens, rows, thread);
            }
        }
    }
    if (kCluster) {
        __syncwarp();
        cluster_sync();
    }
}
