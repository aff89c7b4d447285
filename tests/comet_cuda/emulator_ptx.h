// What kv4_ptx.cuh and async_copy.cuh do, on the emulated warp. mma.sync adds its products in double precision.
#pragma once

#include "emulator.h"

namespace comet {

inline float half_to_float(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023, sign = (bits & 0x8000u) << 16;
  if (exponent == 0) return emulator::number(sign | emulator::bits(std::ldexp(float(mantissa), -24)));
  return emulator::number(sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13);
}
inline uint32_t float_to_half(float x) {
  const uint32_t bits = emulator::bits(x), sign = bits >> 16 & 0x8000u;
  const float a = std::fabs(x);
  if (a != a) return sign | 0x7E00u;
  if (a >= 65520.f) return sign | 0x7C00u;
  if (a < 6.103515625e-05f) return sign | uint32_t(std::nearbyint(std::ldexp(a, 24)));
  const uint32_t rounded = (bits & 0x7FFFFFFFu) + 0xFFFu + (bits >> 13 & 1);
  return sign | ((rounded - 0x38000000u) >> 13);
}
inline uint32_t half_pair(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }

template <typename T> struct Pairs {
  static float low(uint32_t pair) { return T::one(uint16_t(pair)); }
  static float high(uint32_t pair) { return T::one(uint16_t(pair >> 16)); }
  static uint32_t pair(float low, float high) { return T::from(low) | uint32_t(T::from(high)) << 16; }
  static uint32_t smaller(uint32_t a, uint32_t b) { return pair(std::fmin(low(a), low(b)), std::fmin(high(a), high(b))); }
  static uint32_t larger(uint32_t a, uint32_t b) { return pair(std::fmax(low(a), low(b)), std::fmax(high(a), high(b))); }
  static float element(uint32_t pair, int i) { return i ? high(pair) : low(pair); }
  static void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    struct Four { double x[4]; };
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    const Four sum = emulator::exchange(mine, 6, [&](auto& all) {
      Four s = {};
      for (int k = 0; k < 16; ++k) {
        const int from = k % 8 / 2, part = k / 8, i = k % 2;
        for (int r = 0; r < 2; ++r)
          for (int c = 0; c < 2; ++c)
            s.x[2 * r + c] += double(element(all[4 * g + from][2 * part + r], i)) *
                              double(element(all[4 * (2 * t + c) + from][4 + part], i));
      }
      return s;
    });
    for (int i = 0; i < 4; ++i) d[i] = float(double(d[i]) + sum.x[i]);
  }
};
struct BFloat16 : Pairs<BFloat16> {
  static float one(uint16_t x) { return emulator::number(uint32_t(x) << 16); }
  static uint16_t from(float x) {
    const uint32_t bits = emulator::bits(x);
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
  }
};
struct Float16 : Pairs<Float16> {
  static float one(uint16_t x) { return half_to_float(x); }
  static uint16_t from(float x) { return uint16_t(float_to_half(x)); }
};

inline uint32_t sixteenth(uint32_t pair) { return half_pair(Float16::low(pair) / 16, Float16::high(pair) / 16); }
inline uint32_t transposed(uint32_t x) {
  const int g = emulator::lane() / 4, t = emulator::lane() % 4;
  return emulator::exchange(&x, 1, [&](auto& all) {
    const auto at = [&](int row) { return all[4 * row + g / 2][0] >> 16 * (g % 2) & 0xFFFFu; };
    return at(2 * t) | at(2 * t + 1) << 16;
  });
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline void prefetch_l2(const void*) {}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

// cp.async: shared memory is `memory`, addressed from its begin. Copies land at once: their waits are not tested.
} // namespace comet
extern char memory[];
namespace comet {
inline uint32_t shared_address(const void* p) { return uint32_t(static_cast<const char*>(p) - memory); }
inline void copy_async_16(uint32_t to, const void* from, bool valid) {
  if (valid)
    std::memcpy(memory + to, from, 16);
  else
    std::memset(memory + to, 0, 16);
}
inline void commit_copies() {}
template <int kPending> void wait_for_copies() {}

} // namespace comet
