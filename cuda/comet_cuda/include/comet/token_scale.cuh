// The scale of a token, of which the scales of all its blocks are integer multiples (quantize_token_ref.py has the rules).
//
// Every block leaves its ratio, the scale it would choose alone, in shared memory; after a barrier every warp finds the
// token's scale from all of them: the same additions in the same order, so all agree and no second barrier is needed.
// INT8 blocks come first, in groups of 1, 2, 4, 8, ... Each takes the largest ratio of the INT8 blocks from its group on,
// so that multiples do not grow. A warp keeps these maxima in its registers, one a group: the ratios, which other warps may
// still be reading, stay as they are.
#pragma once

#include "comet/quantize_scale.cuh"

// Two ways to the sum over INT8 blocks: exchanges between lanes, or, where MOST_BLOCKS says how many blocks there may be
// and MOST_EIGHTS (8, 16, 32) how many INT8 blocks, every thread alone.
#ifndef MOST_BLOCKS
#define MOST_BLOCKS 0
#endif

namespace comet {

struct TokenParams : Params {
  int int8_blocks;
};

constexpr float kPerInt4 = 1.f / 18.f, kPerInt8 = 1.f / 250.f; // of the largest INT4 ratio; of the INT8 blocks' sum
constexpr float kMostOfInt4 = 18.f;
constexpr uint32_t kDroppedBits = 0xFFF; // a scale keeps 12 significant bits

// The first INT8 block of the group of block b: 0, 1, 1, 3, 3, 3, 3, 7, ...
__device__ __forceinline__ int begin_of_group(int b) { return int(0x80000000u >> __clz(b + 1)) - 1; }

// The sum of the INT8 blocks' maxima, the same in all lanes; that of group g is left in lane g's `of_group`. Up to kWidth
// blocks (or any number, if it is 32) and no more exchanges than they need: the lanes beyond repeat those before.
template <int kWidth>
__device__ __forceinline__ float sum_of_groups(const float* ratios, int eights, int lane, uint32_t& of_group) {
  const uint32_t own_begin = (1u << lane) - 1; // of this lane's group
  float sum = 0.f;
  for (int first = 0; first < (kWidth < 32 ? 1 : eights); first += 32) {
    const int b = first + lane % kWidth, begin = begin_of_group(b);
    uint32_t largest = b < eights ? __float_as_uint(ratios[b]) : 0u;
    if (kWidth == 32 && first + 32 < eights) {
      uint32_t later = 0;
      for (int j = b + 32; j < eights; j += 32) later = max(later, __float_as_uint(ratios[j]));
      largest = max(largest, __reduce_max_sync(kWarp, later));
    }
#pragma unroll
    for (int d = 1; d < kWidth; d *= 2) largest = max(largest, __shfl_down_sync(kWarp, largest, d, kWidth)); // or its own
    uint32_t shared_by_group = __shfl_sync(kWarp, largest, begin % kWidth, kWidth);
    const uint32_t begun = __shfl_sync(kWarp, largest, int(own_begin % kWidth), kWidth);
    if (kWidth < 32 || own_begin - first < 32u) of_group = begun;
    if (kWidth == 32 && first > 0) { // where most blocks' group began before
      const uint32_t before = __shfl_sync(kWarp, of_group, 31 - __clz(b + 1));
      if (begin < first) shared_by_group = before;
    }
    if (b < eights) sum = __fadd_rn(sum, __uint_as_float(shared_by_group));
  }
#pragma unroll
  for (int d = kWidth / 2; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kWarp, sum, d));
  return sum;
}

// The same sum, found by every thread alone from up to kMost INT8 blocks: exchanges between lanes would be waited for one
// after the other. `ratios` stay; `largest` becomes the maximum of each group and all after it.
constexpr int kGroups = 6; // of 32 blocks
__device__ __forceinline__ constexpr int group_of(int b) { return b < 1 ? 0 : b < 3 ? 1 : b < 7 ? 2 : b < 15 ? 3 : b < 31 ? 4 : 5; }
// The butterfly's sum over blocks b, b + d, b + 2 * d, ...
template <int kMost, int b, int d> __device__ __forceinline__ float exchanged_sum(const uint32_t (&largest)[kGroups], int eights) {
  if constexpr (d < kMost)
    return __fadd_rn(exchanged_sum<kMost, b, 2 * d>(largest, eights), exchanged_sum<kMost, b + d, 2 * d>(largest, eights));
  return b < eights ? __uint_as_float(largest[group_of(b)]) : 0.f;
}
template <int kMost> __device__ __forceinline__ float sum_by_thread(const float* ratios, int eights, uint32_t (&largest)[kGroups]) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) largest[group] = 0;
#pragma unroll
  for (int first = 0; first < kMost; first += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(ratios + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int b = first + i;
      uint32_t& most = largest[group_of(b)];
      most = max(most, b < eights ? part(four, i) : 0u);
    }
  }
#pragma unroll
  for (int group = kGroups - 2; group >= 0; --group) largest[group] = max(largest[group], largest[group + 1]);
  return exchanged_sum<kMost, 0, 1>(largest, eights);
}

struct TokenScale {
  float scale, reciprocal;
#if MOST_BLOCKS
  uint32_t largest[kGroups]; // of each group and all after it
#else
  uint32_t of_group = 0; // the same, of the lane's group
#endif

  // From ratios f32 [blocks] in shared memory, of which the first `eights` are INT8 blocks'. Whole warps. `two_forms`: a
  // short one for few INT8 blocks beside the general one, which costs registers.
  __device__ __forceinline__ TokenScale(const float* ratios, int blocks, int eights, int lane, bool two_forms = true) {
#if MOST_BLOCKS
    uint32_t top = 0; // of INT4 blocks; non-negative floats are ordered as integers
#pragma unroll
    for (int first = 0; first < MOST_BLOCKS; first += 32) {
      const int b = first + lane;
      top = max(top, b >= eights && b < blocks ? __float_as_uint(ratios[b]) : 0u);
    }
    top = __reduce_max_sync(kWarp, top);
    const float sum = sum_by_thread<MOST_EIGHTS>(ratios, eights, largest);
    const float first = __uint_as_float(largest[0]); // of the INT8 blocks' maxima
#else
    uint32_t top = 0, most = 0; // of INT4 and INT8 blocks; non-negative floats are ordered as integers
    for (int b = lane; b < blocks; b += 32) {
      const uint32_t ratio = __float_as_uint(ratios[b]);
      if (b < eights)
        most = max(most, ratio);
      else
        top = max(top, ratio);
    }
    top = __reduce_max_sync(kWarp, top);
    float first = 0.f, sum = 0.f; // of the INT8 blocks' maxima: the first, and all
    if (eights > 0) {
      first = __uint_as_float(__reduce_max_sync(kWarp, most));
      sum = two_forms && eights <= 8 ? sum_of_groups<8>(ratios, eights, lane, of_group)
                                     : sum_of_groups<32>(ratios, eights, lane, of_group);
    }
#endif
    choose(top, first, sum);
  }
#if !MOST_BLOCKS
  // From the largest ratio of INT4 blocks, and the ratios of the INT8 blocks in shared memory. One warp, whose lanes are left
  // what INT8 blocks of their number's group count as.
  __device__ __forceinline__ TokenScale(uint32_t top, const float* ratios, int eights, int lane, uint32_t& of_group) {
    float first, sum;
    if (eights <= 32) { // without exchanges, which would follow each other
      uint32_t largest[kGroups];
      sum = sum_by_thread<32>(ratios, eights, largest);
      of_group = 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) of_group = lane == group ? largest[group] : of_group;
      first = __uint_as_float(largest[0]);
    } else {
      sum = sum_of_groups<32>(ratios, eights, lane, of_group);
      first = __uint_as_float(__shfl_sync(kWarp, of_group, 0)); // the largest of all
    }
    choose(top, first, sum);
  }
  // What another warp has found.
  __device__ __forceinline__ TokenScale(float found, float inverse) : scale(found), reciprocal(inverse) {}
#endif

  // top: of INT4 blocks, first and sum: of the INT8 blocks' maxima.
  __device__ __forceinline__ void choose(uint32_t top, float first, float sum) {
    float least = fmaxf(__fmul_rn(__uint_as_float(top), kPerInt4), __fmul_rn(sum, kPerInt8));
    if (first > least) { // at most 250 times, as the sum holds it: the first group's ratio becomes a power of two
      // The exponent of first / least, without the division: the quotient of two mantissas never rounds up to 1. Where
      // least is subnormal this may be another number, and the scale becomes kTiny either way.
      const int steps = __float_as_int(first) - __float_as_int(least) >> 23;
      least = fmaxf(least, __fmul_rn(first, __int_as_float((127 - steps) << 23)));
    }
    const float rounded_up = __uint_as_float((__float_as_uint(least) + kDroppedBits) & ~kDroppedBits);
    scale = least > 0.f ? fmaxf(rounded_up, kTiny) : 1.f;
    reciprocal = reciprocal_of(scale <= kHuge ? scale : 1.f);
  }

  // A ratio over the scale. Far below 1 the quotient may be off (codes.cuh), but counts as 1 anyway.
  __device__ __forceinline__ float over(float ratio) const {
    return scale <= kHuge ? divide(ratio, scale, reciprocal) : __fdiv_rn(ratio, scale);
  }
  // Multiple of an INT4 block.
  __device__ __forceinline__ float multiple(float ratio) const {
    return fmaxf(__fsub_rn(__fadd_rn(fminf(over(ratio), kMostOfInt4), kRound), kRound), 1.f);
  }
  // What INT8 block b counts as: the maximum of its group and all after it. Whole warps, but for MOST_BLOCKS.
  __device__ __forceinline__ float largest_of(int b) const {
#if MOST_BLOCKS
    uint32_t found = largest[0];
#pragma unroll
    for (int group = 1; group < kGroups; ++group) found = b + 1 >= 1 << group ? largest[group] : found;
    return __uint_as_float(found);
#else
    asm volatile("" : "+r"(b)); // find the group again rather than keep it in registers
    return __uint_as_float(__shfl_sync(kWarp, of_group, 31 - __clz(b + 1)));
#endif
  }
  // An INT8 block's multiple is 2^e.
  __device__ __forceinline__ int exponent(float largest) const {
    return min(max((__float_as_int(over(largest)) + 0x7FFFFF >> 23) - 127, 0), 31);
  }
};

// What the GEMM reads of INT8 block b: e, and by how much that of the next INT8 block is less (the INT4 blocks have 0).
// Whole warps, but for MOST_BLOCKS.
__device__ __forceinline__ int exponent_word(const TokenScale& token, int b, int eights, int e) {
  const int next = token.exponent(token.largest_of(b + 1));
  return e | (e - (b + 1 < eights ? next : 0)) << 8;
}

} // namespace comet
