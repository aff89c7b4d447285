// w4ax_gemm for Hopper where scales are integer multiples: the sums stay in the tensor cores' int32 over all of K.
//
// A weight is base[row] * m * (q - z), an INT4 activation scale[token] * (its multiple times its code, which quantize
// stored), an INT8 one scale[token] * 2^e * code. So a product is scale * base * integer, and wgmma s8 x s8 adds up blocks
// without any work in between. INT8 blocks come first, in groups of 1, 2, 4, ... with one e a token: between groups sums are
// shifted by what e falls, and at last to S; what is added on the way may wrap, the whole fits 32 bits (check_blocks in
// quantize_token_ref.py). Nibbles become m * (q - z) on the way to wgmma's A registers.
//
// One producer warpgroup copies tiles into a ring of stages; ROW_WGS consumer warpgroups have 64 rows each and TOKEN_TILES
// products of TOKENS tokens. Tiles are dealt as tile_schedule.cuh says; partial sums are integers, so their order is free.
// They meet in global memory, or, with SPLIT ctas a tile, in the shared memory of the cta that owns a part of it.
#include "comet/gemm_integer_producers.cuh"
#include "comet/gemm_output_sm90.cuh"
#include "comet/wgmma.cuh"

namespace comet {

// A consumer warpgroup's sums of a tile: acc[set][4 * atom + i], i: (row g, tokens 2t, 2t + 1), (row g + 8, the same).
struct Consumer {
    Place place;
    unsigned record;  // the warpgroup's, in a stage
    int thread;

    __device__ __forceinline__ Consumer(unsigned ring, int warpgroup, int thread)
        : place(ring, 0), record(kRecordsAt + warpgroup * kRecord), thread(thread) {}

    // The rows' nibbles of the present stage, and their multiples and zero points.
    struct Nibbles {
        uint4 first, second;
        unsigned factors;
    };
    __device__ __forceinline__ Nibbles fetch(const Place& from) const {
        mbarrier_wait(from.full(), from.parity);
        const unsigned at = from.at() + record;
        return {load_shared_16(at + thread * 16), load_shared_16(at + thread * 16 + 2048),
                load_shared_4(at + kNibbleBytes + (thread >> 2) * 4)};
    }
    // m * (q - z) of them, as wgmma's A: bytes hold m * q + (128 - m * z), then the top bit turns.
    static __device__ __forceinline__ void expand(const Nibbles& n, unsigned (&a)[4][4]) {
        const unsigned m0 = n.factors & 0xff, m1 = n.factors >> 16 & 0xff;
        const unsigned c0 = __byte_perm(n.factors, 0, 0x1111), c1 = __byte_perm(n.factors, 0, 0x3333);
        const unsigned words[8] = {n.first.x, n.first.y, n.first.z, n.first.w,
                                   n.second.x, n.second.y, n.second.z, n.second.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            a[i / 2][i % 2 * 2] = four(words[i], m0, c0);
            a[i / 2][i % 2 * 2 + 1] = four(words[i] >> 4, m1, c1);
        }
        pin(a);
    }
    // The low nibbles of a word's bytes: all at once, or (to measure what that saves) each by itself.
    static __device__ __forceinline__ unsigned four(unsigned word, unsigned m, unsigned c) {
#ifdef ONE_BY_ONE
        unsigned bytes = 0;
#pragma unroll
        for (int at = 0; at < 32; at += 8) bytes |= (((word >> at & 15) * m + (c & 0xff)) ^ 0x80) << at;
        return bytes;
#else
        return ((word & 0x0f0f0f0fu) * m + c) ^ 0x80808080u;
#endif
    }
    __device__ __forceinline__ void load(unsigned (&a)[4][4]) const { expand(fetch(place), a); }

    // Give a stage back. Its nibbles have come, since their product has; what is loaded after that needs a fence before.
    __device__ __forceinline__ void release(unsigned barrier) const {
        __syncwarp();
        if ((thread & 31) == 0) mbarrier_arrive(barrier);
    }

    // All products of the present stage, added up; leaves the stage.
    __device__ __forceinline__ unsigned start(unsigned (&acc)[kSets][kResults], const unsigned (&a)[4][4]) {
        const unsigned tile = __shfl_sync(0xffffffffu, place.at(), 0), barrier = place.empty();
        wgmma_fence();
        multiply(acc, a, tile);
        wgmma_commit();
        place.advance();
        return barrier;
    }
    static __device__ __forceinline__ void multiply(
        unsigned (&acc)[kSets][kResults], const unsigned (&a)[4][4], unsigned tile, int accumulate = 1) {
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const auto b = activation_descriptor(tile + set * (TOKENS * 128)) + 2 * step;
                wgmma_k32_s8(acc[set], a[step], b, accumulate || step > 0);
            }
    }

    // `count` blocks, at least 1: one is multiplied while the next one's nibbles become integers. Then the sums are shifted
    // left by a byte of their tokens' words in the last stage: byte `byte`, or not at all if it is negative.
    __device__ __forceinline__ void add_run(unsigned (&acc)[kSets][kResults], int count, int byte) {
        unsigned even[4][4], odd[4][4];
        load(even);
        unsigned last = place.at(), used_even = start(acc, even), used_odd = used_even;
        for (--count; count > 1; count -= 2) {
            load(odd);
            used_odd = start(acc, odd);
            wait_but_one();
            release(used_even);
            load(even);
            last = place.at();
            used_even = start(acc, even);
            wait_but_one();
            release(used_odd);
        }
        if (count == 1) {
            load(odd);
            last = place.at();
            used_odd = start(acc, odd);
            wait_but_one();
            release(used_even);
            used_even = used_odd;
        }
        wait_all(acc);
        if (byte >= 0) {
            shift(acc, last, byte);
            fence_proxy_async();  // before the stage is copied over what these loads read
        }
        release(used_even);
    }
    static __device__ __forceinline__ void wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }
    static __device__ __forceinline__ void wait_all(unsigned (&acc)[kSets][kResults]) {
        wgmma_wait<0>(acc[0]);
#pragma unroll
        for (int i = kResults; i < kSets * kResults; ++i) asm volatile("" : "+r"(acc[i / kResults][i % kResults])::"memory");
    }

    // kCount INT4 blocks at once, where products are so small that their latency counts.
    template <int kCount>
    __device__ __forceinline__ void add_int4_together(unsigned (&acc)[kSets][kResults]) {
        unsigned a[kCount][4][4];
        const int first = place.stage;
        load_all(a);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kCount; ++i) multiply(acc, a[i], tile_of(first + i));
        wgmma_commit();
        wait_all(acc);
#pragma unroll
        for (int i = 0; i < kCount; ++i) release(place.ring + kEmptyAt + 8 * around(first + i));
    }

    // kCount INT8 blocks at once: each has sums of its own, which are shifted and added.
    template <int kCount>
    __device__ __forceinline__ void add_int8_together(unsigned (&acc)[kSets][kResults]) {
        unsigned a[kCount][4][4], dots[kCount][kSets][kResults];
        const int first = place.stage;
        load_all(a);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kCount; ++i) multiply(dots[i], a[i], tile_of(first + i), 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < kCount; ++i) wait_all(dots[i]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) shift(dots[i], place.ring + around(first + i) * kStageBytes, 0);
        fence_proxy_async();  // before the stages are copied over what these loads read
#pragma unroll
        for (int i = 0; i < kCount; ++i) release(place.ring + kEmptyAt + 8 * around(first + i));
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int j = 0; j < kSets * kResults; ++j)
                acc[j / kResults][j % kResults] += dots[i][j / kResults][j % kResults];
    }
    template <int kCount>
    __device__ __forceinline__ void load_all(unsigned (&a)[kCount][4][4]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            load(a[i]);
            place.advance();
        }
    }
    static __device__ __forceinline__ int around(int stage) { return stage < STAGES ? stage : stage - STAGES; }
    static_assert(BATCH <= STAGES, "the blocks of a batch are all there");

    __device__ __forceinline__ unsigned tile_of(int stage) const {
        return __shfl_sync(0xffffffffu, place.ring + around(stage) * kStageBytes, 0);
    }

    // Sums shifted left by a byte of their token's word in the stage at `stage`.
    __device__ __forceinline__ void shift(unsigned (&acc)[kSets][kResults], unsigned stage, int byte) const {
        const unsigned at = stage + kCodesBytes + (thread & 3) * 8;
#pragma unroll
        for (int atom = 0; atom < kTileAtoms; ++atom) {
            if (atom % 4 == 0) __syncwarp();  // bounds what the compiler loads ahead
            const float2 pair = load_shared_f2(at + atom * 32);
            const unsigned even = __float_as_uint(pair.x) >> 8 * byte & 31, odd = __float_as_uint(pair.y) >> 8 * byte & 31;
            unsigned* sum = &acc[atom / kAtoms][4 * (atom % kAtoms)];
            sum[0] <<= even;
            sum[1] <<= odd;
            sum[2] <<= even;
            sum[3] <<= odd;
        }
    }

    __device__ __forceinline__ void add(unsigned (&acc)[kSets][kResults], int int8_blocks, int first, int last) {
        if (BATCH == 1) {
            while (first < last) {
                const bool eight = first < int8_blocks;
                const int group = eight ? min((2 << 31 - __clz(first + 1)) - 1, int8_blocks) : last;
                const int shared = min(group, last);  // the end of blocks that share an exponent
                const int end = STAGES > 1 ? shared : first + 1;  // two blocks under way need two stages
                add_run(acc, end - first, eight && end == shared ? end < last : -1);  // a segment ends with whole multiples
                first = end;
            }
            return;
        }
        constexpr int kPair = BATCH > 1 ? 2 : 1;
        const int change = max(first, min(last, int8_blocks));
        for (; first + kPair <= change; first += kPair) add_int8_together<kPair>(acc);
        if (first < change) add_int8_together<1>(acc), ++first;
        for (; first + BATCH <= last; first += BATCH) add_int4_together<BATCH>(acc);
        for (; first < last; ++first) add_int4_together<1>(acc);
    }
};

#ifndef SPLIT
// Partial sums of a tile that several ctas share, and a flag for each warpgroup: 1 when they are there.
struct Shares {
    static constexpr int kCount = kSets * kResults;                         // sums of a thread
#if QUICK
    static constexpr int kAtOnce = kCount < 64 ? kCount : 64;               // loaded together from one cta,
    static constexpr int kOthers = kCount > 32 ? 1 : kCount > 16 ? 2 : 4;   // and from how many
#else
    static constexpr int kAtOnce = kCount < 32 ? kCount : 32;
    static constexpr int kOthers = kCount > 64 ? 1 : kCount > 32 ? 2 : 4;
#endif
    unsigned* partials;  // [cta, warpgroup, kCount, 128]; 4 bytes an access, since wider ones cost registers
    unsigned* flags;     // [cta, warpgroup]
    int group, thread;

    __device__ __forceinline__ int slot(int cta) const { return cta * ROW_WGS + group; }
    __device__ __forceinline__ unsigned* place(int cta) const {
        return partials + static_cast<long long>(slot(cta)) * (kCount * 128) + thread;
    }
    __device__ __forceinline__ void give(const unsigned (&acc)[kSets][kResults], int cta) const {
        unsigned* to = place(cta);
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i * 128] = acc[i / kResults][i % kResults];
#if QUICK
        named_arrive(kGivenBarrier + group, 160);
#else
        named_sync(kGroupBarrier + group, 128);
        if (thread == 0) store_release(flags + slot(cta), 1);
#endif
    }
    // A warp that has nothing else to do raises the flags when sums are there, so that nobody waits for their way to L2.
    __device__ __forceinline__ void announce(int cta) const {
        named_sync(kGivenBarrier + group, 160);
        if ((thread & 31) == 0) store_release(flags + slot(cta), 1);
    }
    // Add the sums of ctas first .. last: flags are polled side by side, loads from several are under way together.
    __device__ __forceinline__ void take(unsigned (&acc)[kSets][kResults], int first, int last) const {
        for (int other = first + thread; other <= last; other += 128) {
            while (load_acquire(flags + slot(other)) == 0) {
            }
            flags[slot(other)] = 0;
        }
        named_sync(kGroupBarrier + group, 128);
        for (int other = first; other <= last; other += kOthers) {
#pragma unroll
            for (int start = 0; start < kCount; start += kAtOnce) {
                unsigned parts[kOthers][kAtOnce];
#pragma unroll
                for (int i = 0; i < kOthers * kAtOnce; ++i) {
                    const int from = other + i / kAtOnce, sum = start + i % kAtOnce;
                    const auto at = reinterpret_cast<const float*>(place(from) + sum * 128);
                    parts[i / kAtOnce][i % kAtOnce] = from <= last && sum < kCount ? __float_as_uint(load_l2(at)) : 0;
                }
#pragma unroll
                for (int i = 0; i < kOthers * kAtOnce; ++i) {
                    const int sum = start + i % kAtOnce;
                    if (sum < kCount) acc[sum / kResults][sum % kResults] += parts[i / kAtOnce][i % kAtOnce];
                }
            }
        }
    }
};
#endif

// Some atoms' sums, times the scales of token and row, to y.
template <int kCount>
__device__ __forceinline__ void store_scaled(
    const unsigned (&acc)[kCount], const Operands& operands, int row_tile, int first_token, int thread) {
    const int lane = thread & 31, g = lane >> 2, t = lane & 3;
    const float* base = operands.base + row_tile * 64 + (thread >> 5) * 16 + 4 * (g >> 1) + (g & 1);
    const float base0 = base[0], base1 = base[2];
    const float* scales = operands.token_scale + first_token + 2 * t;
    constexpr int kPart = kCount % 32 ? kCount : 32;  // sums at a time: registers do not hold all of both
#pragma unroll
    for (int start = 0; start < kCount; start += kPart) {
        float values[kPart];
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
            const int atom = (start + j) / 4, i = j % 4;
            const bool present = first_token + atom * 8 < operands.atoms * 8;
            const float scale = present ? scales[atom * 8 + (i & 1)] : 0.0f;
            // rounded before a bias is added, as in the reference: not one fused multiply-add
            values[j] = __fmul_rn(static_cast<float>(static_cast<int>(acc[start + j])), scale * (i < 2 ? base0 : base1));
        }
        store(values, operands, row_tile, first_token + 2 * start, thread);
    }
}

}  // namespace comet

#if SPLIT > 1
#include "comet/gemm_integer_split.cuh"
#define CLUSTER_OF_CTAS __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER_OF_CTAS
#endif

using namespace comet;

extern "C" __global__ void CLUSTER_OF_CTAS __launch_bounds__(kThreads, 1)
    w4ax_gemm_integer(const __grid_constant__ Operands operands) {
    extern __shared__ unsigned char shared[];
    const Schedule& schedule = operands.schedule;
    const unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;  // uniform in a warp
    const int cta = blockIdx.x, ctas = gridDim.x;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring + kFullAt + 8 * stage, 2);  // the two producers
            mbarrier_init(ring + kEmptyAt + 8 * stage, ROW_WGS * 4);
        }
#if SPLIT > 1
        Exchange::prepare(ring, cta % SPLIT);
#endif
        mbarrier_init_fence();
    }
    __syncthreads();
#if SPLIT > 1
    cluster_arrive_relaxed();  // others may send
#endif
    launch_dependents();

    if (warpgroup == ROW_WGS) {
        registers_down<PRODUCER_REGS>();
        if (thread == 0) produce_weights(operands, Place(ring, 1), cta, ctas);
        if (thread >> 5 == 1) produce_activations(operands, ring, thread & 31, cta, ctas);
#if QUICK
        Segment segment;
        if (thread >= 64 && find_segment(schedule, cta, ctas, 0, segment) && segment.first > 0) {  // a cta gives once, at first
            for (int group = __shfl_sync(0xffffffffu, thread >> 5, 0) - 2; group < ROW_WGS; group += 2)
                Shares{operands.partials, operands.flags, group, thread}.announce(cta);
        }
#endif
#if SPLIT > 1
        __syncwarp();
        cluster_wait();  // whoever has arrived waits
#endif
    } else {
        registers_up<CONSUMER_REGS>();
        wait_for_previous();
        Consumer consumer(ring, warpgroup, thread);
#if SPLIT > 1
        Segment segment;
        Worker(schedule, cta, ctas).next(segment);
        unsigned acc[kSets][kResults];
#pragma unroll
        for (int i = 0; i < kSets * kResults; ++i) acc[i / kResults][i % kResults] = 0;
        consumer.add(acc, operands.int8_blocks, segment.first, segment.last);

        const Exchange exchange{ring, cta % SPLIT, warpgroup, thread};
        cluster_wait();
        exchange.send(acc);
        exchange.wait();
        int row_group, token_tile;
        tile_place(schedule, cta / SPLIT, row_group, token_tile);
        const int row_tile = row_group * ROW_WGS + warpgroup;
        if (row_tile < operands.row_tiles) finish<0>(acc, operands, exchange, row_tile, token_tile * kTileTokens);
#else
        const Shares shares{operands.partials, operands.flags, warpgroup, thread};
        Segment segment;
        for (int index = 0; find_segment(schedule, cta, ctas, index, segment); ++index) {
            unsigned acc[kSets][kResults];
#pragma unroll
            for (int i = 0; i < kSets * kResults; ++i) acc[i / kResults][i % kResults] = 0;
            consumer.add(acc, operands.int8_blocks, segment.first, segment.last);

            asm volatile("" : "+r"(index));  // find the segment again rather than keep it in registers
            find_segment(schedule, cta, ctas, index, segment);
            int row_group, token_tile;
            tile_place(schedule, segment.tile, row_group, token_tile);
            if (segment.first > 0) {
                shares.give(acc, cta);
                continue;
            }
            if (segment.last < schedule.blocks) {
                int other = cta + 1;
                while (Worker::range_start(schedule, other + 1) < (segment.tile + 1) * schedule.blocks) ++other;
                shares.take(acc, cta + 1, other);
            }
            const int row_tile = row_group * ROW_WGS + warpgroup;
            if (row_tile < operands.row_tiles) {
#pragma unroll
                for (int set = 0; set < kSets; ++set)
                    store_scaled(acc[set], operands, row_tile, (token_tile * TOKEN_TILES + set) * TOKENS, thread);
            }
        }
#endif
    }
}
