// argmax of each row of 16-bit logits: several ctas a row, joined by one integer maximum, so the result never varies.
//
// A value and its column make one 64-bit number that is larger for a larger value and, among equals, for the smaller
// column. Ctas of a row join theirs by atomicMax; the last of them writes the column and leaves the scratch as zeros.
//
// Definition: ELEMENT (BFloat16, Float16).
#include "comet/quantize.cuh"

using namespace comet;
using E = ELEMENT;

constexpr int kThreads = 256, kWide = 8;

__device__ __forceinline__ uint64_t joined(float value, int column) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u; // unsigned order is the order of floats
  return (uint64_t(rank) << 32) | (0xFFFFFFFFu - uint32_t(column));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    argmax_rows(const uint16_t* logits, uint64_t* best, uint32_t* done, long long* out, int V) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int row = blockIdx.y, step = gridDim.x * kThreads * kWide;
  const uint16_t* from = logits + size_t(row) * V;
  float largest = __uint_as_float(0xFF800000u); // -infinity
  int column = 0x7FFFFFFF;
  for (int c = (blockIdx.x * kThreads + threadIdx.x) * kWide; c < V; c += step) {
    const uint4 words = *reinterpret_cast<const uint4*>(from + c);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float value = E::to_float(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xFFFFu);
      if (value > largest || column == 0x7FFFFFFF) {
        largest = value;
        column = c + i;
      }
    }
  }
  uint64_t mine = column == 0x7FFFFFFF ? 0 : joined(largest, column);
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) {
    const uint64_t other = __shfl_xor_sync(kWarp, mine, lanes);
    mine = other > mine ? other : mine;
  }
  __shared__ uint64_t of_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) mine = of_warp[i] > mine ? of_warp[i] : mine;
  atomicMax(reinterpret_cast<unsigned long long*>(best + row), static_cast<unsigned long long>(mine));
  __threadfence();
  if (atomicAdd(done + row, 1u) != gridDim.x - 1) return;
  const uint64_t winner = atomicExch(reinterpret_cast<unsigned long long*>(best + row), 0ull);
  done[row] = 0;
  out[row] = 0xFFFFFFFFu - uint32_t(winner);
}
