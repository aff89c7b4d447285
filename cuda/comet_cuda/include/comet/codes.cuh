// The values of a block -> integer codes, bit for bit what IEEE division and rounding half to even give.
//
// Codes travel as "pairs": two unsigned 16-bit numbers, code + bias; the bias is 7 for INT4 (0..14), 128 for INT8.
//
// The quick way (INT4): one multiply-add scales a value, divides it and adds a constant, so that the upper half of the
// float's bits counts whole steps and the lower half 2^-16 of a step. The result is off by less than one unit of that
// lower half, so wherever the lower half is not within one unit of a rounding boundary the upper half is the exact code.
// One value in 32,768 is in doubt; its lane takes the exact way. What the constant is: bits 0x6640 8000, plus 1. The
// 0x8000 adds half a step, so that truncation rounds; the 1 moves the doubtful values to lower halves 0 and 1.
// Why less than one unit, for |code| < 8: rounding of the multiply-add 1/2; the factor is off by at most 2^-22 of its
// value and the two roundings that it skips by 2^-23 together, which is less than 2^-18 steps, 1/4 unit.
//
// The exact way: x * reciprocal, corrected by its exact remainder (Markstein), which is the correctly rounded quotient.
#pragma once

#include "comet/quantize.cuh"

namespace comet {

constexpr uint32_t kBias4 = 7, kBias8 = 128;
constexpr uint32_t kTwice = 0x00010001u;               // in both halves of a pair
constexpr float kRound = 12582912.f;                   // 1.5 * 2^23: adding it rounds to the nearest even integer
constexpr float kTiny = 0x1p-100f, kHuge = 0x1p100f;   // divisors between them divide without underflow
constexpr uint32_t kCenterBits = 0x66408001u;          // the constant above; its upper half stands for code 0
constexpr uint32_t kCenter = kCenterBits >> 16;
constexpr float kStep = 0x1p70f;                       // what one step is worth beside it
constexpr float kUnusual = 0x1p126f;                   // in place of the factor of the quick way, where it does not apply
constexpr float kQuickTiny = 0x1p-40f, kQuickHuge = 0x1p40f; // divisors of the quick way: nothing over- or underflows
constexpr float kQuickClip = 1.f / 16; // above it no unclamped code is beyond 192, where the upper half changes its sign

// 1 / x, correctly rounded, for kTiny <= x <= kHuge: the hardware's approximation and one Newton step.
__device__ __forceinline__ float reciprocal_of(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.f), r);
}

// x / divisor, correctly rounded, for kTiny <= divisor <= kHuge.
// Where the remainder underflows, the quotient is far below 1/2 and its code is 0 either way.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
  const float q = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-q, divisor, x), reciprocal, q);
}

// ---- pairs

__device__ __forceinline__ uint32_t min_pair(uint32_t a, uint32_t b) { // as f16
  asm("min.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) { // as f16
  asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// The upper halves of two results of the quick way -> their clamped codes.
__device__ __forceinline__ uint32_t quick_pair(uint32_t a, uint32_t b) {
  const uint32_t steps = __byte_perm(a, b, 0x7632);
#if __CUDA_ARCH__ >= 900 // one instruction: max(min(steps - (center - 7), 14), 0), as signed 16-bit numbers
  return __viaddmin_s16x2_relu(steps, (0x10000u - (kCenter - kBias4)) * kTwice, 2 * kBias4 * kTwice);
#else // the halves are also ordered as f16 numbers
  const uint32_t low = (kCenter - kBias4) * kTwice, high = (kCenter + kBias4) * kTwice;
  return max_pair(min_pair(steps, high), low) - low;
#endif
}
// The least lower half so far. (What happens to the upper halves does not matter: they are never small.)
__device__ __forceinline__ uint32_t least_fraction(uint32_t least, uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  return __vimin3_u16x2(least, a, b);
#else
  return min(least, min(a & 0xFFFFu, b & 0xFFFFu));
#endif
}

// Codes of N values times `by` (1 / divisor in units of kStep, by quarters of the slots). False: some are in doubt.
template <int N>
__device__ __forceinline__ bool quick_codes(const float (&v)[N], const float (&by)[4], uint32_t (&pairs)[N / 2]) {
  const float center = __uint_as_float(kCenterBits);
  uint32_t least = ~0u;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint32_t a = __float_as_uint(__fmaf_rn(v[i], by[4 * i / N], center));
    const uint32_t b = __float_as_uint(__fmaf_rn(v[i + 1], by[4 * i / N], center));
    least = least_fraction(least, a, b);
    pairs[i / 2] = quick_pair(a, b);
  }
  return (least & 0xFFFEu) != 0;
}

// The same without doubt, for any divisor; `factor` is what the rotation left to multiply. In line: as a function of its
// own, with arguments in local memory, it made the kernel 4 to 11% slower.
template <int kBits, int N>
__device__ __forceinline__ void exact_codes(const float (&v)[N], const float (&factor)[4], float divisor,
                                            uint32_t (&pairs)[N / 2]) {
  float power = 1.f; // both sides times a power of two: the quotient stays
  if (!(divisor >= kTiny && divisor <= kHuge)) power = divisor < kTiny ? kHuge : kTiny;
  divisor *= power;
  const float reciprocal = reciprocal_of(divisor);
  constexpr uint32_t bound = kBits == 4 ? 0x47004700u : 0x57F057F0u;             // 7 or 127, as f16
  constexpr uint32_t shift = (0x6600u - (kBits == 4 ? kBias4 : kBias8)) * kTwice; // 1536 + code is 0x6600 + code
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    float q[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = __fmul_rn(__fmul_rn(v[i + j], factor[4 * i / N]), power);
      q[j] = __fsub_rn(__fadd_rn(divide(x, divisor, reciprocal), kRound), kRound);
    }
    uint32_t pair; // integers are exact in f16 up to 2048, and beyond the clamp anyway
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(q[1]), "f"(q[0]));
    pair = max_pair(min_pair(pair, bound), bound ^ 0x80008000u);
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x66006600u));
    pairs[i / 2] = pair - shift;
  }
}

// ---- sums of codes over a block's eight lanes, code + bias each

// The sum over a lane's pairs, at most 16 * 255: low and high halves apart.
__device__ __forceinline__ uint32_t halves_sum(const uint32_t (&pairs)[kSlots / 2]) {
  return (((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])) + ((pairs[4] + pairs[5]) + (pairs[6] + pairs[7])));
}
// At most 128 * 255 in each half, so two tokens are summed at once.
__device__ __forceinline__ uint32_t block_sum(uint32_t x) {
#pragma unroll
  for (int d = 1; d < kLanesPerBlock; d *= 2) x += __shfl_xor_sync(kWarp, x, d);
  return x;
}
// A block's sum of code + bias -> the sum of its codes.
template <bool kInt4> __device__ __forceinline__ float unbiased(uint32_t total) {
  return __fsub_rn(__uint_as_float(0x4B000000u | total), 8388608.f + kBlock * float(kInt4 ? kBias4 : kBias8));
}

// ---- codes in memory, four channels

// Two's complement bytes.
template <bool kInt4> __device__ __forceinline__ uint32_t bytes_of(uint32_t low, uint32_t high) {
  return (__byte_perm(low, high, 0x6420) + (kInt4 ? (0x80u - kBias4) * 0x01010101u : 0u)) ^ 0x80808080u;
}
// Two's complement nibbles of INT4 bytes, channel order from the low nibble up.
__device__ __forceinline__ uint16_t pack_nibbles(uint32_t bytes) {
  const uint32_t low = bytes & 0x0F0F0F0Fu;
  return uint16_t(__byte_perm(low | (low >> 4), 0, 0x4420));
}
#if __CUDA_ARCH__ >= 890
// e4m3 bytes of INT4 codes. A small number read as f16 is itself times 2^-24 (a subnormal), so one multiply-add by 2^15
// takes the bias off and leaves code * 2^-9; both steps are exact.
__device__ __forceinline__ uint32_t e4m3_of(uint32_t low, uint32_t high) {
  uint16_t a, b;
  asm("{.reg .b32 x;\n\tfma.rn.f16x2 x, %1, %2, %3;\n\tmul.rn.f16x2 x, x, %4;\n\tcvt.rn.satfinite.e4m3x2.f16x2 %0, x;}"
      : "=h"(a)
      : "r"(low), "r"(0x78007800u), "r"(0xA300A300u), "r"(0x60006000u));
  asm("{.reg .b32 x;\n\tfma.rn.f16x2 x, %1, %2, %3;\n\tmul.rn.f16x2 x, x, %4;\n\tcvt.rn.satfinite.e4m3x2.f16x2 %0, x;}"
      : "=h"(b)
      : "r"(high), "r"(0x78007800u), "r"(0xA300A300u), "r"(0x60006000u));
  return uint32_t(a) | (uint32_t(b) << 16);
}
// e4m3 bytes of two small integers.
__device__ __forceinline__ uint16_t e4m3_of(float low, float high) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}
#endif

} // namespace comet
