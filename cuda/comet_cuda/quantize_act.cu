// quantize_act: gather by the permutation, rotate, quantize per token and block, sum, tile, in one pass over x.
//
// A cta takes TOKENS tokens. It stages their rows in shared memory, channel by channel with the tokens side by side in
// one word, so that one gathered word serves all of them. Then eight lanes take a block of 128 channels, 16 values each
// (quantize.cuh). gridDim.y ctas share the blocks of the same tokens where there are too few tokens to fill the GPU.
//
// Definitions: ELEMENT (Float32, BFloat16, Float16), TOKENS (1, 2, 4; at most 2 for Float32), HADAMARD (0, 1),
// FUSE (0 none; 1 RMSNorm with an optional residual add; 2 SiLU(gate) * up, x holds [gate | up]),
// OUT (0 canonical; 1 tiled for sm_90, see weight_layout.py; 2 tiled for sm_80, 3 portable, see weight_layout_sm80.py),
// VECTOR (1: K is a multiple of 4 and every row is aligned to 4 elements; 0: any),
// STAGE (1; 0: rows do not fit in shared memory, gather from global memory),
// THREADS a cta and MIN_CTAS a multiprocessor (bounds of registers).
#include "comet/rows.cuh"

using namespace comet;

struct Params {
  const void* x;           // [M, K], or [M, 2K] for FUSE == 2
  const void* residual;    // [M, K] or null (FUSE == 1)
  void* residual_out;      // [M, K] = x + residual (FUSE == 1 with residual)
  const void* norm_weight; // [K] (FUSE == 1)
  const int* perm;         // [K], aligned to 512 bytes
  const uint8_t* bits;     // [NB]
  const float* clip;       // [NB]
  void* codes;
  float* scale; // [M, NB] canonical, or the tiled forms' meta
  int M, K, NB;
  float eps; // FUSE == 1
};

__device__ __forceinline__ float sigmoid_times(float g) { return __fdividef(g, 1.f + __expf(-g)); }

// Groups of four channels that a thread loads before it stores the first: 128 bytes, so that a whole row of usual width
// is one round trip to memory. A second input (residual, up) halves it.
constexpr int kFits = 128 / (4 * E::kBytes * TOKENS) / (FUSE == 0 ? 1 : 2);
constexpr int kBatch = !VECTOR ? 1 : kFits < 8 ? kFits : 8;

// Rows of x, as the fused producer leaves them -> shared memory.
__device__ __forceinline__ void stage_rows(const Params& p, char* shared, int token0) {
  const int padded = p.NB * kBlock;
  const size_t pitch = size_t(FUSE == 2 ? 2 * p.K : p.K) * E::kBytes;
  const size_t first = size_t(token0) * pitch;
  const bool add = FUSE == 1 && p.residual != nullptr;
  float squares[TOKENS] = {};
  const auto batch = [&](int c0, bool full) { // full: all channels and tokens exist
    Four x[kBatch][TOKENS], other[kBatch][TOKENS];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const int c = c0 + 4 * THREADS * i;
        const bool valid = full || (c < p.K && token0 + t < p.M);
        const size_t row = first + t * pitch;
        x[i][t] = other[i][t] = Four{};
        if (valid) x[i][t] = load_four(static_cast<const char*>(p.x) + row, c, p.K);
        if (FUSE == 2 && valid)
          other[i][t] = load_four(static_cast<const char*>(p.x) + row + size_t(p.K) * E::kBytes, c, p.K);
        if (add && valid) other[i][t] = load_four(static_cast<const char*>(p.residual) + row, c, p.K);
      }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = c0 + 4 * THREADS * i;
      if (!full && c >= padded) break;
      if constexpr (FUSE != 0) {
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          float h[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float a = channel_of(x[i][t], j), b = channel_of(other[i][t], j);
            h[j] = FUSE == 2 ? __fmul_rn(rounded(sigmoid_times(a)), b) : add ? rounded(__fadd_rn(a, b)) : a;
            squares[t] = fmaf(h[j], h[j], squares[t]);
          }
          make_four(h, x[i][t]);
          if (add && blockIdx.y == 0 && (full || (c < p.K && token0 + t < p.M)))
            store_four(static_cast<char*>(p.residual_out) + first + t * pitch, c, p.K, x[i][t]);
        }
      }
      stage_four(shared, c, x[i]);
    }
  };
  constexpr int kStep = 4 * THREADS * kBatch;
  for (int start = 0; start < padded; start += kStep) {
    const int c0 = start + 4 * threadIdx.x;
    if (start + kStep <= p.K && token0 + TOKENS <= p.M)
      batch(c0, true);
    else if (c0 < padded)
      batch(c0, false);
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

// A lane's place: which of the four blocks of its warp, and where among the eight lanes of that block.
struct Lane {
  int lane, group;
  __device__ Lane() : lane(threadIdx.x % kLanesPerBlock), group(threadIdx.x % 32 / kLanesPerBlock) {}
};

// What a lane knows of the block that it quantizes next. Groups beyond the last block repeat it and store nothing, so
// that every shuffle has the whole warp.
struct NextBlock {
  bool is_int4;
  float clip;
  int4 index[4]; // channels of the 16 slots; group q is slots 4q on, q = 2 * j3 + j2

  __device__ __forceinline__ void prepare(const Params& p, int first, const Lane& at) {
    const int block = min(first + at.group, p.NB - 1);
    is_int4 = p.bits[block] == 4;
    clip = p.clip[block];
    // Both orders differ from slot group to slot group by address bits that are zero in the first (quantize.cuh).
    const bool start_order = HADAMARD && is_int4;
    const int first_channel =
        block * kBlock + (start_order ? 16 * at.lane + 8 * ((at.lane >> 1) & 1) + 4 * (at.lane & 1) : 4 * at.lane);
    const int flip2 = start_order ? 4 : 64, flip3 = start_order ? 8 : 32; // channels, for j2 and j3
    if (block * kBlock + kBlock <= p.K) {
      const size_t from = reinterpret_cast<size_t>(p.perm + first_channel); // perm is aligned to a block
#pragma unroll
      for (int q = 0; q < 4; ++q)
        index[q] = __ldg(reinterpret_cast<const int4*>(from ^ (4 * ((q & 1) * flip2 + (q >> 1) * flip3))));
      return;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) { // padding channels stand for themselves: zeros in shared memory
      const int c = first_channel ^ ((q & 1) * flip2 + (q >> 1) * flip3);
      index[q].x = c < p.K ? p.perm[c] : c;
      index[q].y = c + 1 < p.K ? p.perm[c + 1] : c + 1;
      index[q].z = c + 2 < p.K ? p.perm[c + 2] : c + 2;
      index[q].w = c + 3 < p.K ? p.perm[c + 3] : c + 3;
    }
  }
};

// Where a lane stores its four words of codes, its scale or its sum, of one block and the first token of the cta.
// Word q holds channels 4 * (lane + 8 * (q / 2) + 16 * (q % 2)) on.
struct Destination {
  char* codes;
  float* meta; // lane 0: of the scale; lane 1: of the sum
  __device__ __forceinline__ Destination(const Params& p, int token0, int block, int lane) {
    char* all = static_cast<char*>(p.codes);
#if OUT == 0
    codes = all + (size_t(token0) * p.NB + block) * kBlock + 4 * lane;
    meta = p.scale + size_t(token0) * p.NB + block;
#elif OUT == 1 // the swizzle flips address bits 4..6 by the row
    const int atoms = (p.M + 7) / 8, row = token0 % 8;
    const size_t atom = size_t(block) * atoms + token0 / 8;
    codes = all + atom * 1024 + row * 128 + ((4 * lane) ^ (16 * row));
    meta = p.scale + atom * 16 + 2 * row + (row % 2 ? -1 : 0) + 2 * lane;
#else
    codes = all + size_t(block) * p.M * kBlock;
    meta = p.scale + (size_t(block) * p.M + token0) * 2 + lane;
#endif
  }
  __device__ __forceinline__ uint32_t* word(const Params& p, int t, int q) const {
    const size_t offset = 32 * (q / 2) + 64 * (q % 2);
    if (OUT == 1) // rows are 128 bytes apart and their swizzles 16; TOKENS divides 8, so nothing carries
      return reinterpret_cast<uint32_t*>(reinterpret_cast<size_t>(codes) ^ (144 * t) ^ offset);
    return reinterpret_cast<uint32_t*>(codes + size_t(t) * p.NB * kBlock + offset);
  }
};

__device__ __forceinline__ void store(const Params& p, const Destination& to, int token0, int t, int lane, bool is_int4, bool all_int4,
                                      const uint32_t (&pairs)[8], float scale, float sum) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#if OUT == 0
    *to.word(p, t, q) = bytes_of(pairs[2 * q], pairs[2 * q + 1]);
#elif OUT == 1
    uint32_t data = e4m3_of(pairs[2 * q], pairs[2 * q + 1]);
    if (!all_int4 && !is_int4) data = bytes_of(pairs[2 * q], pairs[2 * q + 1]);
    *to.word(p, t, q) = data;
#else
    const uint32_t data = bytes_of(pairs[2 * q], pairs[2 * q + 1]);
    const size_t at = size_t(token0 + t) * (kBlock / 4) + lane + 8 * (q / 2) + 16 * (q % 2);
    if (OUT == 2 && is_int4)
      reinterpret_cast<uint16_t*>(to.codes)[at] = pack_nibbles(data);
    else
      reinterpret_cast<uint32_t*>(to.codes)[at] = data;
#endif
  }
  if (lane < (OUT == 0 ? 1 : 2)) {
    const size_t at = OUT == 0 ? size_t(t) * p.NB : OUT == 1 ? (t & 1) + 4 * (t >> 1) : 2 * t;
    to.meta[at] = lane == 0 ? scale : sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_act(const Params p) {
  extern __shared__ __align__(16) char shared[];
  const Lane at;
  const int token0 = blockIdx.x * TOKENS;
  const int warp = __shfl_sync(kWarp, threadIdx.x / 32, 0); // so that the compiler knows it is one value
  const int step = gridDim.y * (THREADS / kLanesPerBlock);
  int first = blockIdx.y * (THREADS / kLanesPerBlock) + warp * kBlocksPerWarp; // the warp's first block
  NextBlock next;
  if (first < p.NB) next.prepare(p, first, at); // nothing here depends on the previous kernel
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
      const int4 four = next.index[i / 4];
      const int channel = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
#if STAGE
      words[i] = *reinterpret_cast<const Word*>(shared + channel * kWordBytes);
#else
      words[i] = 0;
      if (channel < p.K && token0 < p.M)
        words[i] = static_cast<const Word*>(p.x)[size_t(token0) * p.K + channel];
#endif
    }
    const int block = first + at.group;
    const bool is_int4 = next.is_int4, all_int4 = __all_sync(kWarp, is_int4);
    const uint32_t bound = is_int4 ? 0x47004700u : 0x57F057F0u; // 7 or 127, twice, as f16
    // scale = absmax * factor; for clip in (0, 1] the quotient is exact without the general division
    float factor = is_int4 ? divide(next.clip, 7.f, 1.f / 7.f) : divide(next.clip, 127.f, 1.f / 127.f);
    asm volatile("" : "+f"(factor)); // here, once, and not again for every token
    const Destination to(p, token0, block, at.lane);
#pragma unroll
    for (int t0 = 0; t0 < TOKENS; t0 += kHalves)
#pragma unroll 1 // one token's values in registers at a time
      for (int t = t0; t < t0 + kHalves; ++t) {
        float v[kSlots];
#pragma unroll
        for (int i = 0; i < kSlots; ++i) v[i] = token_of(words[i], t0 / kHalves, t - t0);
#if HADAMARD
        if (all_int4) {
          hadamard_in_registers(v, at.lane, kWarp);
        } else if (is_int4) { // the warp on the border between 8- and 4-bit blocks
          hadamard_in_registers(v, at.lane, 0xFFu << (kLanesPerBlock * at.group));
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
        const float reciprocal = reciprocal_of(divisor);
        uint32_t pairs[kSlots / 2]; // codes as f16, which holds them and their sums exactly
#pragma unroll
        for (int i = 0; i < kSlots; i += 2)
          pairs[i / 2] = clamp_pair(round_pair(divide(v[i], divisor, reciprocal), divide(v[i + 1], divisor, reciprocal)),
                                    bound);
        const float sum = OUT == 0 ? 0.f : block_sum(sum_of(pairs));
        if (block < p.NB && (OUT == 1 || token0 + t < p.M))
          store(p, to, token0, t, at.lane, is_int4, all_int4, pairs, scale, sum);
      }
    first += step;
    if (first < p.NB) next.prepare(p, first, at);
  }
}
