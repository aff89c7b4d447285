// quantize_act: gather by the permutation, rotate, quantize per token and block, sum, tile, in one pass over the activation.
//
// A cta takes TOKENS tokens. It stages their rows in shared memory, channel by channel with the tokens side by side in
// one word, so that one gathered word serves all of them. Then eight lanes take a block of 128 channels, 16 values each
// (quantize.cuh). gridDim.y ctas share the blocks of the same tokens where there are too few tokens to fill the GPU.
//
// Definitions: ELEMENT (Float32, BFloat16, Float16), TOKENS (1, 2, 4; at most 2 for Float32), HADAMARD (0, 1),
// FUSE (0 none; 1 RMSNorm with an optional residual add; 2 SiLU(gate) * up, x holds [gate | up]),
// OUT (0 canonical; 1 tiled for sm_90, see weight_layout.py; 2 tiled for sm_80, 3 portable, see weight_layout_sm80.py),
// VECTOR (1: K is a multiple of 4 and every row is aligned to 4 elements; 0: any),
// THREADS a cta and MIN_CTAS a multiprocessor (bounds of registers), STAGE (1; 0: no shared memory, gather from global memory, for rows that do not fit).
#include "comet/quantize.cuh"

using namespace comet;
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
  four.x = E::from_float(x[0]) | (E::from_float(x[1]) << 16);
  four.y = E::from_float(x[2]) | (E::from_float(x[3]) << 16);
}
__device__ __forceinline__ void make_four(const float (&x)[4], uint4& four) {
  four = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
__device__ __forceinline__ float rounded(float x) { return E::to_float(E::from_float(x)); }

// Four channels of a row from `c` on; zeros beyond K.
__device__ __forceinline__ Four load_four(const void* row, int c, int K) {
  const char* at = static_cast<const char*>(row) + size_t(c) * E::kBytes;
  if constexpr (VECTOR) return load_once(reinterpret_cast<const Four*>(at)); // c < K holds for all four
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = 0.f;
    if (c + i < K)
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

struct Params {
  const void* x;           // [M, K], or [M, 2K] for FUSE == 2
  const void* residual;    // [M, K] or null (FUSE == 1)
  void* residual_out;      // [M, K] = x + residual (FUSE == 1 with residual)
  const void* norm_weight; // [K] (FUSE == 1)
  const int* perm;         // [K] or null
  const uint8_t* bits;     // [NB]
  const float* clip;       // [NB]
  void* codes;
  float* scale; // [M, NB] canonical, or the tiled forms' meta
  int M, K, NB;
  float eps;  // FUSE == 1
};

__device__ __forceinline__ float sigmoid_times(float g) { return __fdividef(g, 1.f + __expf(-g)); }

// Rows of x, as the fused producer leaves them -> shared memory.
__device__ __forceinline__ void stage_rows(const Params& p, char* shared, int token0) {
  const int padded = p.NB * kBlock;
  const int width = FUSE == 2 ? 2 * p.K : p.K;
  const size_t pitch = size_t(width) * E::kBytes;
  const char* rows = static_cast<const char*>(p.x) + size_t(token0) * pitch;
  float squares[TOKENS] = {};
#pragma unroll 4
  for (int c = 4 * threadIdx.x; c < padded; c += 4 * blockDim.x) {
    Four x[TOKENS] = {};
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (c < p.K && token0 + t < p.M) x[t] = load_four(rows + t * pitch, c, p.K);
    if constexpr (FUSE == 2) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        Four up = {};
        if (c < p.K && token0 + t < p.M)
          up = load_four(rows + t * pitch + size_t(p.K) * E::kBytes, c, p.K);
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) h[i] = __fmul_rn(rounded(sigmoid_times(channel_of(x[t], i))), channel_of(up, i));
        make_four(h, x[t]);
      }
    }
    if constexpr (FUSE == 1) {
      if (p.residual != nullptr) {
        const size_t first = size_t(token0) * pitch;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          if (c >= p.K || token0 + t >= p.M) continue;
          const Four r = load_four(static_cast<const char*>(p.residual) + first + t * pitch, c, p.K);
          float h[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) h[i] = __fadd_rn(channel_of(x[t], i), channel_of(r, i));
          make_four(h, x[t]);
          if (blockIdx.y == 0)
            store_four(static_cast<char*>(p.residual_out) + first + t * pitch, c, p.K, x[t]);
        }
      }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) squares[t] = fmaf(channel_of(x[t], i), channel_of(x[t], i), squares[t]);
    }
    stage_four(shared, c, x);
  }
  if constexpr (FUSE == 1) {
    __shared__ float partial[TOKENS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) squares[t] += __shfl_xor_sync(~0u, squares[t], d);
      if (lane == 0) partial[t][warp] = squares[t];
    }
    __syncthreads();
    float inverse[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float sum = lane < warps ? partial[t][lane] : 0.f;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      inverse[t] = rsqrtf(sum / float(p.K) + p.eps);
    }
    for (int c = 4 * threadIdx.x; c < p.K; c += 4 * blockDim.x) { // the thread's own channels
      const Four w = load_four(p.norm_weight, c, p.K);
      Four x[TOKENS];
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          h[i] = __fmul_rn(channel_of(w, i), rounded(__fmul_rn(staged(shared, c + i, t), inverse[t])));
        make_four(h, x[t]);
      }
      stage_four(shared, c, x);
    }
  }
}

// Channels of a lane's 16 slots, four consecutive ones in each int4.
__device__ __forceinline__ void load_channels(const Params& p, int block, int lane, bool start_order, int4 (&index)[4]) {
  const int first = block * kBlock;
  const bool gather = p.perm != nullptr;
  const bool whole = first + kBlock <= p.K;
#pragma unroll
  for (int q = 0; q < 4; ++q) { // q = slot / 4 = 2 * j3 + j2
    const int j3 = q >> 1, j2 = q & 1;
    const int at = first + (start_order ? 16 * lane + 8 * (j3 ^ ((lane >> 1) & 1)) + 4 * (j2 ^ (lane & 1))
                                        : 4 * lane + 32 * j3 + 64 * j2);
    if (gather && whole) {
      index[q] = __ldg(reinterpret_cast<const int4*>(p.perm + at));
    } else { // padding channels stand for themselves: zeros in shared memory
      index[q] = make_int4(at, at + 1, at + 2, at + 3);
      if (gather) {
        if (at < p.K) index[q].x = p.perm[at];
        if (at + 1 < p.K) index[q].y = p.perm[at + 1];
        if (at + 2 < p.K) index[q].z = p.perm[at + 2];
        if (at + 3 < p.K) index[q].w = p.perm[at + 3];
      }
    }
  }
}

__device__ __forceinline__ void store_codes(const Params& p, int token, int block, int lane, bool is_int4,
                                            const float (&rounded_codes)[kSlots], const uint32_t (&bytes)[4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int word = lane + 8 * (q >> 1) + 16 * (q & 1); // four channels, 4 * word on
#if OUT == 0
    if (token < p.M)
      reinterpret_cast<uint32_t*>(p.codes)[(size_t(token) * p.NB + block) * (kBlock / 4) + word] = bytes[q];
#elif OUT == 1
    uint32_t data = bytes[q];
    if (is_int4)
      data = pack_e4m3(rounded_codes[4 * q] - kRound, rounded_codes[4 * q + 1] - kRound,
                       rounded_codes[4 * q + 2] - kRound, rounded_codes[4 * q + 3] - kRound);
    const int row = token % 8, chunk = (word >> 2) ^ row;
    const size_t atom = size_t(block) * ((p.M + 7) / 8) + token / 8;
    reinterpret_cast<uint32_t*>(p.codes)[atom * 256 + row * 32 + chunk * 4 + word % 4] = data;
#else
    char* rows = static_cast<char*>(p.codes) + size_t(block) * p.M * kBlock;
    if (token < p.M) {
      if (OUT == 2 && is_int4)
        reinterpret_cast<uint16_t*>(rows)[size_t(token) * (kBlock / 4) + word] = pack_nibbles(bytes[q]);
      else
        reinterpret_cast<uint32_t*>(rows)[size_t(token) * (kBlock / 4) + word] = bytes[q];
    }
#endif
  }
}

// Lane 0 stores the scale, lane 1 the sum.
__device__ __forceinline__ void store_meta(const Params& p, int token, int block, int lane, float scale, int sum) {
#if OUT == 0
  if (lane == 0 && token < p.M) p.scale[size_t(token) * p.NB + block] = scale;
#elif OUT == 1
  if (lane < 2)
    p.scale[(size_t(block) * ((p.M + 7) / 8) + token / 8) * 16 + (token % 8) / 2 * 4 + 2 * lane + token % 2] =
        lane == 0 ? scale : float(sum);
#else
  if (lane < 2 && token < p.M) p.scale[(size_t(block) * p.M + token) * 2 + lane] = lane == 0 ? scale : float(sum);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_act(const Params p) {
  extern __shared__ __align__(16) char shared[];
  const int token0 = blockIdx.x * TOKENS;
  const int lane = threadIdx.x % kLanesPerBlock; // within the eight lanes of a block
  const int group = threadIdx.x % 32 / kLanesPerBlock;
  const int step = gridDim.y * (THREADS / kLanesPerBlock);
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0); // so that the compiler knows it is one value
  int first = blockIdx.y * (THREADS / kLanesPerBlock) + warp * kBlocksPerWarp; // the warp's first block

  // Groups beyond the last block repeat it and store nothing, so that every shuffle has the whole warp.
  bool is_int4 = false;
  float clip = 1.f;
  int4 index[4];
  const auto prepare = [&] {
    const int block = min(first + group, p.NB - 1);
    is_int4 = p.bits[block] == 4;
    clip = p.clip[block];
    load_channels(p, block, lane, HADAMARD && is_int4, index);
  };
  if (first < p.NB) prepare(); // nothing here depends on the previous kernel
  wait_for_previous_kernel();
#if STAGE
  stage_rows(p, shared, token0);
  __syncthreads();
#endif
  let_next_kernel_start();

  while (first < p.NB) {
    Word words[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int4 four = index[i / 4];
      const int channel = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
#if STAGE
      words[i] = *reinterpret_cast<const Word*>(shared + channel * kWordBytes);
#else
      words[i] = 0;
      if (channel < p.K) words[i] = static_cast<const Word*>(p.x)[size_t(token0) * p.K + channel];
#endif
    }
    const int block = first + group;
    const bool now_int4 = is_int4;
    const float qmax = now_int4 ? 7.f : 127.f;
    const float factor = __fdiv_rn(clip, qmax);

#pragma unroll
    for (int t0 = 0; t0 < TOKENS; t0 += kHalves)
#pragma unroll 1 // one token's values in registers at a time
    for (int t = t0; t < t0 + kHalves; ++t) {
      float v[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) v[i] = token_of(words[i], t0 / kHalves, t - t0);
#if HADAMARD
      if (__all_sync(kWarp, now_int4)) {
        hadamard_in_registers(v, lane, kWarp);
      } else if (now_int4) { // the warp on the border between 8- and 4-bit blocks
        hadamard_in_registers(v, lane, 0xFFu << (kLanesPerBlock * group));
      }
#endif
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) largest = fmaxf(largest, fabsf(v[i]));
      float scale = __fmul_rn(block_max(largest), factor);
      if (!(scale > 0.f)) scale = 1.f;
      float divisor = scale;
      if (!(divisor >= kTiny && divisor <= kHuge)) { // both sides by a power of two: the quotient stays
        const float power = divisor < kTiny ? kHuge : kTiny;
        divisor *= power;
#pragma unroll
        for (int i = 0; i < kSlots; ++i) v[i] *= power;
      }
      const float reciprocal = __frcp_rn(divisor);
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
        v[i] = __fadd_rn(fminf(fmaxf(divide(v[i], divisor, reciprocal), -qmax), qmax), kRound);
      uint32_t bytes[4];
      int sum = 0;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        bytes[q] = pack_bytes(__float_as_uint(v[4 * q]), __float_as_uint(v[4 * q + 1]), __float_as_uint(v[4 * q + 2]),
                              __float_as_uint(v[4 * q + 3]));
        sum = add_bytes(bytes[q], sum);
      }
#if OUT != 0
      sum = block_sum(sum);
#endif
      if (block < p.NB) store_codes(p, token0 + t, block, lane, now_int4, v, bytes);
      if (block < p.NB) store_meta(p, token0 + t, block, lane, scale, sum);
    }
    first += step;
    if (first < p.NB) prepare();
  }
}
