// Ctas of a cluster that write into each other's shared memory: CLUSTER ctas (gridDim.y) share a token.
#pragma once

#include "comet/pipeline.cuh"
#include "comet/quantize.cuh"

#if CLUSTER > 1
#define CLUSTER_OF_CTAS __cluster_dims__(1, CLUSTER, 1)
#else
#define CLUSTER_OF_CTAS
#endif

namespace comet {

// x -> the place of `at`, which is in this cta's shared memory, in the shared memory of another cta.
__device__ __forceinline__ void store_in_cta(float* at, uint32_t rank, float x) {
  asm volatile("{.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\tst.shared::cluster.f32 [there], %2;}" ::"r"(
                   uint32_t(__cvta_generic_to_shared(at))),
               "r"(rank), "f"(x)
               : "memory");
}

// The same, and the bytes that the mbarrier `barrier` of that cta waits for become four fewer. No fence is needed, as before
// a barrier of the cluster, and the other cta stays as long as it waits.
__device__ __forceinline__ void send_to_cta(float* at, uint32_t rank, float x, uint32_t barrier) {
  asm volatile("{.reg .b32 there, then;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\tmapa.shared::cluster.u32 then, %1, %2;\n\t"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [then];}" ::"r"(
                   uint32_t(__cvta_generic_to_shared(at))),
               "r"(barrier), "r"(rank), "r"(__float_as_uint(x))
               : "memory");
}

} // namespace comet
