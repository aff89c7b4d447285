// Blocks of 128 channels on four lanes each, as quantize_many.cu has them (quantize.cuh has them on eight).
//
// Which channel a slot holds (slot bits s4..s0, lane bits l1 l0 of the four):
//   start order:  channel bits 6..0 = l1 l0 (s4 ^ l0) (s3 ^ l1) s2 s1 s0;
//   end order:    channel bits 6..0 = s3 s4 l0 l1 s2 s1 s0.
// The Hadamard takes the first and leaves the second: strides 1 to 16 stay inside a lane, those of 32 and 64 exchange
// half of the registers with a neighbour (compare quantize.cuh). Blocks that are not rotated are read in the end order.
#pragma once

#include "comet/quantize.cuh"

namespace comet {

constexpr int kLanes = 4;            // that share a block
constexpr int kBlocks = 32 / kLanes; // of a warp
constexpr int kValues = 32;          // of a lane

// The stages of `hadamard_blocks`, but for the norm and the signs of `factors`.
__device__ __forceinline__ void hadamard(float (&v)[kValues], int lane) {
  const float s0 = lane & 1 ? -1.f : 1.f, s1 = lane & 2 ? -1.f : 1.f;
#pragma unroll
  for (int stride = 1; stride <= 4; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & stride) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = __fadd_rn(low, high);
      v[i + stride] = __fsub_rn(low, high);
    }
  }
#pragma unroll
  for (int stride = 8; stride <= 16; stride *= 2) { // a lane with s = -1 holds the pair the other way round
    const float s = stride == 8 ? s1 : s0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = __fmaf_rn(a, s, b);
      v[i + stride] = __fmaf_rn(b, -s, a);
    }
  }
#pragma unroll
  for (int stage = 0; stage < 2; ++stage) { // channel strides 32 and 64
    const int half = stage == 0 ? 16 : 8;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & half) continue;
      const float mine = v[i], other = __shfl_xor_sync(kWarp, v[i + half], 1 << stage);
      v[i] = __fadd_rn(mine, other);
      v[i + half] = __fsub_rn(mine, other);
    }
  }
}

__device__ __forceinline__ float over_lanes(float x) { // the largest of a block's four lanes
  x = fmaxf(x, __shfl_xor_sync(kWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWarp, x, 2));
}

} // namespace comet
