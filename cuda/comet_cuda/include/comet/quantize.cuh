// Device pieces of quantize_act: element types, loads, the register Hadamard (codes.cuh turns values into codes).
//
// Eight lanes share one block of 128 channels and hold 16 values each, in "slots" 0..15. Where a value's channel lies:
//   natural order:  slot (j3 j2 j1 j0) of lane l (0..7) is channel 4 * (l + 8 * j3 + 16 * j2) + 2 * j1 + j0;
//   start order:    channel 16 * l + 8 * (j3 ^ l1) + 4 * (j2 ^ l0) + 2 * j1 + j0   (l = 4 * l2 + 2 * l1 + l0).
// The Hadamard takes the start order and leaves the natural one. Its stages with stride 1..8 stay inside a lane; those
// with stride 16, 32, 64 exchange half of the registers with a neighbour, and each exchange moves a finished channel
// bit out to the lanes. Because the gather may start in any order, the halves that are sent are always the same slots,
// so no selects are needed; signs that the exchange leaves behind are folded into the final multiply, which is left to
// the division (codes.cuh). The float32 additions and their order are those of `hadamard_blocks`.
#pragma once

typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

namespace comet {

constexpr int kBlock = 128;          // channels that share a scale
constexpr int kLanesPerBlock = 8;    // lanes that share a block
constexpr int kBlocksPerWarp = 32 / kLanesPerBlock;
constexpr uint32_t kWarp = ~0u;
constexpr int kSlots = 16;           // values a lane holds
constexpr float kHadamardNorm = 0.08838834764831845f; // 128^-0.5

// ---- element types: bits in memory <-> float32

struct Float32 {
  static constexpr int kBytes = 4;
  __device__ static float to_float(uint32_t bits) { return __uint_as_float(bits); }
  __device__ static float half_to_float(uint32_t bits, int) { return __uint_as_float(bits); }
  __device__ static uint32_t from_float(float x) { return __float_as_uint(x); }
  __device__ static uint32_t pair_of(float, float) { return 0; } // of 16-bit types alone
  __device__ static void round_pair(float&, float&) {}
};
struct BFloat16 {
  static constexpr int kBytes = 2;
  __device__ static float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static float half_to_float(uint32_t pair, int half) { // one byte permutation, whichever half
    return __uint_as_float(__byte_perm(pair, 0, half ? 0x3244 : 0x1044));
  }
  __device__ static uint32_t pair_of(float low, float high) { // converting one alone takes the slow unit
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  __device__ static uint32_t from_float(float x) { return pair_of(x, 0.f); }
  __device__ static void round_pair(float& a, float& b) {
    const uint32_t pair = pair_of(a, b);
    a = half_to_float(pair, 0), b = half_to_float(pair, 1);
  }
};
struct Float16 {
  static constexpr int kBytes = 2;
  __device__ static float to_float(uint32_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16_t(bits)));
    return x;
  }
  __device__ static float half_to_float(uint32_t pair, int half) { return to_float(pair >> (16 * half)); }
  __device__ static uint32_t pair_of(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  __device__ static uint32_t from_float(float x) { return pair_of(x, 0.f); }
  __device__ static void round_pair(float& a, float& b) {
    const uint32_t pair = pair_of(a, b);
    a = half_to_float(pair, 0), b = half_to_float(pair, 1);
  }
};

// ---- loads and stores of 8 and 16 bytes; x is read once, so it does not displace the permutation in the caches. Not by
// ld.global.nc: the previous kernel writes x while this one is there already, and the assembler moves such loads up to
// before the wait for it.

__device__ __forceinline__ uint2 load_once(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_global(char* p, uint32_t data) { // where the compiler has lost the address space
  asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(data) : "memory");
}
__device__ __forceinline__ void store_global(char* p, uint32_t low, uint32_t high) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void store_global(char* p, const uint4& data) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(data.x), "r"(data.y), "r"(data.z), "r"(data.w) : "memory");
}

// ---- programmatic dependent launch (sm_90 and later; nothing before)

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- the register Hadamard

__device__ __forceinline__ void hadamard_in_registers(float (&v)[kSlots], int lane) {
  const float s0 = (lane & 1) ? -1.f : 1.f, s1 = (lane & 2) ? -1.f : 1.f, s2 = (lane & 4) ? -1.f : 1.f;
#pragma unroll
  for (int stride = 1; stride <= 2; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i & stride) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = __fadd_rn(low, high);
      v[i + stride] = __fsub_rn(low, high);
    }
  }
#pragma unroll
  for (int stride = 4; stride <= 8; stride *= 2) { // a lane with s = -1 holds the pair the other way round
    const float s = stride == 4 ? s0 : s1;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = __fmaf_rn(a, s, b);
      v[i + stride] = __fmaf_rn(b, -s, a);
    }
  }
#pragma unroll
  for (int stage = 0; stage < 3; ++stage) { // channel strides 16, 32, 64
    const int half = stage == 1 ? 8 : 4;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i & half) continue;
      const float mine = v[i], other = __shfl_xor_sync(kWarp, v[i + half], 1 << stage);
      if (stage == 0) { // the third exchange wants its halves swapped in lanes with s2 = -1
        v[i] = __fmaf_rn(other, s2, mine);
        v[i + half] = __fmaf_rn(other, -s2, mine);
      } else {
        v[i] = __fadd_rn(mine, other);
        v[i + half] = __fsub_rn(mine, other);
      }
    }
  }
}

// What is left to multiply after the rotation, by groups of four slots: the norm and signs.
__device__ __forceinline__ void hadamard_factors(float (&factor)[4], int lane) {
  const float s0 = (lane & 1) ? -1.f : 1.f, s1 = (lane & 2) ? -1.f : 1.f, s2 = (lane & 4) ? -1.f : 1.f;
  const float base = (lane & 4) ? s0 * kHadamardNorm : kHadamardNorm;
#pragma unroll
  for (int q = 0; q < 4; ++q) factor[q] = base * ((q & 2) ? s1 : 1.f) * ((q & 1) ? s2 : 1.f);
}

// Of a lane's values; non-negative floats are ordered as integers, of which three are compared at once.
template <int kCount> __device__ __forceinline__ float largest_magnitude(const float (&v)[kCount]) {
  int most = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    most = max(max(most, __float_as_int(fmaxf(fabsf(v[i]), fabsf(v[i + 1])))),
               __float_as_int(fmaxf(fabsf(v[i + 2]), fabsf(v[i + 3]))));
  return __int_as_float(most);
}

// The largest over the eight lanes of a block, of which groups of `agreed` neighbours hold the same already.
__device__ __forceinline__ float block_max(float x, int agreed) {
#pragma unroll
  for (int d = agreed; d < kLanesPerBlock; d *= 2) x = fmaxf(x, __shfl_xor_sync(kWarp, x, d));
  return x;
}
} // namespace comet
