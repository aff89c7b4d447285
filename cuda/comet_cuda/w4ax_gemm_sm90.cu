// w4ax_gemm for Hopper: Y^T = W X^T, 4-bit weights from registers, activations from shared memory, integer-exact.
//
// In: tiled operands (weight_layout.py). Out: y [tokens, rows]. One cta an SM (or two), persistent: two producer threads
// keep a ring of stages full with bulk copies; each consumer warpgroup owns 64 weight rows, expands its nibbles into A
// fragments and runs one wgmma group a block of 128 channels: e4m3 where the activations are INT4, u8 x s8 where they are
// INT8. Both give the exact integer sum. While one warpgroup promotes its sums to float32 (times sx * sw, minus the zero
// point's share), the other one's wgmma keeps the tensor cores busy. There is no cta barrier in the main loop. A cluster
// of ctas shares the activations: each loads a part and multicasts it. See comet/tile_schedule.cuh for who does what.
//
// Compile-time: TOKENS (n), ROW_WGS (consumer warpgroups), ROW_TILES (of 64 rows, a warpgroup), CLUSTER (ctas), STAGES,
// CTAS_PER_SM, ZERO (0/1: zero points), OUT (0 bf16, 1 f16, 2 f32), CONSUMER_REGS, PRODUCER_REGS, BATCH (blocks that a
// warpgroup works on between two drains), FLIGHT (products of a warpgroup under way at once), ZERO_PRODUCT (0/1).
//
// Zero points. sum_b s_b * (dot_b - z_b * sum_b) needs, with ZERO_PRODUCT 0, one more multiply-add a result and block, on
// exact integers. With 1, the part with z is one more matrix product over blocks, (-z sw) x (sx sum), in bf16 halves
// (three of the four products; relative error 2^-17), on the tensor cores: for large tiles float32 instructions and the
// width of shared memory are the limits. An otherwise idle warp prepares its activations' part.
#include "comet/convert_i4.cuh"
#include "comet/pipeline.cuh"
#include "comet/tile_schedule.cuh"
#include "comet/wgmma.cuh"

using namespace comet;

constexpr int kAtoms = TOKENS / 8;
constexpr int kResults = TOKENS / 2;  // f32 a thread and row tile
constexpr int kNibbleBytes = 4096;
constexpr int kRecord = ZERO ? 4288 : 4224;  // weight_layout.record_bytes
constexpr int kCodesBytes = TOKENS * 128;
constexpr int kMetaBytes = TOKENS * 8;
constexpr int kRecords = ROW_WGS * ROW_TILES;  // row tiles of a cta
constexpr int kStageBytes = (kCodesBytes + kMetaBytes + kRecords * kRecord + 1023) / 1024 * 1024;
constexpr int kThreads = 128 * (ROW_WGS + 1);
constexpr int kAtomShare = (kAtoms + CLUSTER - 1) / CLUSTER;  // atoms that one cta of a cluster loads
constexpr bool kCluster = CLUSTER > 1;
constexpr int kTermBlocks = 32;                                      // blocks of one zero-point product
constexpr int kTermBytes = ZERO_PRODUCT ? TOKENS * 128 : 0;           // its activations: 32 high and 32 low halves a token
constexpr int kTermBuffers = 2;
constexpr int kRingBytes = kStageBytes * STAGES + kTermBuffers * kTermBytes;
constexpr float kE4m3Unit = 1.0f / 512;  // a zero-extended nibble read as e4m3 is code * 2^-9
constexpr int kMaskWords = 16;           // up to 512 blocks
constexpr int kGroupBarrier = 1;         // named barriers: one a consumer warpgroup
static_assert(kRecord % 16 == 0 && kRingBytes + 1024 + 16 * (STAGES + kTermBuffers) <= 232448, "stages fit in shared memory");

// The kernel's one parameter (packed by `launch` in w4ax_gemm_sm90.py); stays in constant memory.
struct Operands {
    const unsigned char* weight;  // [row tiles, blocks, kRecord]
    const uint4* zero_terms;      // [row tiles, ceil(blocks / 32), 4, 128]: high, low, high, low halves of -z * sw
    const unsigned char* codes;   // [blocks, atoms, 1024]
    const unsigned char* meta;    // [blocks, atoms, 64]
    const float* bias;            // [rows] or null
    void* out;                    // [tokens, rows]
    float4* partials;             // [clusters, cta, warpgroup, kResults * ROW_TILES / 4, 128]
    unsigned* flags;              // [clusters, cta, warpgroup]
    int tokens, rows, atoms, row_tiles;
    Schedule schedule;
    unsigned int8_mask[kMaskWords];  // bit b: block b holds INT8 activations
};

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
    float (&acc)[kResults], const Operands& operands, int row_tile, int first_token, int thread) {
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
    for (int atom = 0; atom < kAtoms; ++atom)
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

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, CTAS_PER_SM)
    w4ax_gemm_sm90(const __grid_constant__ Operands operands) {
    extern __shared__ unsigned char shared[];
    const Schedule& schedule = operands.schedule;
    const unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    const unsigned terms = ring + STAGES * kStageBytes;
    const unsigned full = ring + kRingBytes, empty = full + 8 * STAGES;
    const unsigned terms_full = empty + 8 * STAGES, terms_empty = terms_full + 8 * kTermBuffers;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;  // uniform in a warp
    const unsigned rank = kCluster ? cluster_cta_rank() : 0;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, 2);  // the two producers
            mbarrier_init(empty + 8 * stage, CLUSTER * ROW_WGS * 4);
        }
        for (int buffer = 0; ZERO_PRODUCT && buffer < kTermBuffers; ++buffer) {
            mbarrier_init(terms_full + 8 * buffer, 32);
            mbarrier_init(terms_empty + 8 * buffer, ROW_WGS * 4);
        }
        mbarrier_init_fence();
    }
    if (kCluster) cluster_sync();
    else __syncthreads();
    launch_dependents();

    if (warpgroup == ROW_WGS) {
        registers_down<PRODUCER_REGS>();
        const Ring start{ring, full, empty, 0, 1};
        if (thread == 0) produce_weights(operands, start, rank, cluster, clusters);
        if (thread == 32) produce_activations(operands, start, rank, cluster, clusters);
        if (ZERO_PRODUCT && thread >= 64 && thread < 96)
            produce_terms(operands, terms, terms_full, terms_empty, thread - 64, cluster, clusters);
    } else {
        registers_up<CONSUMER_REGS>();
        wait_for_previous();
        const int group = warpgroup, lane = thread & 31;
        const Exchange exchange{operands.partials, operands.flags, rank, group, thread};
        Consumer consumer{ring, full, empty, terms, terms_full, terms_empty,
                          kCodesBytes + kMetaBytes + group * ROW_TILES * kRecord, kCodesBytes + (lane & 3) * 16,
                          thread, 0, 0, 0, 0};

        Segment segment;
        for (Worker worker(schedule, cluster, clusters); worker.next(segment);) {
            float acc[ROW_TILES][kResults];
#pragma unroll
            for (int i = 0; i < ROW_TILES * kResults; ++i) acc[i / kResults][i % kResults] = 0;
            int row_group, token_tile;
            tile_place(schedule, segment.tile, row_group, token_tile);
            const int row_tile = ((row_group * CLUSTER + rank) * ROW_WGS + group) * ROW_TILES;
            const int blocks = schedule.blocks;
            const long long term_groups = (blocks + kTermBlocks - 1) / kTermBlocks;
            for (int block = segment.first; block < segment.last;) {
                const bool is_int8 = (operands.int8_mask[block >> 5] >> (block & 31)) & 1;
                const int limit = ZERO_PRODUCT ? (block / kTermBlocks + 1) * kTermBlocks : segment.last;
                const int end = run_end(operands.int8_mask, block, min(limit, segment.last), is_int8);
                if (is_int8) consumer.run<true>(acc, end - block);
                else consumer.run<false>(acc, end - block);
                block = end;
                if (ZERO_PRODUCT && (block == limit || block == segment.last)) {
                    const long long at = min(row_tile, operands.row_tiles - ROW_TILES) * term_groups;
                    consumer.subtract_zeros(
                        acc, operands.zero_terms + (at + (block - 1) / kTermBlocks) * 512, term_groups * 512);
                }
            }
            if (segment.first > 0) {
                exchange.give(acc, cluster);
            } else {
                if (segment.last < blocks) {
                    int other = cluster + 1;
                    while (Worker::range_start(schedule, other + 1) < (segment.tile + 1) * blocks) ++other;
                    exchange.take(acc, cluster + 1, other);
                }
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i)
                    store(acc[i], operands, row_tile + i, token_tile * TOKENS, thread);
            }
        }
    }
    if (kCluster) {
        __syncwarp();
        cluster_sync();
    }
}
