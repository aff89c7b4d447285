// quantize_act with scales that are integer multiples of one number a token (quantize_token_ref.py): a cta, or a cluster
// of ctas where there are few tokens, takes a token.
//
// First every warp finds the largest magnitudes of its blocks and leaves the scale that each would choose alone in shared
// memory; after one barrier every warp finds the token's scale from all of them (token_scale.cuh), then its blocks'
// multiples and codes. The values stay in registers between the two (KEEP), or, where rows are too wide, are computed
// again from the staged row. Rows, gather and norm are those of warp_row.cuh.
//
// Out, with OUT 1, for the sm_90 GEMM that keeps its sums in integers: codes as in weight_layout.py, INT4 codes times
// their block's multiple; `scale` f32 [A * 8], the token's scale; `multiples`, of INT8 blocks alone, because codes of INT4
// blocks hold theirs. With OUT 0, 2 and 3: what quantize_act.cu writes, for every other GEMM, whose scales are a block's.
//
// Definitions: as for warp_row.cuh; ROUNDS (blocks a warp takes), KEEP; CLUSTER (ctas a token, and
// gridDim.y); THREADS is the most that a cta may have and MIN_CTAS how many ctas a multiprocessor's registers must allow.
#define CTA_THREADS int(blockDim.x)
#include "comet/cluster.cuh"
#include "comet/token_scale.cuh"
#include "comet/warp_row.cuh"

using namespace comet;

static_assert(CLUSTER == 1 || KEEP, "see the number of rounds");

// The number of INT8 blocks, which come first.
#if OUT == 1
using Arguments = TokenParams;
__device__ __forceinline__ int count_int8(const Arguments& p, int) { return p.int8_blocks; }
#else
using Arguments = Params;
__device__ __forceinline__ int count_int8(const Arguments& p, int lane) {
  uint32_t own = 0;
  for (int b = lane; b < p.NB; b += 32) own += p.bits[b] == 8;
  return int(__reduce_add_sync(kWarp, own));
}
#endif

// A token's blocks as one warp sees them.
struct WarpBlocks {
  const Arguments& p;
  const Cell* row; // staged, with GATHER
  float* ratios;   // [NB], what each block's scale would be alone
  Source source;
  int lane, token, int8_blocks;
  float inverse; // of the norm

  // Blocks of the warp: round after round.
  __device__ __forceinline__ int block(int round) const {
    return ((round * CLUSTER + int(blockIdx.y)) * CTA_THREADS + int(threadIdx.x)) / 32;
  }

  __device__ __forceinline__ void read(const Block& info, int block, float (&v)[4]) const {
    if constexpr (GATHER) {
      gather_values(row, info.index, inverse, v);
    } else {
      Four a, b;
      source.load(p, min(block, p.NB - 1) * kBlock + 4 * lane, a, b);
      convert(a, b, v);
    }
  }
  __device__ __forceinline__ void convert(Four a, const Four& b, float (&v)[4]) const {
    source.combine(a, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = channel_of(a, i);
  }
  // Rotates the values (but for the norm) and leaves the block's ratio.
  __device__ __forceinline__ void leave_ratio(const Block& info, int block, float (&v)[4]) const {
    const bool rotated = HADAMARD && info.is_int4;
    if (rotated) hadamard_in_warp(v, lane);
    const float own = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    float largest = __uint_as_float(__reduce_max_sync(kWarp, __float_as_uint(own)));
    if (rotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
    const float per_absmax = info.is_int4 ? divide(info.clip, 7.f, 1.f / 7.f) : divide(info.clip, 127.f, 1.f / 127.f);
    const float ratio = __fmul_rn(largest, per_absmax);
#if CLUSTER > 1
    if (lane < CLUSTER && block < p.NB) store_in_cta(ratios + block, lane, ratio);
#else
    if (lane == 0 && block < p.NB) ratios[block] = ratio;
#endif
  }
  // Codes of rotated values -> memory.
  __device__ __forceinline__ void store(int block, const TokenScale& scales, const float (&v)[4]) const {
    if (block >= p.NB) return;
    const bool is_int4 = block >= int8_blocks;
    [[maybe_unused]] const int row_of_atom = token % 8;
    [[maybe_unused]] const size_t atom = size_t(block) * ((p.M + 7) / 8) + token / 8;
    uint32_t by = 1;
    float step;
    if (is_int4) {
      const float multiple = scales.multiple(ratios[block]);
      step = __fmul_rn(scales.scale, multiple);
      by = uint32_t(multiple);
    } else {
      const int e = scales.exponent(scales.largest_of(block));
      step = __fmul_rn(scales.scale, __int_as_float((e + 127) << 23));
#if OUT == 1
      int* const words = p.multiples + atom * 8;
      const int word = exponent_word(scales, block, int8_blocks, e);
      if (lane == 0) words[row_of_atom] = word;
      if (token == p.M - 1 && lane > row_of_atom && lane < 8) words[lane] = 0; // tokens that fill the last atom
#endif
    }
    uint32_t codes[4];
    codes_of(v, HADAMARD && is_int4 ? kHadamardNorm : 1.f, step, is_int4 ? 7.f : 127.f, codes);
#if OUT == 1
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] *= by; // the low byte of (1.5 * 2^23 + code) * by is that of code * by
    char* const to = static_cast<char*>(p.codes) + atom * 1024 + row_of_atom * 128;
    *reinterpret_cast<uint32_t*>(to + ((4 * lane) ^ (16 * row_of_atom))) = bytes_of_codes(codes);
#else
    store_plain(p, token, block, lane, is_int4, bytes_of_codes(codes), step, OUT == 0 ? 0.f : sum_of_codes(codes));
#endif
  }
};

extern "C" __global__ void CLUSTER_OF_CTAS __launch_bounds__(THREADS, MIN_CTAS) quantize_token(const Arguments p) {
  extern __shared__ __align__(16) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
#if CLUSTER > 1
  cluster_arrive(); // this cta's shared memory may be written to
#endif
  float* const ratios = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, token = blockIdx.x;
  Cell* const row = reinterpret_cast<Cell*>(shared + (p.NB + 3) / 4 * 16); // behind the ratios
  const int int8_blocks = count_int8(p, lane); // nothing here depends on the previous kernel
  WarpBlocks warp{p, row, ratios, Source(p, token), lane, token, int8_blocks, 1.f};
  Block info;
  info.load(p, warp.block(0), lane, warp.block(0) >= int8_blocks);
#if GATHER
  Four w[BATCH];
  load_weights(p, 4 * threadIdx.x, w);
  wait_for_previous_kernel();
  float squares = stage_row(p, warp.source, token, row, w);
  if constexpr (FUSE == 1) {
    __shared__ float partial[32];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(kWarp, squares, d);
    if (lane == 0) partial[threadIdx.x / 32] = squares;
    __syncthreads();
    float sum = lane < CTA_THREADS / 32 ? partial[lane] : 0.f;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kWarp, sum, d);
    warp.inverse = rsqrtf(__fdividef(sum, float(p.K)) + p.eps);
  } else {
    __syncthreads();
  }
#else
  wait_for_previous_kernel();
#endif

  float v[KEEP ? ROUNDS : 1][4];
#if KEEP && !GATHER // all loads before the first use
  Four a[ROUNDS], b[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) warp.source.load(p, min(warp.block(i), p.NB - 1) * kBlock + 4 * lane, a[i], b[i]);
#endif
#if CLUSTER > 1
  cluster_wait();
#endif
  const int rounds = KEEP ? ROUNDS : (32 * p.NB + CTA_THREADS - 1) / CTA_THREADS; // with CLUSTER 1
#if KEEP
#pragma unroll
#endif
  for (int i = 0; i < rounds; ++i) {
    float (&mine)[4] = v[KEEP ? i : 0];
#if KEEP && !GATHER
    warp.convert(a[i], b[i], mine);
#else
    warp.read(info, warp.block(i), mine);
#endif
    warp.leave_ratio(info, warp.block(i), mine);
    if (i + 1 < rounds) info.load(p, warp.block(i + 1), lane, warp.block(i + 1) >= int8_blocks);
  }
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
  const TokenScale scales(ratios, p.NB, int8_blocks, lane, ROUNDS <= 4);
#if KEEP
#pragma unroll
#endif
  for (int i = 0; i < rounds; ++i) {
    if constexpr (!KEEP) {
      info.load(p, warp.block(i), lane, warp.block(i) >= int8_blocks);
      warp.read(info, warp.block(i), v[0]);
      if (HADAMARD && info.is_int4) hadamard_in_warp(v[0], lane);
    }
    warp.store(warp.block(i), scales, v[KEEP ? i : 0]);
  }
#if OUT == 1
  if (blockIdx.y != 0) return;
  if (threadIdx.x == 0) p.scale[token] = scales.scale;
  const int padding = token + 1 + int(threadIdx.x); // tokens that fill the last atom: any finite scale
  if (token == p.M - 1 && padding < (p.M + 7) / 8 * 8) p.scale[padding] = 1.f;
#endif
}
