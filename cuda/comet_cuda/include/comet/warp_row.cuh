// A token's row as quantize_few.cu and quantize_token.cu take it: with GATHER all threads stage it in shared memory, the
// norm's weights beside its channels; then a warp takes a block of 128 channels, four consecutive ones a lane.
//
// Needs the definitions of quantize_act.cu, with TOKENS 1, STAGE 1 and a 16-bit ELEMENT, and
// GATHER (1; 0: channels come in storage order, and FUSE is not 1),
// BATCH (groups of four channels that a thread loads before it stages the first).
#pragma once

#include "comet/quantize_scale.cuh"

#ifndef CTA_THREADS // that stage a row together
#define CTA_THREADS THREADS
#endif

namespace comet {

static_assert(GATHER || FUSE != 1, "the norm needs the whole row");
static_assert(E::kBytes == 2 && TOKENS == 1, "see the definitions");

// A staged channel: its bits, and above them those of the norm's weight.
using Cell = typename WordOf<FUSE == 1 ? 4 : 2>::Type;

// What does not depend on the previous kernel, for one block.
struct Block {
  bool is_int4;
  float clip;
  int4 index; // of this lane's four channels
  __device__ __forceinline__ void load(const Params& p, int block, int lane, bool four_bits) {
    block = min(block, p.NB - 1);
    is_int4 = four_bits;
    clip = p.clip[block];
    const int c = block * kBlock + 4 * lane;
    index = {c, c + 1, c + 2, c + 3};
    if constexpr (GATHER && VECTOR) {
      if (c < p.K) index = __ldg(reinterpret_cast<const int4*>(p.perm + c));
    } else if constexpr (GATHER) { // padding channels stand for themselves
      if (c < p.K) index.x = p.perm[c];
      if (c + 1 < p.K) index.y = p.perm[c + 1];
      if (c + 2 < p.K) index.z = p.perm[c + 2];
      if (c + 3 < p.K) index.w = p.perm[c + 3];
    }
  }
};

// Where x (and what is added to it or multiplied with it) of a token begins.
struct Source {
  const char *x, *other;
  bool has_x, has_other;
  __device__ __forceinline__ Source(const Params& p, int token) {
    const size_t row = size_t(token) * (FUSE == 2 ? 2 * p.K : p.K) * E::kBytes;
    x = static_cast<const char*>(p.x) + row;
    other = FUSE == 2 ? x + size_t(p.K) * E::kBytes : static_cast<const char*>(p.residual) + row;
    has_x = token < p.M;
    has_other = has_x && (FUSE == 2 || (FUSE == 1 && p.residual != nullptr));
  }
  __device__ __forceinline__ void load(const Params& p, int c, Four& a, Four& b) const {
    a = b = Four{};
    if (c >= p.K) return;
    if (has_x) a = load_four(x, size_t(c) * E::kBytes, p.K - c);
    if (has_other) b = load_four(other, size_t(c) * E::kBytes, p.K - c);
  }
  // The producer's part: the sum, or SiLU times the other; in the 16-bit type.
  __device__ __forceinline__ void combine(Four& a, const Four& b) const {
    if (FUSE == 0 || (FUSE == 1 && !has_other)) return;
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = FUSE == 2 ? sigmoid_times(channel_of(a, i)) : __fadd_rn(channel_of(a, i), channel_of(b, i));
    if (FUSE == 2) {
      round_all(h);
#pragma unroll
      for (int i = 0; i < 4; ++i) h[i] = __fmul_rn(h[i], channel_of(b, i));
    }
    make_four(h, a);
  }
};

__device__ __forceinline__ void load_weights(const Params& p, int c0, Four (&w)[BATCH]) {
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    const int c = c0 + 4 * CTA_THREADS * i;
    w[i] = Four{};
    if (FUSE == 1 && c < p.K) w[i] = load_four(static_cast<const char*>(p.norm_weight), size_t(c) * E::kBytes, p.K - c);
  }
}

// The token's row -> shared memory. Returns this thread's sum of squares.
__device__ __forceinline__ float stage_row(const Params& p, const Source& source, int token, Cell* row, Four (&w)[BATCH]) {
  const int step = 4 * CTA_THREADS * BATCH;
  const int padded = p.NB * kBlock;
  float squares = 0.f;
  for (int c0 = 4 * threadIdx.x; c0 < padded; c0 += step) {
    Four x[BATCH], other[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) source.load(p, c0 + 4 * CTA_THREADS * i, x[i], other[i]);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int c = c0 + 4 * CTA_THREADS * i;
      if (c >= padded) break;
      source.combine(x[i], other[i]);
      if constexpr (FUSE == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) squares = fmaf(channel_of(x[i], j), channel_of(x[i], j), squares);
        if (source.has_other && blockIdx.y == 0 && c < p.K)
          store_four(static_cast<char*>(p.residual_out) + size_t(token) * p.K * E::kBytes, c, p.K, x[i]);
        *reinterpret_cast<uint4*>(row + c) =
            make_uint4(__byte_perm(x[i].x, w[i].x, 0x5410), __byte_perm(x[i].x, w[i].x, 0x7632),
                       __byte_perm(x[i].y, w[i].y, 0x5410), __byte_perm(x[i].y, w[i].y, 0x7632));
      } else {
        *reinterpret_cast<Four*>(row + c) = x[i];
      }
    }
    if (FUSE == 1 && c0 + step < padded) load_weights(p, c0 + step, w);
  }
  return squares;
}

// The seven stages of `hadamard_blocks` on channels 4 * lane + i, but for the norm.
__device__ __forceinline__ void hadamard_in_warp(float (&v)[4], int lane) {
#pragma unroll
  for (int stride = 1; stride <= 2; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & stride) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = __fadd_rn(low, high);
      v[i + stride] = __fsub_rn(low, high);
    }
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float sign = lane & d ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(kWarp, v[i], d));
  }
}

// The lane's four channels of a staged row, as the producer leaves them. `inverse` is the norm's factor.
__device__ __forceinline__ void gather_values(const Cell* row, const int4& channels, float inverse, float (&v)[4]) {
  float weight[4];
  const int index[4] = {channels.x, channels.y, channels.z, channels.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t cell = row[index[i]];
    v[i] = E::half_to_float(cell, 0);
    if (FUSE == 1) v[i] = __fmul_rn(v[i], inverse), weight[i] = E::half_to_float(cell, 1);
  }
  if constexpr (FUSE == 1) {
    round_all(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(weight[i], v[i]);
    round_all(v);
  }
}

// Codes of four values times `factor`, as the low bits of 1.5 * 2^23 + code.
__device__ __forceinline__ void codes_of(const float (&v)[4], float factor, float divisor, float bound, uint32_t (&codes)[4]) {
  float power = 1.f; // both sides times a power of two: the quotient stays
  if (!(divisor >= kTiny && divisor <= kHuge)) power = divisor < kTiny ? kHuge : kTiny;
  divisor *= power;
  const float reciprocal = reciprocal_of(divisor);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float q = divide(__fmul_rn(__fmul_rn(v[i], factor), power), divisor, reciprocal);
    codes[i] = __float_as_uint(__fadd_rn(fminf(fmaxf(q, -bound), bound), kRound));
  }
}

// Such codes as bytes.
__device__ __forceinline__ uint32_t bytes_of_codes(const uint32_t (&codes)[4]) {
  return __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

// Their sum over the warp's block.
__device__ __forceinline__ float sum_of_codes(const uint32_t (&codes)[4]) {
  const uint32_t own = codes[0] + codes[1] + codes[2] + codes[3] - 4 * __float_as_uint(kRound);
  return float(int(__reduce_add_sync(kWarp, own)));
}

#if OUT != 1
// The warp's block of a token, in every layout but that of sm_90: bytes of codes, scale and sum of codes -> memory.
__device__ __forceinline__ void store_plain(const Params& p, int token, int block, int lane, bool is_int4, uint32_t bytes,
                                            float scale, float sum) {
  char* const all = static_cast<char*>(p.codes);
#if OUT == 0
  reinterpret_cast<uint32_t*>(all + (size_t(token) * p.NB + block) * kBlock)[lane] = bytes;
  if (lane == 0) p.scale[size_t(token) * p.NB + block] = scale;
#else
  char* const at = all + size_t(block) * p.M * kBlock;
  if (OUT == 2 && is_int4)
    reinterpret_cast<uint16_t*>(at)[token * 32 + lane] = pack_nibbles(bytes);
  else
    reinterpret_cast<uint32_t*>(at)[token * 32 + lane] = bytes;
  if (lane < 2) p.scale[(size_t(block) * p.M + token) * 2 + lane] = lane == 0 ? scale : sum;
#endif
}
#endif

} // namespace comet
