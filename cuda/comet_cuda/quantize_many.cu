// quantize_act for many tokens on sm_90, with the norm or without a gather: ctas that stay, rows that come by bulk
// copies, warps that keep their blocks.
//
// Four lanes take a block of 128 channels, 32 values each, eight blocks a warp; the warp does the same blocks of one
// token after the other, so that where its channels lie, the blocks' precision and their clips are found once. Rows
// arrive in a ring of stages in shared memory, copied by one thread ahead of time: no instruction of a warp moves them.
// A warp's blocks have one precision: each precision begins with a new warp, so a cta has one more than blocks need.
// The norm is taken in two steps: all threads together add the residual in the stage and sum the squares of the next
// token, then each warp scales what it gathers of this one.
//
// Definitions: ELEMENT (BFloat16, Float16), HADAMARD, FUSE as for quantize_act.cu, with TOKENS 1, VECTOR 1, STAGE 1 and
// OUT 1 (sm_90); STAGES of the ring; REGISTERS a thread; SHARE (1; 0, with the norm: scales are multiples of one a token,
// see token_scale.cuh and quantize_token.cu). With the norm a cta takes whole tokens and gathers; without, channels come in
// storage order, and a cta copies those of its own blocks.
// gridDim.y ctas share the blocks of a token. K is a multiple of 8, rows are aligned to 16 bytes.
#include "comet/four_lanes.cuh"
#include "comet/pipeline.cuh"
#include "comet/token_scale.cuh"

using namespace comet;

constexpr int kInputs = FUSE == 0 ? 1 : 2;  // rows a stage: x, or x and the residual, or gate and up
constexpr int kMostWarps = 32;
constexpr bool kGather = FUSE == 1;
constexpr uint32_t kNone = 0xFFFF;
static_assert(FUSE != 1 || STAGES >= 3, "the norm sums the next row, too");
static_assert((SHARE == 1 || (SHARE == 0 && FUSE == 1)) && OUT == 1, "see the definitions");
#if SHARE == 0
using Arguments = TokenParams;
__device__ __forceinline__ bool has_int4(const Arguments& p, int block) { return block >= p.int8_blocks; }
#else
using Arguments = Params;
__device__ __forceinline__ bool has_int4(const Arguments& p, int block) { return p.bits[block] == 4; }
#endif

// The lower half of a word, plus another word, in one instruction.
__device__ __forceinline__ uint32_t low_plus(uint32_t two, uint32_t x) {
  asm("dp2a.lo.u32.u32 %0, %1, 1, %0;" : "+r"(x) : "r"(two));
  return x;
}

// Blocks of a cta's warps.
__device__ __forceinline__ int blocks_of_cta() { return kBlocks * (blockDim.x / 32 - 1); }
__device__ __forceinline__ int first_block() { return blockIdx.y * blocks_of_cta(); }

// Which block each four lanes of the cta take (kNone: none), by warp 0. Returns the number of warps that have some.
__device__ __forceinline__ int share_out(const Arguments& p, uint16_t* table) {
  const int lane = threadIdx.x % 32, first = first_block(), end = min(first + blocks_of_cta(), p.NB);
  const auto is_int8 = [&](int b) { return b < end && !has_int4(p, b); };
  int next8 = 0, next4 = 0;
  for (int b = first; b < end; b += 32) next4 += __popc(__ballot_sync(kWarp, is_int8(b + lane)));
  next4 = (next4 + kBlocks - 1) / kBlocks * kBlocks;
  for (int b = first; b < end; b += 32) {
    const bool eight = is_int8(b + lane), four = b + lane < end && !eight;
    const uint32_t eights = __ballot_sync(kWarp, eight), fours = __ballot_sync(kWarp, four), below = (1u << lane) - 1;
    if (eight) table[next8 + __popc(eights & below)] = uint16_t(b + lane);
    if (four) table[next4 + __popc(fours & below)] = uint16_t(b + lane);
    next8 += __popc(eights), next4 += __popc(fours);
  }
  return (max(next8, next4) + kBlocks - 1) / kBlocks;
}

// The ring: stage by stage the channels of each input; the norm's weights as lanes want them; three barriers a stage;
// two tokens' ratios (SHARE 0).
struct Ring {
  uint32_t base, weights, barriers, input_bytes; // of one input: padded to whole blocks, zeros beyond K
  int channels, first, inputs;          // that a stage holds of each input; the first of them; how many there are
  __device__ __forceinline__ Ring(const Params& p, const char* shared) {
    first = kGather ? 0 : first_block() * kBlock;
    channels = kGather ? p.K : min(blocks_of_cta() * kBlock, p.K - first);
    inputs = FUSE == 1 && p.residual == nullptr ? 1 : kInputs;
    base = shared_address(shared);
    input_bytes = uint32_t(kGather ? p.NB : blocks_of_cta()) * kBlock * E::kBytes;
    weights = base + STAGES * kInputs * input_bytes;
    barriers = weights + (FUSE == 1 ? (p.NB + kBlocks - 1) / kBlocks * kBlocks * kBlock * E::kBytes : 0);
  }
  __device__ __forceinline__ uint32_t input(int stage, int i) const { return base + (stage * kInputs + i) * input_bytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; } // its rows have come
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); } // read by all warps
  __device__ __forceinline__ uint32_t summed(int stage) const { return barriers + 8 * (2 * STAGES + stage); } // FUSE == 1
  __device__ __forceinline__ uint32_t end() const { return barriers + (24 * STAGES + 15) / 16 * 16; }
  __device__ __forceinline__ void copy(const Params& p, int token, int stage, unsigned long long policy) const {
    const uint32_t bytes = uint32_t(channels) * E::kBytes;
    mbarrier_expect(full(stage), inputs * bytes);
    const size_t row = size_t(token) * (FUSE == 2 ? 2 * p.K : p.K) + first;
    bulk_copy(input(stage, 0), static_cast<const char*>(p.x) + row * E::kBytes, bytes, full(stage), policy);
    if (FUSE == 0 || inputs == 1) return;
    const char* other = static_cast<const char*>(FUSE == 2 ? p.x : p.residual);
    bulk_copy(input(stage, 1), other + (row + (FUSE == 2 ? p.K : 0)) * E::kBytes, bytes, full(stage), policy);
  }
};

// A warp's blocks, seen from one lane.
struct Place {
  int lane, block; // the lane among its four, and the block that they take (or another one of the warp, for nothing)
  bool exists, is_int4, start_order;
  float clip;
  uint32_t at[kGather ? kValues / 2 : 1]; // of its channels, in bytes from the start of an input; two a word
  __device__ __forceinline__ Place(const Arguments& p, const uint16_t* table) {
    lane = threadIdx.x % kLanes;
    const uint32_t found = table[threadIdx.x / kLanes];
    exists = found != kNone;
    block = exists ? found : table[threadIdx.x / 32 * kBlocks];
    is_int4 = has_int4(p, block);
    start_order = HADAMARD && is_int4;
    clip = p.clip[block];
  }
  // Channel of the block that piece q (8 slots) begins with; pieces are slot bits s4 s3.
  __device__ __forceinline__ int piece(int q) const {
    const int l0 = lane & 1, l1 = lane >> 1;
    return start_order ? 32 * lane + 8 * (q ^ (2 * l0 + l1)) : 64 * (q & 1) + 32 * (q >> 1) + 16 * l0 + 8 * l1;
  }
  // Of the norm's weights for slots 8 * q on: eight blocks side by side, so that a warp's lanes read all banks.
  __device__ __forceinline__ uint32_t weights_at(const Ring& ring, int q) const {
    return ring.weights + ((block / kBlocks * 4 + q) * 32 + block % kBlocks * kLanes + lane) * 16;
  }
  __device__ __forceinline__ void find(const Params& p, const Ring& ring) {
    if constexpr (!kGather) {
      at[0] = uint32_t(block - first_block()) * kBlock * E::kBytes;
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      const int c = block * kBlock + piece(i / 8) + i % 8;
      int4 index = {c, c + 1, c + 2, c + 3};
      uint32_t w[4] = {};
      if (c < p.K) { // K is a multiple of 4
        index = __ldg(reinterpret_cast<const int4*>(p.perm + c));
        if constexpr (FUSE == 1) {
          const uint16_t* weights = static_cast<const uint16_t*>(p.norm_weight);
          w[0] = weights[index.x], w[1] = weights[index.y], w[2] = weights[index.z], w[3] = weights[index.w];
        }
      }
      constexpr int kBytes = E::kBytes;
      const uint32_t low = uint32_t(index.x * kBytes) | uint32_t(index.y * kBytes) << 16;
      const uint32_t high = uint32_t(index.z * kBytes) | uint32_t(index.w * kBytes) << 16;
      at[i / 2] = low, at[i / 2 + 1] = high;
      if (FUSE == 1) store_shared_8(weights_at(ring, i / 8) + i % 8 * 2, w[0] | w[1] << 16, w[2] | w[3] << 16);
    }
  }
  __device__ __forceinline__ void read(const Ring& ring, float (&v)[kValues], uint32_t input) const {
    if constexpr (kGather) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const uint32_t two = at[kGather ? i / 2 : 0];
        v[i] = E::to_float(load_shared_2(low_plus(two, input)));
        v[i + 1] = E::to_float(load_shared_2(input + (two >> 16)));
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint4 eight = load_shared_16(input + at[0] + piece(q) * E::kBytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[8 * q + i] = E::half_to_float(part(eight, i / 2), i % 2);
      }
    }
  }
};

// The scale that each of the warp's blocks would choose alone; the values are left rotated, but for norm and signs.
template <bool kInt4> __device__ __forceinline__ float ratio_of(const Place& place, float (&v)[kValues]) {
  constexpr bool kRotated = HADAMARD && kInt4;
  if (kRotated) hadamard(v, place.lane);
  float largest = over_lanes(largest_magnitude(v));
  if (kRotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
  return __fmul_rn(largest, kInt4 ? divide(place.clip, 7.f, 1.f / 7.f) : divide(place.clip, 127.f, 1.f / 127.f));
}

// Codes of such values, in pairs.
template <bool kInt4>
__device__ __forceinline__ void codes_of(const Place& place, const float (&v)[kValues], float divisor, uint32_t (&pairs)[kValues / 2]) {
  float factor[4]; // of pieces
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const bool negative = ((q & 2) && (place.lane & 1)) != ((q & 1) && (place.lane & 2));
    factor[q] = HADAMARD && kInt4 ? (negative ? -kHadamardNorm : kHadamardNorm) : 1.f;
  }
  bool certain = false;
  if (kInt4 && __all_sync(kWarp, place.clip >= kQuickClip || !place.exists)) {
    const bool usual = divisor >= kQuickTiny && divisor <= kQuickHuge;
    const float by = usual ? reciprocal_of(divisor) * kStep : kUnusual;
    certain = quick_codes(v, {by * factor[0], by * factor[1], by * factor[2], by * factor[3]}, pairs) && by < kUnusual;
  }
  if (!certain) exact_codes<kInt4 ? 4 : 8>(v, factor, divisor, pairs);
}

// Where a lane stores the codes of its block: piece q's eight bytes lie at `within` ^ piece_at(q).
struct Destination {
  size_t atom;
  int row;
  char* to;
  uint32_t within;
  __device__ __forceinline__ Destination(const Params& p, const Place& place, int token) {
    row = token % 8;
    atom = size_t(place.block) * ((p.M + 7) / 8) + token / 8;
    to = static_cast<char*>(p.codes) + atom * 1024 + row * 128;
    within = (16 * (place.lane & 1) + 8 * (place.lane >> 1)) ^ (16 * row);
  }
  __device__ __forceinline__ void store(int q, const uint32_t (&words)[2]) const {
    store_global(to + (within ^ (64 * (q & 1) + 32 * (q >> 1))), words[0], words[1]);
  }
};

#if SHARE == 1
// The warp's blocks of one token.
template <bool kInt4>
__device__ __forceinline__ void quantize_blocks(const Params& p, const Place& place, float (&v)[kValues], int token) {
  const bool mine = place.exists;
  const float ratio = ratio_of<kInt4>(place, v), scale = ratio > 0.f ? ratio : 1.f;
  uint32_t pairs[kValues / 2];
  codes_of<kInt4>(place, v, scale, pairs);
  const Destination at(p, place, token);
  uint32_t total = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = pairs[4 * q + 2 * half], high = pairs[4 * q + 2 * half + 1];
      total += low + high; // at most 32 * 255 in each half
      words[half] = kInt4 ? e4m3_of(low, high) : bytes_of<kInt4>(low, high);
    }
    if (mine) at.store(q, words);
  }
  total = (total & 0xFFFFu) + (total >> 16);
  total += __shfl_xor_sync(kWarp, total, 1);
  total += __shfl_xor_sync(kWarp, total, 2);
  const float meta = place.lane == 0 ? scale : unbiased<kInt4>(total);
  if (mine && place.lane < 2) p.scale[at.atom * 16 + 4 * (at.row / 2) + at.row % 2 + 2 * place.lane] = meta;
}
#else
// The same where a token's scales are multiples of one: `ratios` f32 [NB] in shared memory, of this token.
template <bool kInt4>
__device__ __forceinline__ void quantize_blocks(const Arguments& p, const Place& place, float (&v)[kValues], int token, float* ratios,
                                                int threads) {
  const float ratio = ratio_of<kInt4>(place, v);
  if (place.exists && place.lane == 0) ratios[place.block] = ratio;
  named_sync(1, threads);
  const TokenScale scales(ratios, p.NB, p.int8_blocks, threadIdx.x % 32, false); // few INT8 blocks: MOST_BLOCKS
  float divisor = scales.scale;
  uint32_t by = 1;
  const Destination at(p, place, token);
  if (kInt4) {
    const float multiple = scales.multiple(ratio);
    divisor = __fmul_rn(divisor, multiple), by = uint32_t(multiple);
  } else {
    const int e = scales.exponent(scales.largest_of(place.block));
    divisor = __fmul_rn(divisor, __int_as_float((e + 127) << 23));
    const int word = exponent_word(scales, place.block, p.int8_blocks, e);
    if (place.exists && place.lane == 0) {
      int* const words = p.multiples + at.atom * 8;
      words[at.row] = word;
      if (token == p.M - 1) // tokens that fill the last atom
        for (int row = at.row + 1; row < 8; ++row) words[row] = 0;
    }
  }
  const uint32_t bias = (256 - kBias4 * by) * kTwice; // of (code + bias of pairs) * by; the low bytes are two's complement
  uint32_t pairs[kValues / 2];
  codes_of<kInt4>(place, v, divisor, pairs);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = pairs[4 * q + 2 * half], high = pairs[4 * q + 2 * half + 1];
      words[half] = kInt4 ? __byte_perm(low * by + bias, high * by + bias, 0x6420) : bytes_of<kInt4>(low, high);
    }
    if (place.exists) at.store(q, words);
  }
  if (threadIdx.x == 0) {
    p.scale[token] = scales.scale;
    if (token == p.M - 1)
      for (int padding = p.M; padding % 8 != 0; ++padding) p.scale[padding] = 1.f;
  }
}
#endif

// FUSE == 1: x + residual -> the stage and memory; the warp's sum of squares -> partial.
__device__ __forceinline__ void sum_row(const Params& p, const Ring& ring, int stage, int token, int threads, float* partial) {
  const uint32_t x = ring.input(stage, 0), other = ring.input(stage, 1);
  const bool add = ring.inputs == 2;
  uint4* const out = reinterpret_cast<uint4*>(static_cast<char*>(p.residual_out) + size_t(token) * p.K * E::kBytes);
  float squares = 0.f;
  for (int c = 8 * threadIdx.x; c < p.K; c += 8 * threads) {
    uint4 eight = load_shared_16(x + c * E::kBytes);
    uint32_t w[4] = {eight.x, eight.y, eight.z, eight.w};
    if (add) {
      const uint4 more = load_shared_16(other + c * E::kBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t r = part(more, i);
        w[i] = E::pair_of(__fadd_rn(E::half_to_float(w[i], 0), E::half_to_float(r, 0)),
                          __fadd_rn(E::half_to_float(w[i], 1), E::half_to_float(r, 1)));
      }
      eight = make_uint4(w[0], w[1], w[2], w[3]);
      store_shared_8(x + c * E::kBytes, eight.x, eight.y);
      store_shared_8(x + c * E::kBytes + 8, eight.z, eight.w);
      if (blockIdx.y == 0) out[c / 8] = eight;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = E::half_to_float(w[i], 0), b = E::half_to_float(w[i], 1);
      squares = fmaf(b, b, fmaf(a, a, squares));
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(kWarp, squares, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  fence_proxy_async(); // before a later row is copied over these stores
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.summed(stage));
}

// The values of the warp's blocks as the producer leaves them. `inverse` is the norm's factor.
__device__ __forceinline__ void read_values(const Params& p, const Place& place, const Ring& ring, int stage, bool exists, float inverse,
                                            float (&v)[kValues]) {
  if (!exists) { // a padding token of the last atom
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    return;
  }
  place.read(ring, v, __shfl_sync(kWarp, ring.input(stage, 0), 0)); // known to be one value
  if constexpr (FUSE == 1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __fmul_rn(v[i], inverse);
    round_all(v);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4 eight = load_shared_16(place.weights_at(ring, q));
#pragma unroll
      for (int i = 0; i < 8; ++i) v[8 * q + i] = __fmul_rn(E::half_to_float(part(eight, i / 2), i % 2), v[8 * q + i]);
    }
    round_all(v);
  } else if constexpr (FUSE == 2) {
    float up[kValues];
    place.read(ring, up, __shfl_sync(kWarp, ring.input(stage, 1), 0));
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = sigmoid_times(v[i]);
    round_all(v);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __fmul_rn(v[i], up[i]);
    round_all(v);
  }
}

extern "C" __global__ void __maxnreg__(REGISTERS) quantize_many(const Arguments p) {
  extern __shared__ __align__(128) char shared[];
#if SHARE == 1
  __shared__ uint16_t table[kMostWarps * kBlocks];
#endif
  __shared__ float partial[STAGES][kMostWarps];
  __shared__ int active;
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  const Ring ring(p, shared);
#if SHARE == 0
  float* const first_ratios = reinterpret_cast<float*>(shared + (ring.end() - ring.base));
  float* ratios = first_ratios;
  const int pitch = (max(max(p.NB, int(blockDim.x) / 8), 32) + 3) / 4 * 4;
  // Where the second token's ratios will be: no warp leaves one there before all have read the table.
  uint16_t* const table = reinterpret_cast<uint16_t*>(first_ratios);
#endif
  for (int i = threadIdx.x; i < (blockDim.x / 32) * kBlocks; i += blockDim.x) table[i] = kNone;
  const int padding = kGather || ring.first + ring.channels == p.K ? p.NB * kBlock - p.K : 0; // zeros of the last block
  for (int i = threadIdx.x; i < STAGES * kInputs * padding; i += blockDim.x)
    store_shared_2(ring.input(0, i / padding) + uint32_t(ring.channels + i % padding) * E::kBytes, 0);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int count = share_out(p, table);
    if (threadIdx.x == 0) {
      active = count;
      for (int stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(ring.full(stage), 1);
        mbarrier_init(ring.empty(stage), count);
        mbarrier_init(ring.summed(stage), count);
      }
      mbarrier_init_fence();
    }
  }
  __syncthreads();
  const int warps = active, lane = threadIdx.x % 32;
  if (threadIdx.x >= 32 * warps) return;
  Place place(p, table);
  const bool is_int4 = __any_sync(kWarp, place.is_int4); // the warp's
  place.find(p, ring);
  wait_for_previous_kernel();
  const int step = gridDim.x, tiles = SHARE == 0 ? p.M : (p.M + 7) / 8 * 8;
  if (threadIdx.x == 0)
    for (int stage = 0, token = blockIdx.x; stage < STAGES && token < p.M; ++stage, token += step)
      ring.copy(p, token, stage, l2_evict_first());

  int stage = 0, parity = 0;
  if (FUSE == 1 && blockIdx.x < p.M) {
    mbarrier_wait(ring.full(0), 0);
    sum_row(p, ring, 0, blockIdx.x, 32 * warps, partial[0]);
  }
  for (int token = blockIdx.x; token < tiles; token += step) {
    const bool exists = SHARE == 0 || token < p.M;
    const int after = stage + 1 == STAGES ? 0 : stage + 1;
    if (FUSE == 1 && token + step < p.M) { // before this token takes all registers
      mbarrier_wait(ring.full(after), after ? parity : parity ^ 1);
      sum_row(p, ring, after, token + step, 32 * warps, partial[after]);
    }
    float inverse = 1.f;
    if (exists) {
      mbarrier_wait(FUSE == 1 ? ring.summed(stage) : ring.full(stage), parity);
      if (FUSE == 1) {
        float sum = lane < warps ? partial[stage][lane] : 0.f;
#pragma unroll
        for (int d = kMostWarps / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kWarp, sum, d);
        inverse = rsqrtf(__fdividef(__shfl_sync(kWarp, sum, 0), float(p.K)) + p.eps);
      }
    }
    float v[kValues];
    read_values(p, place, ring, stage, exists, inverse, v);
    fence_proxy_async(); // before a later row is copied over what these loads read
    __syncwarp();
    if (exists && lane == 0) mbarrier_arrive(ring.empty(stage));
    const int refill = token + (STAGES - 1) * step; // into the last token's stage, which other warps have read by now
    if (threadIdx.x == 0 && token >= step && refill < p.M) {
      const int last = (stage + STAGES - 1) % STAGES;
      mbarrier_wait(ring.empty(last), stage ? parity : parity ^ 1);
      ring.copy(p, refill, last, l2_evict_first());
    }
#if SHARE == 0
    ratios = ratios == first_ratios ? first_ratios + pitch : first_ratios; // the last token's may still be read
    if (is_int4)
      quantize_blocks<true>(p, place, v, token, ratios, 32 * active);
    else
      quantize_blocks<false>(p, place, v, token, ratios, 32 * active);
#else
    if (is_int4)
      quantize_blocks<true>(p, place, v, token);
    else
      quantize_blocks<false>(p, place, v, token);
#endif
    stage = after;
    if (stage == 0) parity ^= 1;
  }
}
