// One warp's share of decode attention: scores, running maximum, probabilities, and the product with 4-bit values.
//
// Codes enter mma.sync as they are: a nibble in bits 0..3 (or 4..7) of a half is the f16 number code * 2^-24 (or
// code * 2^-20), exactly, so eight codes cost one shift and four masks. The other operand is divided by 16 where it meets
// the high place, so all products come out times 2^-24.
//
// A score is sum_d q_d * (scale_d * code_d + min_d). q_d * scale_d is rounded to f16 and multiplied by the codes; the
// rest, sum_d q_d * (min_d + 8 scale_d), is a float32 constant of the page, and -8 times the sum of the rounded factors
// joins it: so the rounding meets code - 8, not code. Values: p * scale is rounded to f16, p * minimum is float32.
//
// Fragments: scores are [32 tokens, 8 q heads]. Lane 4 * g + t holds tokens 4 g + a (a = 0..3), heads 2 t and 2 t + 1;
// the output [channels, 8 q heads]: channels 32 x + 4 g + i, the same heads.
//
// Definitions: those of kv4_cache.cuh, NT (tiles of 8 q heads), SOFTCAP (0, 1).
#pragma once

#include "comet/kv4_ring.cuh"

namespace comet {

constexpr uint32_t kLowCodes = 0x000F000Fu, kHighCodes = 0x00F000F0u;
constexpr uint32_t kMinusEightLow = 0x80088008u, kMinusEightHigh = 0x80808080u; // the code -8 in both places
constexpr float kUnit = 16777216.f;     // 2^24
constexpr float kHeadroom = 10.f;       // the largest p * v_scale is about 2^10 ..
constexpr float kSlack = 5.f;           // .. or 2^15, which still is an f16, before the running maximum must follow
constexpr float kNoScore = -1e30f, kHidden = -1e38f;

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
  float scale[4];  // a sixteenth of it, where the token's code lies in the high place
  float minimum[4];
  __device__ __forceinline__ void set(int a, float s, float m) {
    scale[a] = a % 2 ? 0.0625f * s : s;
    minimum[a] = m;
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

// A tile's value codes and parameters straight from memory: for pages that are read once. Slots outside [from, to) may
// hold anything, and count as zero. Returns the exponent above their scales.
__device__ __forceinline__ void load_value_words(const Cache& c, int at, int tile, int lane, uint32_t (&words)[kWords]) {
  const uint8_t* v = c.v_codes + size_t(at) * kPageBytes + tile * kTileBytes + lane * 16;
#pragma unroll
  for (int x = 0; x < kPieces; ++x) {
    const uint4 w = *reinterpret_cast<const uint4*>(v + x * 512);
    words[4 * x] = w.x, words[4 * x + 1] = w.y, words[4 * x + 2] = w.z, words[4 * x + 3] = w.w;
  }
}
__device__ __forceinline__ float load_value_params(const Cache& c, int at, int token, int from, int to,
                                                   ValueParams& params) {
  const uint2 s = *reinterpret_cast<const uint2*>(c.v_scale + size_t(at) * kPage + token);
  const uint2 m = *reinterpret_cast<const uint2*>(c.v_min + size_t(at) * kPage + token);
  params.set(s, m);
  uint32_t largest = 0;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const uint32_t bits = ((a < 2 ? s.x : s.y) >> (16 * (a % 2))) & 0xFFFFu;
    if (token + a >= from && token + a < to)
      largest = max(largest, bits);
    else
      params.scale[a] = params.minimum[a] = 0.f;
  }
  return exponent_above(largest);
}

struct Attention {
  float out[NT][kPieces][2][4]; // [.., x, i / 2]: channel i even, heads 2 t, 2 t + 1; i odd, the same. Times 2^-24
  float top[NT][2];             // running maximum of score (log2) + exponent of the value's scale
  float total[NT][2];           // sum of p, this lane's tokens
  float minima[NT][2];          // sum of p * minimum of the value, this lane's tokens

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
#pragma unroll
        for (int i = 0; i < 8; ++i) out[n][x][i / 4][i % 4] = 0.f;
#pragma unroll
      for (int i = 0; i < 2; ++i) top[n][i] = kNoScore, total[n][i] = minima[n][i] = 0.f;
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
      total[n][i] *= f, minima[n][i] *= f;
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[n][x][h][i] *= f, out[n][x][h][i + 2] *= f;
    }
  }

  // One tile: scores (log2) [a / 2][2 * (a % 2) + head], value codes, their parameters and exponent.
  __device__ __forceinline__ void add(float (&score)[2][NT][4], const uint32_t (&words)[kWords], const ValueParams& v,
                                      float exponent) {
    uint32_t p[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      raise(n,
            exponent + fmaxf(fmaxf(score[0][n][0], score[0][n][2]), fmaxf(score[1][n][0], score[1][n][2])),
            exponent + fmaxf(fmaxf(score[0][n][1], score[0][n][3]), fmaxf(score[1][n][1], score[1][n][3])));
      const float top0 = top[n][0] - kHeadroom, top1 = top[n][1] - kHeadroom;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float p0 = exp2_fast(score[a / 2][n][a % 2 * 2] - top0);
        const float p1 = exp2_fast(score[a / 2][n][a % 2 * 2 + 1] - top1);
        total[n][0] += p0, total[n][1] += p1;
        minima[n][0] = fmaf(p0, v.minimum[a], minima[n][0]);
        minima[n][1] = fmaf(p1, v.minimum[a], minima[n][1]);
        p[n][a] = transposed(half_pair(p0 * v.scale[a], p1 * v.scale[a]));
      }
    }
#pragma unroll
    for (int x = 0; x < kPieces; ++x)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_codes(out[n][x][h], words[4 * x + 2 * h], words[4 * x + 2 * h + 1], p[n]);
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
          minima[n][i] += __shfl_xor_sync(~0u, minima[n][i], d);
        }
#pragma unroll
        for (int x = 0; x < kPieces; ++x)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            out[n][x][h][i] = fmaf(out[n][x][h][i], kUnit, minima[n][i]);
            out[n][x][h][i + 2] = fmaf(out[n][x][h][i + 2], kUnit, minima[n][i]);
          }
      }
  }
};

// Operands of products over the channels, as a lane holds them: one uint4 for each tile of q heads and piece j, channels
// 32 j + 8 t .. + 7 of head 8 n + g. In shared memory each lane reads what it wrote.
struct InShared {
  uint4* at; // [n][j][lane], from this lane's on
  __device__ __forceinline__ uint4& operator()(int n, int j) const { return at[(n * kPieces + j) * 32]; }
};
struct InRegisters {
  uint4 value[NT][kPieces];
  __device__ __forceinline__ uint4& operator()(int n, int j) { return value[n][j]; }
};

// q times a page's key scales, as the operand of a product with codes, and the page's constants.
template <typename Factors> struct PageQuery {
  Factors factor;       // pairs of channels i and i + 4 of each eight
  float constant[NT][2]; // sum of q * (min + 8 * scale) - 8 * factor, log2 units, heads 2 t and 2 t + 1

  // q: 16-bit; scale, minimum: f16 [D] in shared memory; softmax: the factor on q . k, to log2 units.
  __device__ __forceinline__ void set(const InShared& q, const char* scale, const char* minimum, float softmax,
                                      int lane) {
    const int t = lane % 4;
    float constants[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) constants[n] = 0.f;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint4 s4 = *reinterpret_cast<const uint4*>(scale + (32 * j + 8 * t) * 2);
      const uint4 m4 = *reinterpret_cast<const uint4*>(minimum + (32 * j + 8 * t) * 2);
      const uint32_t sp[4] = {s4.x, s4.y, s4.z, s4.w}, mp[4] = {m4.x, m4.y, m4.z, m4.w};
      float s[8], c[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[i] = i % 2 ? Float16::high(sp[i / 2]) : Float16::low(sp[i / 2]);
        c[i] = fmaf(8.f, s[i], i % 2 ? Float16::high(mp[i / 2]) : Float16::low(mp[i / 2]));
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 q4 = q(n, j);
        const uint32_t qp[4] = {q4.x, q4.y, q4.z, q4.w};
        float x[8];
        uint32_t f[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i] = i % 2 ? E::high(qp[i / 2]) : E::low(qp[i / 2]);
          constants[n] = fmaf(x[i], c[i], constants[n]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t pair = half_pair(x[i] * s[i], x[i + 4] * s[i + 4]);
          f[i] = i % 2 ? sixteenth(pair) : pair;
        }
        factor(n, j) = make_uint4(f[0], f[1], f[2], f[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      constants[n] += __shfl_xor_sync(~0u, constants[n], 1);
      constants[n] += __shfl_xor_sync(~0u, constants[n], 2); // head g = lane / 4
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const uint4 f4 = factor(n, j);
        const uint32_t f[4] = {f4.x, f4.y, f4.z, f4.w};
        mma_minus_eight(sum, f);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        constant[n][i] = softmax * fmaf(sum[i], kUnit, __shfl_sync(~0u, constants[n], 8 * t + 4 * i));
    }
  }

  // Scores (log2) of a tile from its key codes.
  __device__ __forceinline__ void scores(const uint32_t (&words)[kWords], float (&score)[2][NT][4], float softmax,
                                         float cap_log2) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0.f;
      }
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 f4 = factor(n, j);
        const uint32_t f[4] = {f4.x, f4.y, f4.z, f4.w};
#pragma unroll
        for (int m = 0; m < 2; ++m)
          mma_codes(score[m][n], words[2 * m * kPieces + j], words[(2 * m + 1) * kPieces + j], f);
      }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[m][n][i] = fmaf(score[m][n][i], softmax * kUnit, constant[n][i % 2]);
          if (SOFTCAP) score[m][n][i] = capped(score[m][n][i], cap_log2);
        }
  }
};

// Scores (log2) of a tile of 16-bit keys. load(a, j): channels 32 j + 8 t .. + 7 of the lane's token 4 g + a.
template <typename Load>
__device__ __forceinline__ void scores_16(const InShared& q, const Load& load, float (&score)[2][NT][4], float softmax,
                                          float cap_log2) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < NT; ++n) score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const uint4 r = load(2 * m, j), r8 = load(2 * m + 1, j);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 b = q(n, j);
        E::mma(score[m][n], r.x, r8.x, r.y, r8.y, b.x, b.y);
        E::mma(score[m][n], r.z, r8.z, r.w, r8.w, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[m][n][i] *= softmax;
        if (SOFTCAP) score[m][n][i] = capped(score[m][n][i], cap_log2);
      }
  }
}

// Sinks base .. base + 31, of which there are `count` in all, in 16 bit: k and v [count, D]. hidden(token, n, i) says
// what head 8 n + 2 t + i does not read.
template <typename Hidden>
__device__ __forceinline__ void attend_sinks(Attention& out, const InShared& q, const uint16_t* k, const uint16_t* v,
                                             int base, int count, const Hidden& hidden, float softmax, float cap_log2,
                                             int lane) {
  const int g = lane / 4, t = lane % 4;
  float score[2][NT][4];
  scores_16(
      q,
      [&](int a, int j) {
        const int token = min(base + 4 * g + a, count - 1);
        return *reinterpret_cast<const uint4*>(k + token * kDim + 32 * j + 8 * t);
      },
      score, softmax, cap_log2);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float high[2] = {kHidden, kHidden}, p[4][2];
#pragma unroll
    for (int a = 0; a < 4; ++a)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = base + 4 * g + a;
        p[a][i] = token >= count || hidden(token, n, i) ? kHidden : score[a / 2][n][a % 2 * 2 + i];
        high[i] = fmaxf(high[i], p[a][i]);
      }
    out.raise(n, high[0], high[1]);
#pragma unroll
    for (int a = 0; a < 4; ++a)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        p[a][i] = exp2_fast(p[a][i] - (out.top[n][i] - kHeadroom));
        out.total[n][i] += p[a][i];
      }
    const int last = min(count - base, kTile);
#pragma unroll 1
    for (int four = 0; four < last; four += 4)
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const uint16_t* value = v + min(base + four + a, count - 1) * kDim + 4 * g;
        const float p0 = __shfl_sync(~0u, p[a][0], four + t) * (1.f / kUnit);
        const float p1 = __shfl_sync(~0u, p[a][1], four + t) * (1.f / kUnit);
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
          const uint2 pairs = *reinterpret_cast<const uint2*>(value + 32 * x);
          const float channel[4] = {E::low(pairs.x), E::high(pairs.x), E::low(pairs.y), E::high(pairs.y)};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float(&o)[4] = out.out[n][x][e / 2];
            o[e % 2 * 2] = fmaf(p0, channel[e], o[e % 2 * 2]);
            o[e % 2 * 2 + 1] = fmaf(p1, channel[e], o[e % 2 * 2 + 1]);
          }
        }
      }
  }
}

} // namespace comet
