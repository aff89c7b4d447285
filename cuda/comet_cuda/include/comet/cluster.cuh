// Ctas of a cluster that write into each other's shared memory.
#pragma once

#include "comet/quantize.cuh"

namespace comet {

// The cluster's barrier in two halves: what was stored before the one is seen after the other. All threads take part.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// x -> the place of `at`, which is in this cta's shared memory, in the shared memory of another cta.
__device__ __forceinline__ void store_in_cta(float* at, uint32_t rank, float x) {
  asm volatile("{.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\tst.shared::cluster.f32 [there], %2;}" ::"r"(
                   uint32_t(__cvta_generic_to_shared(at))),
               "r"(rank), "f"(x)
               : "memory");
}

} // namespace comet
