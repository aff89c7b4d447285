// Rows of activations on their way into shared memory: channel by channel, with TOKENS tokens side by side in a word.
// Needs the definitions of quantize_act.cu.
#pragma once

#include "comet/quantize.cuh"

namespace comet {

using E = ELEMENT;

constexpr int kWordBytes = E::kBytes * TOKENS; // one channel of all tokens of the cta
static_assert(kWordBytes <= 16, "a word is one shared memory access");
static_assert(STAGE || (TOKENS == 1 && FUSE == 0), "fused variants need the row in shared memory");

template <int kBytes> struct WordOf;
template <> struct WordOf<2> { using Type = uint16_t; };
template <> struct WordOf<4> { using Type = uint32_t; };
template <> struct WordOf<8> { using Type = uint2; };
template <> struct WordOf<16> { using Type = uint4; };
using Word = typename WordOf<kWordBytes>::Type;
using Four = typename WordOf<4 * E::kBytes>::Type; // four consecutive channels of one token

__device__ __forceinline__ uint32_t part(uint32_t w, int) { return w; }
__device__ __forceinline__ uint32_t part(uint2 w, int i) { return i ? w.y : w.x; }
__device__ __forceinline__ uint32_t part(uint4 w, int i) { return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w; }

// A token of a gathered word, as float32: `half` of 32-bit part `i`.
constexpr int kHalves = E::kBytes == 4 || TOKENS == 1 ? 1 : 2;
__device__ __forceinline__ float token_of(Word w, int i, int half) {
  return kHalves == 1 ? E::to_float(part(w, i)) : E::half_to_float(part(w, i), half);
}
template <typename T> __device__ __forceinline__ float channel_of(T four, int c) { // channel c of a Four
  if (E::kBytes == 4) return __uint_as_float(part(four, c));
  const uint32_t pair = part(four, c / 2);
  return E::to_float(c % 2 ? pair >> 16 : pair & 0xFFFFu);
}
__device__ __forceinline__ void make_four(const float (&x)[4], uint2& four) {
  four.x = E::pair_of(x[0], x[1]);
  four.y = E::pair_of(x[2], x[3]);
}
__device__ __forceinline__ void make_four(const float (&x)[4], uint4& four) {
  four = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
__device__ __forceinline__ float rounded(float x) { return E::to_float(E::from_float(x)); }
template <int N> __device__ __forceinline__ void round_all(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) E::round_pair(x[i], x[i + 1]);
}

// Four channels that lie `offset` bytes after `row`, of which `left` exist; zeros beyond.
__device__ __forceinline__ Four load_four(const char* row, size_t offset, int left) {
  const char* at = row + offset;
  if constexpr (VECTOR) return load_once(reinterpret_cast<const Four*>(at)); // all four exist, if the first does
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = 0.f;
    if (i < left)
      x[i] = E::kBytes == 4 ? reinterpret_cast<const float*>(at)[i]
                            : E::to_float(reinterpret_cast<const uint16_t*>(at)[i]);
  }
  Four four;
  make_four(x, four);
  return four;
}
__device__ __forceinline__ void store_four(void* row, int c, int K, Four four) {
  char* at = static_cast<char*>(row) + size_t(c) * E::kBytes;
  if constexpr (VECTOR) {
    *reinterpret_cast<Four*>(at) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (c + i >= K) continue;
    if (E::kBytes == 4)
      reinterpret_cast<float*>(at)[i] = channel_of(four, i);
    else
      reinterpret_cast<uint16_t*>(at)[i] = uint16_t(part(four, i / 2) >> (16 * (i % 2)));
  }
}

// Four channels of all tokens -> shared memory, tokens side by side; and back.
__device__ __forceinline__ void stage_four(char* shared, int c, const Four (&x)[TOKENS]) {
  char* at = shared + c * kWordBytes;
  if constexpr (TOKENS == 1) {
    *reinterpret_cast<Four*>(at) = x[0];
  } else if constexpr (E::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(at + 16 * i) = make_uint4(part(x[0], 2 * i), part(x[1], 2 * i), part(x[0], 2 * i + 1),
                                                          part(x[1], 2 * i + 1));
  } else if constexpr (TOKENS == 2) {
    *reinterpret_cast<uint4*>(at) =
        make_uint4(__byte_perm(x[0].x, x[1].x, 0x5410), __byte_perm(x[0].x, x[1].x, 0x7632),
                   __byte_perm(x[0].y, x[1].y, 0x5410), __byte_perm(x[0].y, x[1].y, 0x7632));
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = part(x[0], i), b = part(x[1], i), d = part(x[2], i), e = part(x[3], i);
      *reinterpret_cast<uint4*>(at + 16 * i) = make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(d, e, 0x5410),
                                                          __byte_perm(a, b, 0x7632), __byte_perm(d, e, 0x7632));
    }
  }
}
__device__ __forceinline__ float staged(const char* shared, int c, int t) {
  return token_of(*reinterpret_cast<const Word*>(shared + c * kWordBytes), t / kHalves, t % kHalves);
}

} // namespace comet
