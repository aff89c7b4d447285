// quantize_act with scales that are integer multiples of one number a token (share = TOKEN, see quantize_act.py), for the
// sm_90 GEMM that keeps its sums in integers: a cta takes a token.
//
// First every warp finds the largest magnitudes of its blocks and leaves the scale that each would choose alone in shared
// memory; after one barrier every warp finds the token's scale from all of them (the same additions in the same order, so
// all agree), then its blocks' multiples and codes. The values stay in registers between the two (KEEP), or, where rows
// are too wide, are computed again from the staged row. Rows, gather and norm are those of warp_row.cuh.
//
// Out: codes as in weight_layout.py, INT4 codes times their block's multiple; `scale` f32 [A * 8], the token's scale;
// `multiples` int32 [NB, A, 8], of INT8 blocks alone, because codes of INT4 blocks hold theirs.
//
// Definitions: as for warp_row.cuh, with OUT 1 and SHARE 1; ROUNDS (blocks a warp takes), KEEP; THREADS is the most that a
// cta may have and MIN_CTAS how many ctas a multiprocessor's registers must allow.
#define CTA_THREADS int(blockDim.x)
#include "comet/warp_row.cuh"

using namespace comet;

struct TokenParams : Params {
  int* multiples; // [NB, A, 8]
};

// Scales of a token: what INT4 blocks may be at most over it, and the sum of INT8 blocks'.
constexpr float kMostOfInt4 = 18.f, kMostOfInt8 = 1000.f;
constexpr float kPerInt4 = 1.f / 18.f, kPerInt8 = 1.f / 500.f;

// What a block leaves for all warps: the scale it would choose alone (negative, or -0, for INT4) and its unit.
struct Ratio {
  float signed_ratio, unit;
  __device__ __forceinline__ bool is_int4() const { return __float_as_int(signed_ratio) < 0; }
  __device__ __forceinline__ float value() const { return fabsf(signed_ratio); }
};

// The token's scale S, from all blocks' ratios; the same in every lane of every warp.
__device__ __forceinline__ float token_scale(const Ratio* ratios, int blocks, int lane) {
  uint32_t top = 0; // non-negative floats are ordered as integers
  float eights = 0.f;
  for (int b = lane; b < blocks; b += 32) {
    const Ratio ratio = ratios[b];
    if (ratio.is_int4())
      top = max(top, __float_as_uint(ratio.value()));
    else
      eights = __fadd_rn(eights, ratio.value());
  }
  top = __reduce_max_sync(kWarp, top);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) eights = __fadd_rn(eights, __shfl_xor_sync(kWarp, eights, d));
  const float least = fmaxf(__fmul_rn(__uint_as_float(top), kPerInt4), __fmul_rn(eights, kPerInt8));
  const uint32_t rounded_up = (__float_as_uint(least) + 0xFFFu) & ~0xFFFu; // 12 significant bits
  return least > 0.f ? fmaxf(__uint_as_float(rounded_up), kTiny) : 1.f;
}

// A block's multiple of the token's scale. Below 1 the quotient may be off (divide in codes.cuh), but counts as 1.
__device__ __forceinline__ float multiple_of(const Ratio& ratio, float scale, float reciprocal) {
  const float q = scale <= kHuge ? divide(ratio.value(), scale, reciprocal) : __fdiv_rn(ratio.value(), scale);
  if (!ratio.is_int4()) return fminf(fmaxf(ceilf(q), 1.f), kMostOfInt8);
  const float nearest = __fsub_rn(__fadd_rn(fminf(q, kMostOfInt4), kRound), kRound);
  return fmaxf(nearest, 1.f);
}

// A token's blocks as one warp sees them.
struct WarpBlocks {
  const TokenParams& p;
  const Cell* row; // staged, with GATHER
  Ratio* ratios;   // [NB]
  Source source;
  int lane, token;
  float inverse; // of the norm

  // Blocks of the warp: round after round.
  __device__ __forceinline__ int block(int round) const { return (round * CTA_THREADS + int(threadIdx.x)) / 32; }

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
  __device__ __forceinline__ void leave_ratio(const Block& info, float unit, int block, float (&v)[4]) const {
    const bool rotated = HADAMARD && info.is_int4;
    if (rotated) hadamard_in_warp(v, lane);
    const float own = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    float largest = __uint_as_float(__reduce_max_sync(kWarp, __float_as_uint(own)));
    if (rotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
    const float per_absmax = info.is_int4 ? __fdiv_rn(info.clip, __fmul_rn(7.f, unit)) : divide(info.clip, 127.f, 1.f / 127.f);
    const float ratio = __fmul_rn(largest, per_absmax);
    if (lane == 0 && block < p.NB) ratios[block] = {info.is_int4 ? -ratio : ratio, unit};
  }
  // Codes of rotated values -> memory.
  __device__ __forceinline__ void store(int block, float scale, float reciprocal, const float (&v)[4]) const {
    if (block >= p.NB) return;
    const Ratio ratio = ratios[block];
    const bool is_int4 = ratio.is_int4();
    const float multiple = multiple_of(ratio, scale, reciprocal);
    float step = __fmul_rn(scale, multiple);
    if (is_int4) step = __fmul_rn(step, ratio.unit);
    uint32_t codes[4];
    codes_of(v, HADAMARD && is_int4 ? kHadamardNorm : 1.f, step, is_int4 ? 7.f : 127.f, codes);
    const uint32_t by = is_int4 ? uint32_t(multiple) : 1u; // the low byte of (1.5 * 2^23 + code) * by is that of code * by
    const uint32_t bytes = __byte_perm(__byte_perm(codes[0] * by, codes[1] * by, 0x0040),
                                       __byte_perm(codes[2] * by, codes[3] * by, 0x0040), 0x5410);
    const int row_of_atom = token % 8;
    const size_t atom = size_t(block) * ((p.M + 7) / 8) + token / 8;
    char* const to = static_cast<char*>(p.codes) + atom * 1024 + row_of_atom * 128;
    *reinterpret_cast<uint32_t*>(to + ((4 * lane) ^ (16 * row_of_atom))) = bytes;
    if (!is_int4 && lane == 0) p.multiples[atom * 8 + row_of_atom] = int(multiple);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_token(const TokenParams p) {
  extern __shared__ __align__(16) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  Ratio* const ratios = reinterpret_cast<Ratio*>(shared);
  const int lane = threadIdx.x % 32, token = blockIdx.x;
  Cell* const row = reinterpret_cast<Cell*>(shared + (p.NB + 1) / 2 * 16); // behind the ratios
  WarpBlocks warp{p, row, ratios, Source(p, token), lane, token, 1.f};
  Block info; // nothing here depends on the previous kernel
  info.load(p, warp.block(0), lane);
  float unit = unit_of(p, warp.block(0));
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
  const int rounds = KEEP ? ROUNDS : (32 * p.NB + CTA_THREADS - 1) / CTA_THREADS;
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
    warp.leave_ratio(info, unit, warp.block(i), mine);
    if (i + 1 < rounds) info.load(p, warp.block(i + 1), lane), unit = unit_of(p, warp.block(i + 1));
  }
  __syncthreads();
  const float scale = token_scale(ratios, p.NB, lane);
  const float reciprocal = reciprocal_of(scale <= kHuge ? scale : 1.f);
#if KEEP
#pragma unroll
#endif
  for (int i = 0; i < rounds; ++i) {
    if constexpr (!KEEP) {
      info.load(p, warp.block(i), lane);
      warp.read(info, warp.block(i), v[0]);
      if (HADAMARD && info.is_int4) hadamard_in_warp(v[0], lane);
    }
    warp.store(warp.block(i), scale, reciprocal, v[KEEP ? i : 0]);
  }
  if (threadIdx.x == 0) p.scale[token] = scale;
  const int padding = token + 1 + int(threadIdx.x); // tokens that fill the last atom: any finite scale
  if (token == p.M - 1 && padding < (p.M + 7) / 8 * 8) p.scale[padding] = 1.f;
}
