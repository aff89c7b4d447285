// What the kernels that quantize activations share: their parameters, and SiLU.
// Needs the definitions of quantize_act.cu.
#pragma once

#include "comet/codes.cuh"
#include "comet/rows.cuh"

struct Params {
  const void* x;           // [M, K], or [M, 2K] for FUSE == 2
  const void* residual;    // [M, K] or null (FUSE == 1)
  void* residual_out;      // [M, K] = x + residual (FUSE == 1 with residual)
  const void* norm_weight; // [K] (FUSE == 1)
  const int* perm;         // [K], aligned to 512 bytes
  union {
    const uint8_t* bits; // [NB]
    int* multiples;      // [max(int8_blocks, 1), A, 8], of TokenParams
  };
  const float* clip;       // [NB]
  void* codes;
  float* scale; // [M, NB] canonical, or the tiled forms' meta
  int M, K, NB;
  float eps; // FUSE == 1
};

// SiLU, from the hardware's approximations of 2^x and 1 / x.
__device__ __forceinline__ float sigmoid_times(float g) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * g));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
  return g * inverse;
}
