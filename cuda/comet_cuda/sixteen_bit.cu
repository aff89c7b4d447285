// What stands between the linears of a decoder whose linears read 16 or 8 bits: RMSNorm with a residual add, SiLU(gate)
// * up, 8-bit floats with one scale a token, and the rotary embedding with the append to a 16-bit cache.
//
// row_op: a cta takes one token and keeps its row in registers, 8 channels a thread at a time. Values are rounded where
// the unfused modules round. rope_append: a warp takes one head of one token.
//
// Definitions: ELEMENT (BFloat16, Float16), FUSE (0 none; 1 RMSNorm with an optional residual add; 2 SiLU(gate) * up),
// FP8 (0: the element type; 1: e4m3 and a float32 scale a token), VECTORS (8-channel pieces a thread holds).
#include "comet/quantize.cuh"

using namespace comet;
using E = ELEMENT;

constexpr int kThreads = 256, kWide = 8, kWarps = kThreads / 32;
constexpr float kFp8Max = 448.f;

struct Params {
  const void* x;        // [M, K], or [M, 2K] for FUSE == 2
  const void* residual; // [M, K] or null (FUSE == 1)
  const void* weight;   // [K] (FUSE == 1)
  void* summed;         // [M, K] = x + residual (FUSE == 1 with a residual)
  void* out;            // [M, K], element type or e4m3
  float* scale;         // [M] (FP8)
  int M, K;
  float eps;
};

__device__ __forceinline__ float rounded(float x) { return E::to_float(E::from_float(x)); }

__device__ __forceinline__ void load_wide(const void* base, size_t at, float (&v)[kWide]) {
  const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + at);
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kWide; ++i) v[i] = E::to_float(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xFFFFu);
}

__device__ __forceinline__ void store_wide(void* base, size_t at, const float (&v)[kWide]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = E::from_float(v[2 * i]) | (E::from_float(v[2 * i + 1]) << 16);
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + at) = make_uint4(w[0], w[1], w[2], w[3]);
}

template <bool kMax> __device__ __forceinline__ float over_cta(float x) {
  __shared__ float of_warp[kWarps];
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(kWarp, x, step);
    x = kMax ? fmaxf(x, other) : x + other;
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float all = of_warp[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) all = kMax ? fmaxf(all, of_warp[i]) : all + of_warp[i];
  __syncthreads();
  return all;
}

#if FP8
__device__ __forceinline__ void store_fp8(void* base, size_t at, const float (&v)[kWide], float scale) {
  uint16_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(pairs[i])
        : "f"(v[2 * i + 1] / scale), "f"(v[2 * i] / scale));
  const uint2 words = make_uint2(pairs[0] | (uint32_t(pairs[1]) << 16), pairs[2] | (uint32_t(pairs[3]) << 16));
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(base) + at) = words;
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads) row_op(const Params p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const size_t row = blockIdx.x;
  float v[VECTORS][kWide], squares = 0.f, largest = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int c = (i * kThreads + threadIdx.x) * kWide;
    if (c >= p.K) continue;
    load_wide(p.x, (FUSE == 2 ? 2 * row : row) * p.K + c, v[i]);
    float other[kWide];
    if (FUSE == 2) {
      load_wide(p.x, (2 * row + 1) * p.K + c, other);
#pragma unroll
      for (int j = 0; j < kWide; ++j) v[i][j] = rounded(rounded(v[i][j] / (1.f + __expf(-v[i][j]))) * other[j]);
      if (!FP8) store_wide(p.out, row * p.K + c, v[i]);  // complete: nothing of the row is waited for
    } else if (FUSE == 1 && p.residual != nullptr) {
      load_wide(p.residual, row * p.K + c, other);
#pragma unroll
      for (int j = 0; j < kWide; ++j) v[i][j] = rounded(v[i][j] + other[j]);
      store_wide(p.summed, row * p.K + c, v[i]);
    }
#pragma unroll
    for (int j = 0; j < kWide; ++j) squares = fmaf(v[i][j], v[i][j], squares);
  }
  float norm = 1.f;
  if (FUSE == 1) norm = rsqrtf(over_cta<false>(squares) / float(p.K) + p.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int c = (i * kThreads + threadIdx.x) * kWide;
    if (c >= p.K) continue;
    if (FUSE == 1) {
      float weight[kWide];
      load_wide(p.weight, c, weight);
#pragma unroll
      for (int j = 0; j < kWide; ++j) v[i][j] = rounded(rounded(v[i][j] * norm) * weight[j]);
    }
#pragma unroll
    for (int j = 0; j < kWide; ++j) largest = fmaxf(largest, fabsf(v[i][j]));
    if (!FP8 && FUSE != 2) store_wide(p.out, row * p.K + c, v[i]);
  }
#if FP8
  float scale = over_cta<true>(largest) / kFp8Max;
  if (!(scale > 0.f)) scale = 1.f;
  if (threadIdx.x == 0) p.scale[row] = scale;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int c = (i * kThreads + threadIdx.x) * kWide;
    if (c < p.K) store_fp8(p.out, row * p.K + c, v[i], scale);
  }
#endif
}

struct RopeParams {
  const void* qkv;    // [N, (Hq + 2 H) * D]
  const void* q_norm; // [D] or null
  const void* k_norm; // [D] or null
  const float* cos;   // [positions, D / 2]
  const float* sin;
  const int* position; // [N]
  const int* row;      // [N], a token's row in the cache
  void* q;             // [N, Hq, D], or [N, Hq / H, H, D] if by_group
  void* k_cache;       // [rows, H, D]
  void* v_cache;
  int N, heads, kv_heads, D, by_group;
  float eps;
};

extern "C" __global__ void __launch_bounds__(kThreads) rope_append(const RopeParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int all = p.heads + 2 * p.kv_heads, lane = threadIdx.x % 32;
  const int index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= p.N * all) return;
  const int token = index / all, head = index % all, half = p.D / 2;
  const uint16_t* from = static_cast<const uint16_t*>(p.qkv) + (size_t(token) * all + head) * p.D;
  const size_t place = size_t(p.row[token]) * p.kv_heads;
  if (head >= p.heads + p.kv_heads) {
    uint16_t* to = static_cast<uint16_t*>(p.v_cache) + (place + head - p.heads - p.kv_heads) * p.D;
    for (int i = lane; i < p.D; i += 32) to[i] = from[i];
    return;
  }
  const bool is_query = head < p.heads;
  const int group = p.heads / p.kv_heads, place_of_query = p.by_group ? head % group * p.kv_heads + head / group : head;
  uint16_t* to = is_query ? static_cast<uint16_t*>(p.q) + (size_t(token) * p.heads + place_of_query) * p.D
                          : static_cast<uint16_t*>(p.k_cache) + (place + head - p.heads) * p.D;
  const uint16_t* weight = static_cast<const uint16_t*>(is_query ? p.q_norm : p.k_norm);
  float norm = 1.f;
  if (weight != nullptr) {
    float squares = 0.f;
    for (int i = lane; i < p.D; i += 32) {
      const float x = E::to_float(from[i]);
      squares = fmaf(x, x, squares);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(kWarp, squares, step);
    norm = rsqrtf(squares / float(p.D) + p.eps);
  }
  const size_t angle = size_t(p.position[token]) * half;
  for (int i = lane; i < half; i += 32) {
    float low = E::to_float(from[i]), high = E::to_float(from[i + half]);
    if (weight != nullptr) {
      low = rounded(rounded(low * norm) * E::to_float(weight[i]));
      high = rounded(rounded(high * norm) * E::to_float(weight[i + half]));
    }
    const float c = p.cos[angle + i], s = p.sin[angle + i];
    to[i] = uint16_t(E::from_float(low * c - high * s));
    to[i + half] = uint16_t(E::from_float(high * c + low * s));
  }
}
