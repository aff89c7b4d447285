// quantize_act for few tokens: a warp takes a block of one token.
//
// quantize_act.cu spends as few instructions a value as it can; this kernel makes the way from its launch to its last
// store short. A lane holds four consecutive channels, so a block's largest magnitude and sum of codes are one reduction
// instruction each, its precision is the warp's own, and one piece of code serves both precisions. With GATHER the
// threads of a cta stage the token's row first. The norm's weights stand beside the channels there and are gathered with
// them, so that the gather's barrier is the only one: it also serves the sum of squares. gridDim.y ctas share a token.
//
// Definitions: as for quantize_act.cu, with TOKENS 1, VECTOR 1, STAGE 1 and a 16-bit ELEMENT; and
// GATHER (1; 0: channels come in storage order, and FUSE is not 1),
// BATCH (groups of four channels that a thread loads before it stages the first).
#include "comet/warp_row.cuh"

using namespace comet;

constexpr int kWarps = THREADS / 32;
static_assert(VECTOR, "see the definitions");

__device__ __forceinline__ bool has_int4(const Params& p, int block) { return p.bits[min(block, p.NB - 1)] == 4; }

// The scale of a block.
__device__ __forceinline__ float scale_of(const Block& info, float largest) {
  const float ratio = __fmul_rn(largest, info.is_int4 ? divide(info.clip, 7.f, 1.f / 7.f) : divide(info.clip, 127.f, 1.f / 127.f));
  return ratio > 0.f ? ratio : 1.f;
}

// Codes, scale and sum of the warp's block -> memory.
__device__ __forceinline__ void store_block(const Params& p, int token, int block, int lane, bool is_int4, const uint32_t (&codes)[4],
                                            float scale, float sum) {
  uint32_t bytes = bytes_of_codes(codes);
#if OUT == 1
  const int atoms = (p.M + 7) / 8, row = token % 8;
  const size_t atom = size_t(block) * atoms + token / 8;
  if (is_int4) {
    float q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = __fsub_rn(__uint_as_float(codes[i]), kRound);
    bytes = e4m3_of(q[0], q[1]) | uint32_t(e4m3_of(q[2], q[3])) << 16;
  }
  *reinterpret_cast<uint32_t*>(static_cast<char*>(p.codes) + atom * 1024 + row * 128 + ((4 * lane) ^ (16 * row))) = bytes;
  if (lane < 2) p.scale[atom * 16 + 4 * (row / 2) + row % 2 + 2 * lane] = lane == 0 ? scale : sum;
#else
  store_plain(p, token, block, lane, is_int4, bytes, scale, sum);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_few(const Params p) {
  extern __shared__ __align__(16) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  const int lane = threadIdx.x % 32, warp = __shfl_sync(kWarp, threadIdx.x / 32, 0), token = blockIdx.x;
  int block = blockIdx.y * kWarps + warp;
  Block info;
  info.load(p, block, lane, has_int4(p, block));
  const Source source(p, token);
  float inverse = 1.f;
  const Cell* const row = reinterpret_cast<const Cell*>(shared);
#if GATHER
  Four w[BATCH];
  load_weights(p, 4 * threadIdx.x, w);
  wait_for_previous_kernel();
  float squares = stage_row(p, source, token, reinterpret_cast<Cell*>(shared), w);
  if constexpr (FUSE == 1) {
    __shared__ __align__(16) float partial[kWarps];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(kWarp, squares, d);
    if (lane == 0) partial[warp] = squares;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += partial[i];
    inverse = rsqrtf(__fdividef(sum, float(p.K)) + p.eps);
  } else {
    __syncthreads();
  }
#else
  wait_for_previous_kernel();
#endif
  for (int first = blockIdx.y * kWarps; first < p.NB; first += gridDim.y * kWarps) { // the same for all warps
    float v[4];
    if constexpr (GATHER) {
      gather_values(row, info.index, inverse, v);
    } else {
      Four a, b;
      source.load(p, min(block, p.NB - 1) * kBlock + 4 * lane, a, b);
      source.combine(a, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = channel_of(a, i);
    }
    const bool rotated = HADAMARD && info.is_int4;
    const float factor = rotated ? kHadamardNorm : 1.f;
    if (rotated) hadamard_in_warp(v, lane);
    const float own = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    const float largest = __uint_as_float(__reduce_max_sync(kWarp, __float_as_uint(own))); // ordered as integers
    const float scale = scale_of(info, __fmul_rn(largest, factor));
    uint32_t codes[4];
    codes_of(v, factor, scale, info.is_int4 ? 7.f : 127.f, codes);
    float sum = 0.f;
    if constexpr (OUT != 0) sum = sum_of_codes(codes);
    if (block < p.NB && (OUT == 1 || token < p.M)) store_block(p, token, block, lane, info.is_int4, codes, scale, sum);
    block += gridDim.y * kWarps;
    if (block < p.NB) info.load(p, block, lane, has_int4(p, block));
  }
}
