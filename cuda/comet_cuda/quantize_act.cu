// quantize_act: gather by the permutation, rotate, quantize per token and block, sum, tile, in one pass over x.
//
// A cta takes TOKENS tokens. It stages their rows in shared memory, channel by channel with the tokens side by side in
// one word, so that one gathered word serves all of them. Then eight lanes take a block of 128 channels, 16 values each
// (quantize.cuh), and the tokens of one 32-bit word together. gridDim.y ctas share the blocks of the same tokens where there are too few tokens to fill the GPU.
//
// Definitions: ELEMENT (Float32, BFloat16, Float16), TOKENS (1, 2, 4; at most 2 for Float32), HADAMARD (0, 1),
// FUSE (0 none; 1 RMSNorm with an optional residual add; 2 SiLU(gate) * up, x holds [gate | up]),
// OUT (0 canonical; 1 tiled for sm_90, see weight_layout.py; 2 tiled for sm_80, 3 portable, see weight_layout_sm80.py),
// VECTOR (1: K is a multiple of 4 and every row is aligned to 4 elements; 0: any),
// STAGE (1; 0: rows do not fit in shared memory, gather from global memory),
// THREADS a cta and MIN_CTAS a multiprocessor (bounds of registers).
#include "comet/codes.cuh"
#include "comet/quantize_scale.cuh"

using namespace comet;

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
  const char* second = static_cast<const char*>(FUSE == 2 ? p.x : p.residual) + (FUSE == 2 ? size_t(p.K) * E::kBytes : 0);
  float squares[TOKENS] = {};
  const auto batch = [&](int c0, bool full) { // full: all channels and tokens exist
    Four x[kBatch][TOKENS], other[kBatch][TOKENS];
    const size_t start = first + size_t(c0) * E::kBytes;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        constexpr size_t kApart = size_t(4 * THREADS) * E::kBytes; // a constant offset costs no instruction
        const int c = c0 + 4 * THREADS * i;
        const bool valid = full || (c < p.K && token0 + t < p.M);
        const size_t at = start + t * pitch;
        x[i][t] = other[i][t] = Four{};
        if (valid) x[i][t] = load_four(static_cast<const char*>(p.x) + at, i * kApart, p.K - c);
        if (valid && (FUSE == 2 || add)) other[i][t] = load_four(second + at, i * kApart, p.K - c);
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
            const float a = channel_of(x[i][t], j);
            h[j] = FUSE == 2 ? sigmoid_times(a) : add ? __fadd_rn(a, channel_of(other[i][t], j)) : a;
          }
          if (FUSE == 2 || add) round_all(h);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (FUSE == 2) h[j] = __fmul_rn(h[j], channel_of(other[i][t], j));
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
      const Four w = load_four(static_cast<const char*>(p.norm_weight) + size_t(c) * E::kBytes, 0, p.K - c);
      Four x[TOKENS];
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) h[i] = __fmul_rn(staged(shared, c + i, t), inverse[t]);
        round_all(h);
#pragma unroll
        for (int i = 0; i < 4; ++i) h[i] = __fmul_rn(channel_of(w, i), h[i]);
        make_four(h, x[t]);
      }
      stage_four(shared, c, x);
    }
  }
}

// Tokens that are quantized together; each of a block's first lanes answers for one of them (Lane::token).
constexpr int kJoint = kHalves;

// A lane's place: which of the four blocks of its warp, and where among the eight lanes of that block.
struct Lane {
  int lane, group;
  __device__ Lane() : lane(threadIdx.x % kLanesPerBlock), group(threadIdx.x % 32 / kLanesPerBlock) {}
  __device__ int token() const { return lane % kJoint; }
  // The value that the lane of token t holds, in every lane of the block.
  __device__ static float of_token(float x, int t) { return kJoint == 1 ? x : __shfl_sync(kWarp, x, t, kJoint); }
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

// Where a lane stores, for one block and the first token of the cta: its four words of codes, and the scale (lanes
// below kJoint) or sum (the next kJoint) of its token. Word q holds channels 4 * (lane + 8 * (q / 2) + 16 * (q % 2)) on.
// Indices have 32 bits: the launcher sees to it that there are fewer than 2^33 codes.
struct Destination {
  char* codes;   // OUT < 2: of the first word; else of the block
  uint32_t word; // OUT >= 2: of the first word, in the block; in 16-bit words for nibbles
  uint32_t meta;
  static constexpr int kWords = kBlock / 4;
  __device__ static int meta_at(int row) { return 4 * (row / 2) + row % 2; }
  __device__ __forceinline__ Destination(const Params& p, int token0, int block, const Lane& at) {
    char* const all = static_cast<char*>(p.codes);
    const int token = token0 + at.token(), kind = at.lane / kJoint;
    word = token0 * kWords + at.lane;
#if OUT == 0
    codes = all + (size_t(token0) * p.NB + block) * kBlock + 4 * at.lane;
    meta = uint32_t(token) * p.NB + block;
#elif OUT == 1 // the swizzle flips address bits 4..6 by the row
    const uint32_t row = token0 % 8, atom = uint32_t(block) * atoms(p) + token0 / 8;
    codes = all + size_t(atom) * 1024 + row * 128 + ((4 * at.lane) ^ (16 * row));
    meta = atom * 16 + meta_at(token % 8) + 2 * kind;
#else
    codes = all + size_t(block) * p.M * kBlock;
    meta = (uint32_t(block) * p.M + token) * 2 + kind;
#endif
  }
  __device__ static int atoms(const Params& p) { return (p.M + 7) / 8; }
  __device__ __forceinline__ void advance(const Params& p, int blocks) {
#if OUT == 0
    codes += blocks * kBlock, meta += blocks;
#elif OUT == 1
    codes += size_t(blocks) * atoms(p) * 1024, meta += blocks * atoms(p) * 16;
#else
    codes += size_t(blocks) * p.M * kBlock, meta += blocks * p.M * 2;
#endif
  }
  template <bool kInt4> __device__ __forceinline__ void store_word(const Params& p, int t, int q, uint32_t data) const {
    const uint32_t offset = 8 * (q / 2) + 16 * (q % 2);
#if OUT == 0
    store_global(codes + size_t(t) * p.NB * kBlock + 4 * offset, data);
#elif OUT == 1 // rows are 128 bytes apart and their swizzles 16; TOKENS divides 8, so nothing carries
    store_global(reinterpret_cast<char*>(reinterpret_cast<size_t>(codes) ^ (144 * t) ^ (4 * offset)), data);
#else
    const uint32_t at = word + t * kWords + offset;
    if (OUT == 2 && kInt4)
      reinterpret_cast<uint16_t*>(codes)[at] = pack_nibbles(data);
    else
      store_global(codes + 4 * size_t(at), data);
#endif
  }
  // The scale or sum of this lane's token, t tokens further on.
  __device__ __forceinline__ void store_meta(const Params& p, int t, float value) const {
    p.scale[meta + (OUT == 0 ? uint32_t(t) * p.NB : OUT == 1 ? meta_at(t) : 2 * t)] = value;
  }
};

// One token's codes of one block -> memory.
template <bool kInt4>
__device__ __forceinline__ void store_codes(const Params& p, const Destination& to, int t, const uint32_t (&pairs)[kSlots / 2]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t low = pairs[2 * q], high = pairs[2 * q + 1];
#if OUT == 1
    to.store_word<kInt4>(p, t, q, kInt4 ? e4m3_of(low, high) : bytes_of<kInt4>(low, high));
#else
    to.store_word<kInt4>(p, t, q, bytes_of<kInt4>(low, high));
#endif
  }
}

// The largest magnitude of the block, for the lane's token (or for the only one).
__device__ __forceinline__ float block_largest(const float (&v)[kJoint][kSlots], const Lane& at) {
  float own[kJoint];
#pragma unroll
  for (int t = 0; t < kJoint; ++t) own[t] = largest_magnitude(v[t]);
  if (kJoint == 1) return block_max(own[0], 1);
  const bool odd = at.token() == 1; // each of two lanes gives away what the other one answers for
  const float other = __shfl_xor_sync(kWarp, odd ? own[0] : own[kJoint - 1], 1);
  return block_max(fmaxf(odd ? own[kJoint - 1] : own[0], other), 2);
}

// One block of all tokens of the cta. All blocks of the warp are taken as INT4 or as INT8; those of the other kind (in
// the warp on the border) are computed for nothing and not stored.
template <bool kInt4>
__device__ __forceinline__ void quantize_block(const Params& p, const char* shared, int token0, int block_index, const NextBlock& block,
                                               const Destination& to, const Lane& at) {
  const bool exists = block_index < p.NB;
  Word words[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int4 four = block.index[i / 4];
    const int channel = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
#if STAGE
    words[i] = *reinterpret_cast<const Word*>(shared + channel * kWordBytes);
#else
    words[i] = 0;
    if (channel < p.K && token0 < p.M) words[i] = static_cast<const Word*>(p.x)[size_t(token0) * p.K + channel];
#endif
  }
  const bool mine = block.is_int4 == kInt4 && exists;
  // scale = absmax * per_absmax; for clip in (0, 1] the quotient is exact without the general division
  float per_absmax = kInt4 ? divide(block.clip, 7.f, 1.f / 7.f) : divide(block.clip, 127.f, 1.f / 127.f);
  asm volatile("" : "+f"(per_absmax)); // here, once, and not again for every token
  const bool quick = kInt4 && __all_sync(kWarp, block.clip >= kQuickClip || !mine);
  constexpr bool kRotated = HADAMARD && kInt4;
  float factor[4] = {1.f, 1.f, 1.f, 1.f}; // what the rotation leaves to multiply
  if (kRotated) hadamard_factors(factor, at.lane);

#pragma unroll
  for (int t0 = 0; t0 < TOKENS; t0 += kJoint) {
    float v[kJoint][kSlots];
#pragma unroll
    for (int t = 0; t < kJoint; ++t) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) v[t][i] = token_of(words[i], (t0 + t) / kHalves, (t0 + t) % kHalves);
    }
    if (kRotated) {
#pragma unroll
      for (int t = 0; t < kJoint; ++t) hadamard_in_registers(v[t], at.lane);
    }
    float largest = block_largest(v, at);
    if (kRotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
    const float ratio = __fmul_rn(largest, per_absmax);
    const float scale = ratio > 0.f ? ratio : 1.f;
    const bool usual = scale >= kQuickTiny && scale <= kQuickHuge;
    const float steps = usual ? reciprocal_of(scale) * kStep : kUnusual;

    uint32_t sums[kJoint];
#pragma unroll
    for (int t = 0; t < kJoint; ++t) {
      const float divisor = Lane::of_token(scale, t);
      uint32_t pairs[kSlots / 2];
      if (kInt4) {
        const float by = Lane::of_token(steps, t);
        bool certain = quick;
        if (quick)
          certain = quick_codes(v[t], {by * factor[0], by * factor[1], by * factor[2], by * factor[3]}, pairs) && by < kUnusual;
        if (!certain) exact_codes<4>(v[t], factor, divisor, pairs);
      } else {
        exact_codes<8>(v[t], factor, divisor, pairs);
      }
      sums[t] = halves_sum(pairs);
      if (mine && (OUT == 1 || token0 + t0 + t < p.M)) store_codes<kInt4>(p, to, t0 + t, pairs);
    }
    float meta = scale;
#if OUT != 0
    uint32_t total = kJoint == 1 ? (sums[0] & 0xFFFFu) + (sums[0] >> 16)
                                 : __byte_perm(sums[0], sums[kJoint - 1], 0x5410) + __byte_perm(sums[0], sums[kJoint - 1], 0x7632);
    total = block_sum(total);
    if (kJoint == 2) total = __byte_perm(total, 0, at.token() ? 0x4432 : 0x4410);
    const float sum = unbiased<kInt4>(total);
    if (at.lane >= kJoint) meta = sum;
#endif
    if (mine && at.lane < (OUT == 0 ? kJoint : 2 * kJoint) && (OUT == 1 || token0 + t0 + at.token() < p.M))
      to.store_meta(p, t0, meta);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) quantize_act(const Params p) {
  extern __shared__ __align__(16) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
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

  Destination to(p, token0, first + at.group, at);
  while (first < p.NB) {
    const bool any_int8 = __any_sync(kWarp, !next.is_int4);
    bool as_int4 = __any_sync(kWarp, next.is_int4);
    while (true) { // once, but twice in a warp that has both
      if (!as_int4) {
        quantize_block<false>(p, shared, token0, first + at.group, next, to, at);
        break;
      }
      quantize_block<true>(p, shared, token0, first + at.group, next, to, at);
      if (!any_int8) break;
      next.prepare(p, first, at); // loaded again rather than kept in registers
      as_int4 = false;
    }
    first += step;
    to.advance(p, step);
    if (first < p.NB) next.prepare(p, first, at);
  }
}
