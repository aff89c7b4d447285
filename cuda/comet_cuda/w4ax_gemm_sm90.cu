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
#include "comet/gemm_sm90.cuh"
#include "comet/gemm_consumer_sm90.cuh"
#include "comet/gemm_output_sm90.cuh"
#include "comet/gemm_producers_sm90.cuh"

using namespace comet;

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
