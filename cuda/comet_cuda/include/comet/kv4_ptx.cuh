// All PTX of the KV4 kernels, one function an instruction: conversions, mma.sync, the transpose, dependent launch.
// On a CPU, tests/comet_cuda/emulator_ptx.h stands in for this file, and the kernels run there.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

namespace comet {

__device__ __forceinline__ float half_to_float(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16_t(bits)));
  return x;
}
__device__ __forceinline__ uint32_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
// Two floats -> a pair of f16, `low` in the low half.
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct BFloat16 {
  __device__ static __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
  __device__ static __forceinline__ float one(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
  __device__ static __forceinline__ uint32_t pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  __device__ static __forceinline__ uint16_t from(float x) {
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
  }
  __device__ static __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  // D[16 x 8] += A[16 x 16] * B[16 x 8], A row-major, B column-major, fragments as mma.sync's.
  __device__ static __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
struct Float16 {
  __device__ static __forceinline__ float low(uint32_t pair) { return half_to_float(pair & 0xFFFFu); }
  __device__ static __forceinline__ float high(uint32_t pair) { return half_to_float(pair >> 16); }
  __device__ static __forceinline__ float one(uint16_t x) { return half_to_float(x); }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return half_pair(low, high); }
  __device__ static __forceinline__ uint16_t from(float x) { return uint16_t(float_to_half(x)); }
  __device__ static __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("min.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
// The operand of a product with codes in the high place, where they count sixteen times as much.
__device__ __forceinline__ uint32_t sixteenth(uint32_t pair) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0x2C002C00u));
  return y;
}

// Transposes an 8 x 8 matrix of 16-bit elements held by a warp (row lane / 4, columns 2 (lane % 4) and the next).
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Programmatic dependent launch (sm_90 and later; nothing before).
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

} // namespace comet
