// w4ax_gemm for Hopper and many tokens: sums stand in units of activation scales.
//
// The same product, layouts, schedule and ring of stages as w4ax_gemm_sm90.cu; what differs is the promotion of a block's
// exact integers to float32: one multiply-add a result, and a multiplication where the token's scale changes: at every
// block, or every fourth where INT4 scales are shared in quads (SHARE 4, see weight_layout.py). A warpgroup's tile is 64
// rows by TOKEN_TILES x TOKENS tokens, FLIGHT products of it under way at once (gemm_unit_consumer_sm90.cuh).
//
// Compile-time: what w4ax_gemm_sm90.cu takes, but for BATCH; TOKEN_TILES and SHARE. ZERO_PRODUCT, ROW_TILES and CLUSTER
// must be 1.
#define UNITS 1
#include "comet/gemm_sm90.cuh"
#include "comet/gemm_output_sm90.cuh"
#include "comet/gemm_producers_sm90.cuh"
#include "comet/gemm_unit_consumer_sm90.cuh"
#include "comet/gemm_units_sm90.cuh"

using namespace comet;
static_assert(ZERO_PRODUCT == 1, "zero points are a product over blocks");

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, CTAS_PER_SM)
    w4ax_gemm_units_sm90(const __grid_constant__ Operands operands) {
    extern __shared__ unsigned char shared[];
    const Schedule& schedule = operands.schedule;
    const unsigned ring = (shared_address(shared) + 1023) & ~1023u;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;  // uniform in a warp
    const unsigned rank = kCluster ? cluster_cta_rank() : 0;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(ring + kFullAt + 8 * stage, 2);  // the two producers
            mbarrier_init(ring + kEmptyAt + 8 * stage, ROW_WGS * 4 + kUnitWarps);
        }
        mbarrier_init(ring + kTermsFullAt, kUnitWarps + 1);
        mbarrier_init(ring + kTermsEmptyAt, ROW_WGS * 4);
        for (int slot = 0; slot < kFactorSlots; ++slot) {
            mbarrier_init(ring + kFactorsFullAt + 8 * slot, kUnitWarps);
            mbarrier_init(ring + kFactorsEmptyAt + 8 * slot, ROW_WGS * 4);
        }
        mbarrier_init_fence();
    }
    if (kCluster) cluster_sync();
    else __syncthreads();
    launch_dependents();

    if (warpgroup == ROW_WGS) {
        registers_down<PRODUCER_REGS>();
        const Ring start{ring, ring + kFullAt, ring + kEmptyAt, 0, 1,
                         ring + kZerosAt, ring + kTermsFullAt, ring + kTermsEmptyAt};
        if (thread == 0) produce_weights(operands, start, rank, cluster, clusters);
        if (thread == 32) produce_activations(operands, start, rank, cluster, clusters);
        if (thread >= 64 && thread < 64 + 32 * kUnitWarps) {
            const int lane = thread - 64;
            UnitProducer{ring, static_cast<unsigned>(lane)}.run(operands, cluster, clusters);
        }
    } else {
        registers_up<CONSUMER_REGS>();
        wait_for_previous();
        const unsigned records = kCodesBytes + kMetaBytes + static_cast<unsigned>(warpgroup) * kCopied;
        UnitConsumer consumer(ring, records, thread);
        Segment segment;
        for (int index = 0; find_segment(schedule, cluster, clusters, index, segment); ++index) {
            float acc[kSets][kResults];
#pragma unroll
            for (int i = 0; i < kSets * kResults; ++i) acc[i / kResults][i % kResults] = 0;
            for (int block = segment.first; block < segment.last;) {
                const int end = min((block / kTermBlocks + 1) * kTermBlocks, segment.last);
                consumer.run(acc, operands.int8_mask, block, end, block == segment.first);
                block = end;
                consumer.subtract_zeros(acc);
            }
            consumer.rescale(acc);

            asm volatile("" : "+r"(index));  // find the segment again rather than keep it in registers
            find_segment(schedule, cluster, clusters, index, segment);
            int row_group, token_tile;
            tile_place(schedule, segment.tile, row_group, token_tile);
            const int row_tile = row_group * ROW_WGS + warpgroup;
            const UnitExchange exchange{reinterpret_cast<float*>(operands.partials), operands.flags, rank, warpgroup, thread};
            if (segment.first > 0) {
                exchange.give(acc, cluster);
            } else {
                const int blocks = schedule.blocks;
                if (segment.last < blocks) {
                    int other = cluster + 1;
                    while (Worker::range_start(schedule, other + 1) < (segment.tile + 1) * blocks) ++other;
                    exchange.take(acc, cluster + 1, other);
                }
#pragma unroll
                for (int i = 0; i < kSets; ++i)
                    store(acc[i], operands, row_tile, (token_tile * TOKEN_TILES + i) * TOKENS, thread);
            }
        }
    }
    if (kCluster) {
        __syncwarp();
        cluster_sync();
    }
}
