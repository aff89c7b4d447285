// quantize_act for many tokens on sm_90: ctas that stay, rows that come by bulk copies, warps that keep their blocks.
//
// Four lanes take a block of 128 channels, 32 values each, eight blocks a warp; the warp does the same blocks of one
// token after the other, so that where its channels lie, the blocks' precision and their clips are found once. Rows
// arrive in a ring of stages in shared memory, copied by one thread ahead of time: no instruction of a warp moves them.
//
// Which channel a slot holds (slot bits s4..s0, lane bits l1 l0 of the four):
//   start order:  channel bits 6..0 = l1 l0 (s4 ^ l0) (s3 ^ l1) s2 s1 s0;
//   end order:    channel bits 6..0 = s3 s4 l0 l1 s2 s1 s0.
// The Hadamard takes the first and leaves the second: strides 1 to 16 stay inside a lane, those of 32 and 64 exchange
// half of the registers with a neighbour (compare quantize.cuh). INT8 blocks are read in the end order.
//
// Definitions: ELEMENT (BFloat16, Float16), HADAMARD, SHARE as for quantize_act.cu, with TOKENS 1, VECTOR 1, STAGE 1 and
// OUT 1 (sm_90); FUSE (0; 2: x holds [gate | up]),
// GATHER (1: a cta needs whole rows; 0: in storage order, the channels of its own blocks), STAGES of the ring,
// REGISTERS a thread.
// gridDim.y ctas share the blocks of a token. K is a multiple of 8, rows are aligned to 16 bytes.
#include "comet/pipeline.cuh"
#include "comet/quantize_scale.cuh"

using namespace comet;

constexpr int kLanes = 4;            // that share a block
constexpr int kBlocks = 32 / kLanes; // of a warp
constexpr int kValues = 32;          // of a lane
constexpr int kInputs = FUSE == 2 ? 2 : 1;

// The lower half of a word, plus another word, in one instruction.
__device__ __forceinline__ uint32_t low_plus(uint32_t two, uint32_t x) {
  asm("dp2a.lo.u32.u32 %0, %1, 1, %0;" : "+r"(x) : "r"(two));
  return x;
}

// The ring: stage by stage the channels of each input, then a barrier a stage for "full" and one for "empty".
struct Ring {
  uint32_t base, barriers;
  int channels, first; // that a stage holds of each input, and the first of them
  __device__ __forceinline__ Ring(const Params& p, const char* shared) {
    const int blocks = kBlocks * (blockDim.x / 32);
    first = GATHER ? 0 : blockIdx.y * blocks * kBlock;
    channels = GATHER ? p.K : min(blocks * kBlock, p.K - first);
    base = shared_address(shared);
    barriers = base + STAGES * stage_bytes(p);
  }
  // Of one input; padded to whole blocks, whose channels beyond K are zero and never copied.
  __device__ __forceinline__ uint32_t input_bytes(const Params& p) const {
    const int held = GATHER ? p.NB : kBlocks * (blockDim.x / 32);
    return uint32_t(held) * kBlock * E::kBytes;
  }
  __device__ __forceinline__ uint32_t stage_bytes(const Params& p) const { return kInputs * input_bytes(p); }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (STAGES + stage); }
  __device__ __forceinline__ void copy(const Params& p, int token, int stage, unsigned long long policy) const {
    const uint32_t bytes = uint32_t(channels) * E::kBytes;
    mbarrier_expect(full(stage), kInputs * bytes);
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      const size_t at = (size_t(token) * kInputs + i) * p.K + first;
      bulk_copy(base + stage * stage_bytes(p) + i * input_bytes(p), static_cast<const char*>(p.x) + at * E::kBytes, bytes,
                full(stage), policy);
    }
  }
};

// A warp's blocks, seen from one lane.
struct Place {
  int lane, block; // the lane among its four, and the block that they take (or the last one, for nothing)
  bool exists, is_int4;
  float clip;
  uint32_t at[GATHER ? kValues / 2 : 1]; // of its channels, in bytes from the start of an input in a stage; two a word
  __device__ __forceinline__ Place(const Params& p) {
    lane = threadIdx.x % kLanes;
    block = blockIdx.y * kBlocks * (blockDim.x / 32) + threadIdx.x / kLanes;
    exists = block < p.NB;
    block = min(block, p.NB - 1);
    is_int4 = p.bits[block] == 4;
    clip = p.clip[block];
  }
  // Channel of the block that piece q (8 slots) begins with; pieces are slot bits s4 s3.
  __device__ __forceinline__ int piece(int q, bool start_order) const {
    const int l0 = lane & 1, l1 = lane >> 1;
    return start_order ? 32 * lane + 8 * (q ^ (2 * l0 + l1)) : 64 * (q & 1) + 32 * (q >> 1) + 16 * l0 + 8 * l1;
  }
  __device__ __forceinline__ void find(const Params& p, bool start_order) {
    if constexpr (!GATHER) {
      at[0] = uint32_t(block - blockIdx.y * kBlocks * (blockDim.x / 32)) * kBlock * E::kBytes;
      return;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = block * kBlock + piece(q, start_order) + 4 * half;
        int4 index = {c, c + 1, c + 2, c + 3};
        if (c < p.K) index = __ldg(reinterpret_cast<const int4*>(p.perm + c)); // K is a multiple of 4
        constexpr int kBytes = E::kBytes;
        at[GATHER ? 4 * q + 2 * half : 0] = uint32_t(index.x * kBytes) | uint32_t(index.y * kBytes) << 16;
        at[GATHER ? 4 * q + 2 * half + 1 : 0] = uint32_t(index.z * kBytes) | uint32_t(index.w * kBytes) << 16;
      }
  }
  __device__ __forceinline__ void read(float (&v)[kValues], uint32_t input, bool start_order) const {
    if constexpr (GATHER) {
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const uint32_t two = at[GATHER ? i / 2 : 0];
        v[i] = E::to_float(load_shared_2(low_plus(two, input)));
        v[i + 1] = E::to_float(load_shared_2(input + (two >> 16)));
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint4 eight = load_shared_16(input + at[0] + piece(q, start_order) * E::kBytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[8 * q + i] = E::half_to_float(part(eight, i / 2), i % 2);
      }
    }
  }
};

// The stages of `hadamard_blocks`, but for the norm and the signs of `factors`.
__device__ __forceinline__ void hadamard(float (&v)[kValues], int lane) {
  const float s0 = lane & 1 ? -1.f : 1.f, s1 = lane & 2 ? -1.f : 1.f;
#pragma unroll
  for (int stride = 1; stride <= 4; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & stride) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = __fadd_rn(low, high);
      v[i + stride] = __fsub_rn(low, high);
    }
  }
#pragma unroll
  for (int stride = 8; stride <= 16; stride *= 2) { // a lane with s = -1 holds the pair the other way round
    const float s = stride == 8 ? s1 : s0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = __fmaf_rn(a, s, b);
      v[i + stride] = __fmaf_rn(b, -s, a);
    }
  }
#pragma unroll
  for (int stage = 0; stage < 2; ++stage) { // channel strides 32 and 64
    const int half = stage == 0 ? 16 : 8;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & half) continue;
      const float mine = v[i], other = __shfl_xor_sync(kWarp, v[i + half], 1 << stage);
      v[i] = __fadd_rn(mine, other);
      v[i + half] = __fsub_rn(mine, other);
    }
  }
}

__device__ __forceinline__ float over_lanes(float x) { // the largest of a block's four lanes
  x = fmaxf(x, __shfl_xor_sync(kWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWarp, x, 2));
}

// The warp's blocks of one token, all taken as INT4 or as INT8; those of the other kind are not stored.
template <bool kInt4>
__device__ __forceinline__ void quantize_blocks(const Params& p, const Place& place, float (&v)[kValues], int token) {
  constexpr bool kRotated = HADAMARD && kInt4;
  const bool mine = place.exists && place.is_int4 == kInt4;
  float factor[4] = {1.f, 1.f, 1.f, 1.f};
  if (kRotated) {
    hadamard(v, place.lane);
#pragma unroll
    for (int q = 0; q < 4; ++q)
      factor[q] = ((q & 2) && (place.lane & 1)) != ((q & 1) && (place.lane & 2)) ? -kHadamardNorm : kHadamardNorm;
  }
  int most = 0; // non-negative floats are ordered as integers, of which three are compared at once
#pragma unroll
  for (int i = 0; i < kValues; i += 4)
    most = max(max(most, __float_as_int(fmaxf(fabsf(v[i]), fabsf(v[i + 1])))),
               __float_as_int(fmaxf(fabsf(v[i + 2]), fabsf(v[i + 3]))));
  float largest = over_lanes(__int_as_float(most));
  if (kRotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
  Scale scale;
  scale.e = 4;
  if (kInt4 && SHARE == 4) {
    const float unit = unit_of(p, place.block);
    const float ratio = mine ? __fmul_rn(largest, __fdiv_rn(place.clip, __fmul_rn(7.f, unit))) : 0.f;
    float sum = __fadd_rn(ratio, __shfl_xor_sync(kWarp, ratio, kLanes)); // blocks 0 + 1 and 2 + 3
    sum = __fadd_rn(sum, __shfl_xor_sync(kWarp, sum, 2 * kLanes));
    const uint32_t half_warp = __ballot_sync(kWarp, mine) >> (threadIdx.x & 16) & 0xFFFFu;
    scale = shared_scale(sum, ratio, unit, inverse_of(__popc(half_warp) / kLanes));
  } else {
    const float per_absmax = kInt4 ? divide(place.clip, 7.f, 1.f / 7.f) : divide(place.clip, 127.f, 1.f / 127.f);
    const float ratio = __fmul_rn(largest, per_absmax);
    scale.stored = scale.divisor = ratio > 0.f ? ratio : 1.f;
  }

  uint32_t pairs[kValues / 2];
  bool certain = false;
  if (kInt4 && __all_sync(kWarp, place.clip >= kQuickClip || !mine)) {
    const bool usual = scale.divisor >= kQuickTiny && scale.divisor <= kQuickHuge;
    const float by = usual ? reciprocal_of(scale.divisor) * kStep : kUnusual;
    certain = quick_codes(v, {by * factor[0], by * factor[1], by * factor[2], by * factor[3]}, pairs) && by < kUnusual;
  }
  if (!certain) exact_codes<kInt4 ? 4 : 8>(v, factor, scale.divisor, pairs);

  const int row = token % 8;
  const size_t atom = size_t(place.block) * ((p.M + 7) / 8) + token / 8;
  char* const to = static_cast<char*>(p.codes) + atom * 1024 + row * 128;
  const uint32_t within = (16 * (place.lane & 1) + 8 * (place.lane >> 1)) ^ (16 * row);
  const uint32_t e4m3 = e4m3_factor(scale.e);
  uint32_t total = 0;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = pairs[4 * q + 2 * half], high = pairs[4 * q + 2 * half + 1];
      total += low + high; // at most 32 * 255 in each half
      words[half] = kInt4 ? e4m3_of(low, high, e4m3) : bytes_of<kInt4>(low, high);
    }
    if (mine) store_global(to + (within ^ (64 * (q & 1) + 32 * (q >> 1))), words[0], words[1]);
  }
  total = (total & 0xFFFFu) + (total >> 16);
  total += __shfl_xor_sync(kWarp, total, 1);
  total += __shfl_xor_sync(kWarp, total, 2);
  float sum = unbiased<kInt4>(total);
  if (kInt4 && SHARE == 4) sum *= __int_as_float((131 - scale.e) << 23);
  if (mine && place.lane < 2) p.scale[atom * 16 + 4 * (row / 2) + row % 2 + 2 * place.lane] = place.lane ? sum : scale.stored;
}

// The values of the warp's blocks as the producer leaves them.
__device__ __forceinline__ void read_values(const Params& p, const Place& place, const Ring& ring, int stage, bool exists,
                                            bool start_order, float (&v)[kValues]) {
  if (!exists) { // a padding token of the last atom
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    return;
  }
  const uint32_t input = __shfl_sync(kWarp, ring.base + stage * ring.stage_bytes(p), 0); // known to be one value
  place.read(v, input, start_order);
  if constexpr (FUSE == 2) {
    float up[kValues];
    place.read(up, input + ring.input_bytes(p), start_order);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = rounded(__fmul_rn(rounded(sigmoid_times(v[i])), up[i]));
  }
}

extern "C" __global__ void __launch_bounds__(512) __maxnreg__(REGISTERS) quantize_many(const Params p) {
  extern __shared__ __align__(128) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  const int warps = blockDim.x / 32, tiles = (p.M + 7) / 8 * 8;
  const Ring ring(p, shared);
  const unsigned long long policy = l2_evict_first();
  const int padding = p.NB * kBlock - p.K; // channels of the last block that are zero
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(ring.full(stage), 1);
      mbarrier_init(ring.empty(stage), warps);
    }
    mbarrier_init_fence();
  }
  if (padding > 0 && (GATHER || ring.first + ring.channels == p.K))
    for (int i = threadIdx.x; i < STAGES * kInputs * padding; i += blockDim.x) {
      const uint32_t input = ring.base + i / padding * ring.input_bytes(p);
      store_shared_2(input + uint32_t(ring.channels + i % padding) * E::kBytes, 0);
    }
  Place place(p);
  const bool any_int4 = __any_sync(kWarp, place.is_int4), any_int8 = __any_sync(kWarp, !place.is_int4);
  place.find(p, HADAMARD && any_int4);
  __syncthreads();
  wait_for_previous_kernel();
  const int step = gridDim.x;
  if (threadIdx.x == 0)
    for (int stage = 0, token = blockIdx.x; stage < STAGES && token < p.M; ++stage, token += step)
      ring.copy(p, token, stage, policy);

  int stage = 0, parity = 0;
  for (int token = blockIdx.x; token < tiles; token += step) {
    const bool exists = token < p.M;
    if (exists) mbarrier_wait(ring.full(stage), parity);
    const auto release = [&] { // this warp has read the stage
      __syncwarp();
      if (exists && threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty(stage));
      const int refill = token + (STAGES - 1) * step; // into the last token's stage, which other warps have read by now
      if (threadIdx.x == 0 && token >= step && refill < p.M) {
        const int last = (stage + STAGES - 1) % STAGES;
        mbarrier_wait(ring.empty(last), stage ? parity : parity ^ 1);
        ring.copy(p, refill, last, policy);
      }
    };
    float v[kValues];
    if (any_int4) {
      if (any_int8) place.find(p, HADAMARD); // found anew rather than kept twice
      read_values(p, place, ring, stage, exists, HADAMARD, v);
      if (!any_int8) release();
      quantize_blocks<true>(p, place, v, token);
    }
    if (any_int8) {
      if (any_int4) place.find(p, false);
      read_values(p, place, ring, stage, exists, false, v);
      release();
      quantize_blocks<false>(p, place, v, token);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}
