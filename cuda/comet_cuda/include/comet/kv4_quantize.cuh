// Quantizing for the KV4 cache: one token's values by a warp, one page's keys by a cta, or eight channels of them by a warp.
// Bit-equal to kv4_append.py.
#pragma once

#include "comet/kv4_cache.cuh"

namespace comet {

constexpr int kVectors = kDim / 8;        // 8-channel pieces of a key
constexpr int kRows = 16;                 // tokens that a cta reads at once
constexpr int kThreads = kRows * kVectors; // 2 * DIM
constexpr int kWarps = kThreads / 32;
constexpr int kLaneElements = kDim / 32;  // channels of a head that a lane holds
static_assert(kThreads % 32 == 0 && kVectors <= 32, "whole warps; a warp copies a key in one go");

struct Range {
  float scale, minimum; // f16 numbers
};
// affine.py's choose_minmax_qparams for 4 bits: both rounded to f16, the minimum first.
__device__ __forceinline__ Range choose_range(float low, float high) {
  Range r;
  r.minimum = half_to_float(float_to_half(fminf(fmaxf(low, -kHalfMax), kHalfMax)));
  const float span = __fsub_rn(high, r.minimum);
  r.scale = half_to_float(float_to_half(fminf(__fdiv_rn(span, 15.f), kHalfMax)));
  if (!(r.scale > 0.f && span > 0.f)) r.scale = 1.f;
  return r;
}
__device__ __forceinline__ uint32_t code_of(float x, Range r) {
  return uint32_t(fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(x, r.minimum), r.scale)), 0.f), 15.f));
}

// The range of one token's values, of which each lane holds some -> the same in every lane.
__device__ __forceinline__ Range range_of_token(const float (&x)[kLaneElements]) {
  float low = x[0], high = x[0];
#pragma unroll
  for (int i = 1; i < kLaneElements; ++i) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    low = fminf(low, __shfl_xor_sync(~0u, low, d));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
  }
  return choose_range(low, high);
}

// Up to eight tokens of one word, slots `slot` to `slot + count`, values at v + i * pitch: by one warp. Lane l holds
// channels l, l + 32, ...; nibbles of other tokens stay.
__device__ __forceinline__ void append_values(const Cache& c, int page, int head, int slot, int count,
                                              const uint16_t* v, size_t pitch, int lane) {
  const int at = page_head(c, page, head);
  uint32_t* words[kLaneElements];
  uint32_t word[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    words[i] = reinterpret_cast<uint32_t*>(c.v_codes + size_t(at) * kPageBytes + value_word(slot, lane + 32 * i));
    word[i] = slot % 8 || count < 8 ? *words[i] : 0u;
  }
  for (int k = 0; k < count; ++k) {
    float x[kLaneElements];
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) x[i] = E::one(v[k * pitch + lane + 32 * i]);
    const Range r = range_of_token(x);
    const int shift = 4 * ((slot + k) % 8);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) word[i] = (word[i] & ~(15u << shift)) | (code_of(x[i], r) << shift);
    if (lane == 0) {
      c.v_scale[size_t(at) * kPage + slot + k] = uint16_t(float_to_half(r.scale));
      c.v_min[size_t(at) * kPage + slot + k] = uint16_t(float_to_half(r.minimum));
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) *words[i] = word[i];
}

struct PageShared {
  uint16_t low[kRows][kDim], high[kRows][kDim];
  float scale[kDim], minimum[kDim];
};

// One page's keys -> codes, scales and minima: by the whole cta. `key(slot)` points to a token's key.
template <typename Key>
__device__ __forceinline__ void quantize_page(const Cache& c, int page, int head, const Key& key, PageShared& shared) {
  const int vector = threadIdx.x % kVectors, row = threadIdx.x / kVectors;
  const auto load = [&](int i) { return reinterpret_cast<const uint4*>(key(row + kRows * i))[vector]; };
  constexpr int kEach = kPage / kRows; // keys of a thread; read twice, which costs less than the registers to keep them
  uint4 low = load(0), high = low;
#pragma unroll 2
  for (int i = 1; i < kEach; ++i) {
    const uint4 x = load(i);
    low.x = E::smaller(low.x, x.x), low.y = E::smaller(low.y, x.y);
    low.z = E::smaller(low.z, x.z), low.w = E::smaller(low.w, x.w);
    high.x = E::larger(high.x, x.x), high.y = E::larger(high.y, x.y);
    high.z = E::larger(high.z, x.z), high.w = E::larger(high.w, x.w);
  }
  reinterpret_cast<uint4*>(shared.low[row])[vector] = low;
  reinterpret_cast<uint4*>(shared.high[row])[vector] = high;
  __syncthreads();
  const int at = page_head(c, page, head);
  for (int d = threadIdx.x; d < kDim; d += kThreads) {
    float smallest = E::one(shared.low[0][d]), largest = E::one(shared.high[0][d]);
#pragma unroll
    for (int i = 1; i < kRows; ++i) {
      smallest = fminf(smallest, E::one(shared.low[i][d]));
      largest = fmaxf(largest, E::one(shared.high[i][d]));
    }
    const Range r = choose_range(smallest, largest);
    shared.scale[d] = r.scale, shared.minimum[d] = r.minimum;
    c.k_scale[size_t(at) * kDim + d] = uint16_t(float_to_half(r.scale));
    c.k_min[size_t(at) * kDim + d] = uint16_t(float_to_half(r.minimum));
  }
  __syncthreads();
  Range r[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) r[i] = {shared.scale[8 * vector + i], shared.minimum[8 * vector + i]};
  uint8_t* codes = c.k_codes + size_t(at) * kPageBytes;
#pragma unroll 1
  for (int i = 0; i < kEach; ++i) {
    const uint4 x = load(i);
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      word |= code_of(j % 2 ? E::high(pairs[j / 2]) : E::low(pairs[j / 2]), r[j]) << (4 * j);
    *reinterpret_cast<uint32_t*>(codes + key_word(row + kRows * i, vector)) = word;
  }
}

// code_of without a division: `inverse` is 1 / scale, rounded. A scale has 11 bits, so the remainder is exact and the
// quotient, once corrected, is the one that a division rounds to. Adding 1.5 * 2^23 rounds it to an integer.
__device__ __forceinline__ uint32_t code_of(float x, Range r, float inverse) {
  const float a = __fsub_rn(x, r.minimum), q = fminf(__fmul_rn(a, inverse), 1e6f); // an infinite q has no remainder
  const float corrected = fmaf(fmaf(-q, r.scale, a), inverse, q);
  return __float_as_uint(__fadd_rn(fminf(fmaxf(corrected, 0.f), 15.f), 12582912.f)) & 15u;
}

// Channels 8 * vector .. + 7 of one complete page's keys -> codes, scales and minima: by one warp, without a barrier. Lane l
// holds the keys of slots l, l + 32, ...; newest() gives the last one [D], which `open` does not hold yet.
template <typename Newest>
__device__ __forceinline__ void quantize_piece(const Cache& c, int page, int head, int vector, const uint16_t* open,
                                               const Newest& newest, int lane) {
  constexpr int kEach = kPage / 32;
  const uint4* keys = reinterpret_cast<const uint4*>(open + lane * kDim) + vector;
#pragma unroll
  for (int i = 0; i < kEach; ++i) prefetch_l2(keys + 32 * i * kVectors); // on the way while the newest is found
  const uint16_t* last = newest();
  uint4 x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    x[i] = *(i == kEach - 1 && lane == 31 ? reinterpret_cast<const uint4*>(last) + vector : keys + 32 * i * kVectors);
  uint32_t low[4] = {x[0].x, x[0].y, x[0].z, x[0].w}, high[4] = {x[0].x, x[0].y, x[0].z, x[0].w};
#pragma unroll
  for (int i = 1; i < kEach; ++i) {
    const uint32_t pairs[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) low[j] = E::smaller(low[j], pairs[j]), high[j] = E::larger(high[j], pairs[j]);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      low[j] = E::smaller(low[j], __shfl_xor_sync(~0u, low[j], d));
      high[j] = E::larger(high[j], __shfl_xor_sync(~0u, high[j], d));
    }
  const int mine = lane % 8; // the channel whose range this lane finds
  const uint32_t lows = mine < 4 ? (mine < 2 ? low[0] : low[1]) : mine < 6 ? low[2] : low[3];
  const uint32_t highs = mine < 4 ? (mine < 2 ? high[0] : high[1]) : mine < 6 ? high[2] : high[3];
  const Range r = choose_range(mine % 2 ? E::high(lows) : E::low(lows), mine % 2 ? E::high(highs) : E::low(highs));
  const float inverse = __fdiv_rn(1.f, r.scale);
  const int at = page_head(c, page, head);
  if (lane < 8) {
    c.k_scale[size_t(at) * kDim + 8 * vector + lane] = uint16_t(float_to_half(r.scale));
    c.k_min[size_t(at) * kDim + 8 * vector + lane] = uint16_t(float_to_half(r.minimum));
  }
  uint32_t words[kEach] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const Range its = {__shfl_sync(~0u, r.scale, j), __shfl_sync(~0u, r.minimum, j)};
    const float its_inverse = __shfl_sync(~0u, inverse, j);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t pair = j < 4 ? (j < 2 ? x[i].x : x[i].y) : j < 6 ? x[i].z : x[i].w;
      words[i] |= code_of(j % 2 ? E::high(pair) : E::low(pair), its, its_inverse) << (4 * j);
    }
  }
  uint8_t* codes = c.k_codes + size_t(at) * kPageBytes;
#pragma unroll
  for (int i = 0; i < kEach; ++i) *reinterpret_cast<uint32_t*>(codes + key_word(lane + 32 * i, vector)) = words[i];
}

} // namespace comet
