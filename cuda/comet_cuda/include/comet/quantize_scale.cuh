// What the kernels that quantize activations share: their parameters, SiLU, and the scale of a block.
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
  const uint8_t* bits;     // [NB]
  const float* clip;       // [NB]
  const float* unit;       // [NB] or null: ones (SHARE == 4)
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

namespace comet {

// The static unit of a block (SHARE == 4). It is read where it is needed, twice, and not kept in a register.
__device__ __forceinline__ float unit_of(const Params& p, int block) {
  if (p.unit == nullptr) return 1.f;
  float unit;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(unit) : "l"(p.unit + min(block, p.NB - 1)));
  return unit;
}

// What one block of one token is divided by.
struct Scale {
  float stored;  // as the layout wants it
  float divisor; // codes are values / divisor
  int e;         // the sm_90 operand is code * 2^(4 - e), and its sum too (SHARE == 4)
};

// 1 / the number of INT4 blocks in a quad.
__device__ __forceinline__ float inverse_of(int count) {
  return count == 4 ? 0.25f : count == 3 ? 1.f / 3.f : count == 2 ? 0.5f : 1.f;
}

// INT4 blocks with SHARE == 4 (contract in quantize_act.py). `ratio` is the scale that the block would choose alone,
// over its unit, 0 for blocks that do not take part; `sum` is that of the quad's four, (0 + 1) + (2 + 3).
__device__ __forceinline__ Scale shared_scale(float sum, float ratio, float unit, float inverse_count) {
  float quad = __fmul_rn(sum, inverse_count);
  if (!(quad > 0.f)) quad = 1.f;
  float excess = 1.f; // the quad's scale over the block's, at least 1/4; 1 for a block of zeros
  if (ratio >= 0x1p-60f && quad <= 0x1p60f)
    excess = __fmul_rn(divide(quad, ratio, reciprocal_of(ratio)), kQuadRounding);
  else if (ratio > 0.f)
    excess = __fmul_rn(__fdiv_rn(quad, ratio), kQuadRounding);
  Scale scale;
  scale.e = min(max((__float_as_int(excess) >> 23) - 127, -2), 13);
  const float block_scale = __fmul_rn(quad, __int_as_float((127 - scale.e) << 23));
  scale.stored = OUT == 1 ? __fmul_rn(quad, 0x1p-4f) : block_scale;
  scale.divisor = __fmul_rn(block_scale, unit);
  return scale;
}

} // namespace comet
