// quantize_act with one scale a token, for few tokens (with the norm for up to about a thousand) on sm_90: a cta takes a
// token, eight lanes a block.
//
// quantize_token.cu has the same meaning. What is different here is the way from launch to last store: all that does not
// depend on the previous kernel (where channels lie, the norm's weights, clips) is read before it ends; rows come in 16
// bytes; sixteen values a lane need three exchanges where four need five, so that a token of 4,096 channels takes nine
// warps, two a scheduler; and every thread finds the token's scale alone (token_scale.cuh), without exchanges.
// A warp's four blocks have one precision: INT8 blocks come first, INT4 blocks begin with a new warp.
//
// Slots and channels are those of quantize.cuh: `hadamard_in_registers` takes the start order, stores are in natural
// order, in which blocks that are not rotated are read.
//
// Definitions: ELEMENT (BFloat16, Float16), HADAMARD, FUSE, as for quantize_act.cu, with TOKENS 1, VECTOR 1, STAGE 1,
// OUT 1; MOST_BLOCKS and MOST_EIGHTS, see token_scale.cuh; GATHER (1; 0: channels come in storage order, and
// FUSE is not 1); THREADS at most, MIN_CTAS.
// K is a multiple of 8, rows are aligned to 16 bytes, a cta has at least NB / 4 + 1 warps.
#include "comet/token_scale.cuh"

using namespace comet;

constexpr int kPieces = 2; // of eight channels, that a thread stages
using Cell = typename WordOf<FUSE == 1 ? 4 : 2>::Type; // a staged channel; above its bits those of the norm's weight
static_assert(GATHER || FUSE != 1, "the norm needs the whole row");

__device__ __forceinline__ uint4 load_eight(const void* row, int c, int K) {
  return c < K ? load_once(reinterpret_cast<const uint4*>(static_cast<const char*>(row) + size_t(c) * E::kBytes)) : uint4{};
}
__device__ __forceinline__ uint4 constant_eight(const void* row, int c, int K) { // that no kernel writes
  return c < K ? __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(row) + size_t(c) * E::kBytes)) : uint4{};
}
__device__ __forceinline__ uint4 eight_of(const uint32_t (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }

// The producer's part on two channels: the sum, or SiLU times the other.
__device__ __forceinline__ uint32_t combined(uint32_t a, uint32_t b) {
  float low = E::half_to_float(a, 0), high = E::half_to_float(a, 1);
  if (FUSE == 1) return E::pair_of(__fadd_rn(low, E::half_to_float(b, 0)), __fadd_rn(high, E::half_to_float(b, 1)));
  low = sigmoid_times(low), high = sigmoid_times(high);
  E::round_pair(low, high);
  return E::pair_of(__fmul_rn(low, E::half_to_float(b, 0)), __fmul_rn(high, E::half_to_float(b, 1)));
}

// A warp's blocks, seen from one lane.
struct Place {
  int lane, block; // the lane among its eight; their block, or, where there is none, another one
  bool exists, is_int4, start_order;
  float clip, per_absmax;
  __device__ __forceinline__ explicit Place(const TokenParams& p) {
    lane = threadIdx.x % kLanesPerBlock;
    const int warp = threadIdx.x / 32, eights = p.int8_blocks, warps_of_eights = (eights + kBlocksPerWarp - 1) / kBlocksPerWarp;
    is_int4 = __any_sync(kWarp, warp >= warps_of_eights); // known to be the warp's
    const int own = (is_int4 ? eights - kBlocksPerWarp * warps_of_eights : 0) + int(threadIdx.x) / kLanesPerBlock;
    exists = own < (is_int4 ? p.NB : eights);
    block = min(own, p.NB - 1);
    start_order = HADAMARD && is_int4;
    clip = p.clip[block];
    per_absmax = is_int4 ? divide(clip, 7.f, 1.f / 7.f) : divide(clip, 127.f, 1.f / 127.f);
  }
  __device__ __forceinline__ int natural(int q) const { return 4 * (lane + 8 * (q >> 1) + 16 * (q & 1)); }
  // Channel of the row that slot 4 * q holds; the next three follow.
  __device__ __forceinline__ int channel(int q) const {
    return block * kBlock + (start_order ? 16 * lane + 4 * (q ^ (lane & 3)) : natural(q));
  }
};

// Codes of the warp's blocks -> memory.
template <bool kInt4>
__device__ __forceinline__ void store(const TokenParams& p, const Place& place, const TokenScale& scales, float ratio, int token,
                                      int lane, const float (&v)[kSlots]) {
  const int row = token % 8;
  const size_t atom = size_t(place.block) * ((p.M + 7) / 8) + token / 8;
  float step = scales.scale, factor[4] = {1.f, 1.f, 1.f, 1.f};
  uint32_t by = 1, pairs[kSlots / 2];
  bool certain = false;
  if constexpr (kInt4) {
    const float multiple = scales.multiple(ratio);
    step = __fmul_rn(step, multiple), by = uint32_t(multiple);
    if (HADAMARD) hadamard_factors(factor, lane);
    if (place.clip >= kQuickClip && step >= kQuickTiny && step <= kQuickHuge) {
      const float inverse = reciprocal_of(step) * kStep;
      certain = quick_codes(v, {inverse * factor[0], inverse * factor[1], inverse * factor[2], inverse * factor[3]}, pairs);
    }
  } else {
    const int e = scales.exponent(scales.largest_of(place.block));
    step = __fmul_rn(step, __int_as_float((e + 127) << 23));
    int* const words = p.multiples + atom * 8;
    if (place.exists && place.lane == 0) words[row] = exponent_word(scales, place.block, p.int8_blocks, e);
    if (place.exists && token == p.M - 1 && place.lane > row) words[place.lane] = 0; // tokens that fill the last atom
  }
  if (!certain) exact_codes<kInt4 ? 4 : 8>(v, factor, step, pairs);
  if (!place.exists) return;
  const uint32_t bias = (256 - kBias4 * by) * kTwice; // of (code + bias of pairs) * by; the low bytes are two's complement
  char* const to = static_cast<char*>(p.codes) + atom * 1024 + row * 128;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t low = pairs[2 * q], high = pairs[2 * q + 1];
    const uint32_t word = kInt4 ? __byte_perm(low * by + bias, high * by + bias, 0x6420) : bytes_of<kInt4>(low, high);
    store_global(to + (place.natural(q) ^ (16 * row)), word);
  }
}

// Rows of a token, as this thread loads them.
struct Rows {
#if GATHER // eight channels a piece, for staging
  uint4 a[kPieces], b[kPieces];
#else // four channels a group, those of its slots
  uint2 a[4], b[4];
#endif
  __device__ __forceinline__ void load(const TokenParams& p, const Place& place, int token) {
    const char* const x = static_cast<const char*>(p.x) + size_t(token) * (FUSE == 2 ? 2 * p.K : p.K) * E::kBytes;
    [[maybe_unused]] const char* const other =
        FUSE == 2 ? x + size_t(p.K) * E::kBytes : static_cast<const char*>(p.residual) + size_t(token) * p.K * E::kBytes;
#if GATHER
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = 8 * (threadIdx.x + i * blockDim.x);
      a[i] = load_eight(x, c, p.K);
      b[i] = FUSE == 2 || (FUSE == 1 && p.residual) ? load_eight(other, c, p.K) : uint4{};
    }
#else
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int c = place.channel(q);
      a[q] = b[q] = uint2{};
      if (c >= p.K) continue;
      a[q] = load_once(reinterpret_cast<const uint2*>(x + size_t(c) * E::kBytes));
      if (FUSE == 2) b[q] = load_once(reinterpret_cast<const uint2*>(other + size_t(c) * E::kBytes));
    }
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_row(const TokenParams p) {
  extern __shared__ __align__(16) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  const int pitch = max(p.NB + 3, 32) / 4 * 4; // of a token's ratios
  float* const ratios = reinterpret_cast<float*>(shared);
  const int token = blockIdx.x, lane = threadIdx.x % 32;
  const Place place(p);
  Rows rows;
#if GATHER
  Cell* const row = reinterpret_cast<Cell*>(ratios + pitch);
  int4 index[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int c = place.channel(q);
    index[q] = c < p.K ? __ldg(reinterpret_cast<const int4*>(p.perm + c)) : int4{c, c + 1, c + 2, c + 3};
  }
  uint4 weights[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    weights[i] = FUSE == 1 ? constant_eight(p.norm_weight, 8 * (threadIdx.x + i * blockDim.x), p.K) : uint4{};
  const float per_channel = __fdividef(1.f, float(p.K));
#endif
  wait_for_previous_kernel();
  rows.load(p, place, token);
  float v[kSlots];
#if GATHER
  float squares = 0.f, inverse = 1.f;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int c = 8 * (threadIdx.x + i * blockDim.x);
    uint32_t w[4] = {rows.a[i].x, rows.a[i].y, rows.a[i].z, rows.a[i].w};
    if (FUSE == 2 || (FUSE == 1 && p.residual)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = combined(w[j], part(rows.b[i], j));
    }
    if (FUSE == 1) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = E::half_to_float(w[j], 0), high = E::half_to_float(w[j], 1);
        squares = fmaf(high, high, fmaf(low, low, squares));
      }
    }
    if (c >= p.NB * kBlock) continue; // zeros up to there
    if constexpr (FUSE == 1) {
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t u0 = part(weights[i], j), u1 = part(weights[i], j + 1);
        *reinterpret_cast<uint4*>(row + c + 2 * j) =
            make_uint4(__byte_perm(w[j], u0, 0x5410), __byte_perm(w[j], u0, 0x7632), __byte_perm(w[j + 1], u1, 0x5410),
                       __byte_perm(w[j + 1], u1, 0x7632));
      }
      if (p.residual && c < p.K)
        *reinterpret_cast<uint4*>(static_cast<char*>(p.residual_out) + (size_t(token) * p.K + c) * E::kBytes) = eight_of(w);
    } else {
      *reinterpret_cast<uint4*>(row + c) = eight_of(w);
    }
  }
  if constexpr (FUSE == 1) {
    __shared__ __align__(16) float partial[32];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(kWarp, squares, d);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
    if (threadIdx.x >= blockDim.x / 32 && threadIdx.x < 32) partial[threadIdx.x] = 0.f;
    __syncthreads();
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < THREADS / 32; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(partial + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += __uint_as_float(part(four, j));
    }
    inverse = rsqrtf(((sums[0] + sums[1]) + (sums[2] + sums[3])) * per_channel + p.eps);
  } else {
    __syncthreads();
  }
  float scaling[FUSE == 1 ? kSlots : 1];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int at[4] = {index[q].x, index[q].y, index[q].z, index[q].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t cell = row[at[i]];
      v[4 * q + i] = E::half_to_float(cell, 0);
      if (FUSE == 1) scaling[FUSE == 1 ? 4 * q + i : 0] = E::half_to_float(cell, 1);
    }
  }
  if constexpr (FUSE == 1) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) v[i] = __fmul_rn(v[i], inverse);
    round_all(v);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) v[i] = __fmul_rn(scaling[i], v[i]);
    round_all(v);
  }
#else
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t two = FUSE == 2 ? combined(part(rows.a[q], j), part(rows.b[q], j)) : part(rows.a[q], j);
      v[4 * q + 2 * j] = E::half_to_float(two, 0), v[4 * q + 2 * j + 1] = E::half_to_float(two, 1);
    }
  }
#endif

  if (place.start_order) hadamard_in_registers(v, lane);
  float largest = block_max(largest_magnitude(v), 1);
  if (place.start_order) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
  const float ratio = __fmul_rn(largest, place.per_absmax);
  if (place.exists && place.lane == 0) ratios[place.block] = ratio;
  __syncthreads(); // with a gather the staged row, too, has been read
  const TokenScale scales(ratios, p.NB, p.int8_blocks, lane);
  if (place.is_int4)
    store<true>(p, place, scales, ratio, token, lane, v);
  else
    store<false>(p, place, scales, ratio, token, lane, v);
  if (threadIdx.x == 0) p.scale[token] = scales.scale;
  const int padding = token + 1 + int(threadIdx.x); // tokens that fill the last atom: any finite scale
  if (token == p.M - 1 && padding < (p.M + 7) / 8 * 8) p.scale[padding] = 1.f;
}
