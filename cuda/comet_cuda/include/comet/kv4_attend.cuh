// One warp's share of decode attention: scores, running maximum, probabilities, and the product with 4-bit values.
//
// Codes enter mma.sync as they are: a nibble in bits 0..3 (or 4..7) of a half is the f16 number code * 2^-24 (or
// code * 2^-20), exactly, so eight codes cost one shift and four masks. The other operand takes the quarter (or the
// sixteenth of four) of the difference: both kinds of product come out times 2^-22.
//
// A score is sum_d q_d * (scale_d * code_d + min_d). q_d * scale_d is rounded to f16 and multiplied by the codes; the
// rest, sum_d q_d * (min_d + 8 scale_d), is a float32 constant of the page, and -8 times the sum of the rounded factors
// starts the accumulator: so the rounding meets code - 8, not code. Values likewise: p * scale is rounded to f16.
//
// Fragments: scores are [32 tokens, 8 q heads]. Lane 4 * g + t holds tokens 4 g + a (a = 0..3), heads 2 t and 2 t + 1;
// the output [channels, 8 q heads]: channels 32 x + 4 g + i, the same heads.
//
// Definitions: those of kv4.cuh, NT (tiles of 8 q heads), SOFTCAP (0, 1).
#pragma once

#include "comet/kv4.cuh"

namespace comet {

constexpr int kWords = 4 * kPieces; // of codes, of a lane and tile
constexpr uint32_t kLowCodes = 0x000F000Fu, kHighCodes = 0x00F000F0u;
constexpr uint32_t kMinusEightLow = 0x80088008u, kMinusEightHigh = 0x80808080u; // the code -8 in both places
constexpr float kUnit = 4194304.f;      // 2^22
constexpr float kHeadroom = 8.f;        // the largest p * v_scale is about 2^8 ..
constexpr float kSlack = 5.f;           // .. or 2^13 before the running maximum must follow; times 4 it fits in f16
constexpr float kNoScore = -1e30f, kHidden = -1e38f;

// The operand of a product with codes, for code pairs in the low and in the high place.
__device__ __forceinline__ uint32_t times_four(uint32_t pair) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0x44004400u));
  return y;
}
__device__ __forceinline__ uint32_t quarter(uint32_t pair) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0x34003400u));
  return y;
}

// d += (eight codes of two rows) * b: 32 of the 256 products of a lane's two words.
__device__ __forceinline__ void mma_codes(float (&d)[4], uint32_t row, uint32_t row8, const uint32_t (&b)[4]) {
  Float16::mma(d, row & kLowCodes, row8 & kLowCodes, row & kHighCodes, row8 & kHighCodes, b[0], b[1]);
  row >>= 8, row8 >>= 8;
  Float16::mma(d, row & kLowCodes, row8 & kLowCodes, row & kHighCodes, row8 & kHighCodes, b[2], b[3]);
}
// d += -8 * (all of b), in every row.
__device__ __forceinline__ void mma_minus_eight(float (&d)[4], const uint32_t (&b)[4]) {
  Float16::mma(d, kMinusEightLow, kMinusEightLow, kMinusEightHigh, kMinusEightHigh, b[0], b[1]);
  Float16::mma(d, kMinusEightLow, kMinusEightLow, kMinusEightHigh, kMinusEightHigh, b[2], b[3]);
}

// softcap * tanh(x), times log2(e); x is the score over softcap.
__device__ __forceinline__ float capped(float x, float cap_log2) {
  const float e = exp2_fast(x * 2.885390082f); // exp(2 x)
  return cap_log2 - 2.f * cap_log2 * __fdividef(1.f, e + 1.f);
}

// Scales and minima of the four values whose tokens a lane's scores belong to, as attention multiplies them.
struct ValueParams {
  float scale[4];  // times 4 or 1/4, by the place of the token's code
  float centre[4]; // minimum + 8 * scale
  __device__ __forceinline__ void set(int a, float s, float minimum) {
    scale[a] = a % 2 ? 0.25f * s : 4.f * s;
    centre[a] = fmaf(8.f, s, minimum);
  }
  __device__ __forceinline__ void set(uint2 s, uint2 minimum) {
    set(0, Float16::low(s.x), Float16::low(minimum.x));
    set(1, Float16::high(s.x), Float16::high(minimum.x));
    set(2, Float16::low(s.y), Float16::low(minimum.y));
    set(3, Float16::high(s.y), Float16::high(minimum.y));
  }
};
// A power of two, as its exponent, above every scale: `bits` is the largest of the lane's f16 scales.
__device__ __forceinline__ float exponent_above(uint32_t bits) {
  return float(int(__reduce_max_sync(~0u, bits) >> 10) - 14);
}

struct Attention {
  float out[NT][kPieces][2][4]; // [.., x, i / 2]: channel i even, heads 2 t, 2 t + 1; i odd, the same. Times 2^-22
  float shift[NT][4];           // -8 * sum of rounded p * scale
  float top[NT][2];             // running maximum of score (log2) + exponent of the value's scale
  float total[NT][2];           // sum of p, this lane's tokens
  float centres[NT][2];         // sum of p * centre, this lane's tokens

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) shift[n][i] = 0.f;
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
#pragma unroll
        for (int i = 0; i < 8; ++i) out[n][x][i / 4][i % 4] = 0.f;
#pragma unroll
      for (int i = 0; i < 2; ++i) top[n][i] = kNoScore, total[n][i] = centres[n][i] = 0.f;
    }
  }

  // Scores up to `high` may come: makes top at least that, where it is more than the slack below. All lanes together.
  __device__ __forceinline__ void raise(int n, float high0, float high1) {
    if (!__any_sync(~0u, high0 > top[n][0] + kSlack || high1 > top[n][1] + kSlack)) return;
    float high[2] = {high0, high1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], d));
      high[i] = fmaxf(high[i], top[n][i]);
      const float f = exp2_fast(top[n][i] - high[i]);
      top[n][i] = high[i];
      total[n][i] *= f, centres[n][i] *= f;
      shift[n][i] *= f, shift[n][i + 2] *= f;
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[n][x][h][i] *= f, out[n][x][h][i + 2] *= f;
    }
  }

  // One tile: scores (log2) [a / 2][2 * (a % 2) + head], value codes, their parameters and exponent.
  __device__ __forceinline__ void add(float (&score)[2][NT][4], const uint32_t (&words)[kWords], const ValueParams& v,
                                      float exponent) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      raise(n,
            exponent + fmaxf(fmaxf(score[0][n][0], score[0][n][2]), fmaxf(score[1][n][0], score[1][n][2])),
            exponent + fmaxf(fmaxf(score[0][n][1], score[0][n][3]), fmaxf(score[1][n][1], score[1][n][3])));
      const float top0 = top[n][0] - kHeadroom, top1 = top[n][1] - kHeadroom;
      uint32_t p[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float p0 = exp2_fast(score[a / 2][n][a % 2 * 2] - top0);
        const float p1 = exp2_fast(score[a / 2][n][a % 2 * 2 + 1] - top1);
        total[n][0] += p0, total[n][1] += p1;
        centres[n][0] = fmaf(p0, v.centre[a], centres[n][0]);
        centres[n][1] = fmaf(p1, v.centre[a], centres[n][1]);
        p[a] = transposed(half_pair(p0 * v.scale[a], p1 * v.scale[a]));
      }
      mma_minus_eight(shift[n], p);
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
#pragma unroll
        for (int h = 0; h < 2; ++h) mma_codes(out[n][x][h], words[4 * x + 2 * h], words[4 * x + 2 * h + 1], p);
    }
  }

  // After the last tile: sums over the lanes that share heads, and the output in its own unit.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
          total[n][i] += __shfl_xor_sync(~0u, total[n][i], d);
          centres[n][i] += __shfl_xor_sync(~0u, centres[n][i], d);
        }
#pragma unroll
        for (int x = 0; x < kPieces; ++x)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            out[n][x][h][i] = fmaf(out[n][x][h][i] + shift[n][i], kUnit, centres[n][i]);
            out[n][x][h][i + 2] = fmaf(out[n][x][h][i + 2] + shift[n][i], kUnit, centres[n][i]);
          }
      }
  }
};

// q times a page's key scales, as the operand of a product with codes, and the page's constants.
struct PageQuery {
  uint32_t factor[NT][kPieces][4]; // [.., j, i]: channels 8 j + i and 8 j + i + 4 of the lane's
  float start[NT][2];              // -8 * sum of factors, times 2^-22, heads 2 t and 2 t + 1
  float constant[NT][2];           // sum of q * (min + 8 * scale)

  // q: float32 in shared memory, [n][piece of 4 channels][lane][4], with the softmax's scale; scale, minimum: f16 [D].
  __device__ __forceinline__ void set(const float* q, const char* scale, const char* minimum, int lane) {
    const int t = lane % 4;
    float constants[NT], starts[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) constants[n] = starts[n][0] = starts[n][1] = starts[n][2] = starts[n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint4 s4 = *reinterpret_cast<const uint4*>(scale + (kDim / 4 * t + 8 * j) * 2);
      const uint4 m4 = *reinterpret_cast<const uint4*>(minimum + (kDim / 4 * t + 8 * j) * 2);
      const uint32_t sp[4] = {s4.x, s4.y, s4.z, s4.w}, mp[4] = {m4.x, m4.y, m4.z, m4.w};
      float s[8];
      float c[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[i] = i % 2 ? Float16::high(sp[i / 2]) : Float16::low(sp[i / 2]);
        c[i] = fmaf(8.f, s[i], i % 2 ? Float16::high(mp[i / 2]) : Float16::low(mp[i / 2]));
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float4* at = reinterpret_cast<const float4*>(q) + (n * kDim / 16 + 2 * j) * 32 + lane;
        const float4 low = at[0], high = at[32];
        const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) constants[n] = fmaf(x[i], c[i], constants[n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = half_pair(x[i] * s[i], x[i + 4] * s[i + 4]);
          factor[n][j][i] = i % 2 ? quarter(pair) : times_four(pair);
        }
        mma_minus_eight(starts[n], factor[n][j]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      constants[n] += __shfl_xor_sync(~0u, constants[n], 1);
      constants[n] += __shfl_xor_sync(~0u, constants[n], 2); // head g = lane / 4
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        constant[n][i] = __shfl_sync(~0u, constants[n], 8 * t + 4 * i);
        start[n][i] = starts[n][i];
      }
    }
  }

  // Scores (log2) of a tile from its key codes.
  __device__ __forceinline__ void scores(const uint32_t (&words)[kWords], float (&score)[2][NT][4],
                                         float cap_log2) const {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float (&s)[4] = score[m][n];
        s[0] = s[2] = start[n][0], s[1] = s[3] = start[n][1];
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          mma_codes(s, words[2 * m * kPieces + j], words[(2 * m + 1) * kPieces + j], factor[n][j]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[i] = fmaf(s[i], kUnit, constant[n][i % 2]);
          if (SOFTCAP) s[i] = capped(s[i], cap_log2);
        }
      }
  }
};

} // namespace comet
