// quantize_act with one scale a token, for many tokens and for wide rows on sm_90: ctas, or clusters of ctas, that stay and
// take one token after the other, several of them on a multiprocessor, so that one loads, one gathers and one stores.
//
// Four lanes take a block of 128 channels, 32 values each, eight blocks a warp; the warp does the same blocks of one token
// after the other. One warp of each cta has no blocks: it copies the next row to shared memory as soon as all have read the
// last, and finds a token's scale once the cta's (the cluster's) warps have left what their blocks would choose alone: the
// largest ratio of a warp of INT4 blocks, and each ratio of INT8 blocks. The others wait for the scale, not for each other.
// A warp's blocks have one precision: INT8 blocks come first, INT4 blocks begin with a new warp.
//
// With CLUSTER ctas a token each has ceil(NB / CLUSTER) consecutive blocks, and, to gather from, the whole row. Ratios are
// sent to all of them, where an mbarrier counts the bytes. Two sets of ratios are enough: nobody sends those of a token
// before the scale of the one before is known to its cta.
//
// Definitions: ELEMENT, HADAMARD, FUSE (0, 2), as for quantize_act.cu, with TOKENS 1, VECTOR 1, STAGE 1 and OUT 1;
// GATHER (0: channels come in storage order, and a cta copies those of its own blocks); CLUSTER; FAR (1: rows to gather
// from have more than 32,768 channels); REGISTERS a thread. K is a multiple of 8, rows are aligned to 16 bytes, a cta has at
// least ceil(NB / CLUSTER) / 8 + 2 warps, and each cta of a cluster has blocks.
//
// Which channel a slot holds (slot bits s4..s0, lane bits l1 l0 of the four):
//   start order:  channel bits 6..0 = l1 l0 (s4 ^ l0) (s3 ^ l1) s2 s1 s0, as in four_lanes.cuh;
//   end order:    channel bits 6..0 = s4 l1 l0 s3 s2 s1 s0, so that a lane stores sixteen bytes at once.
#include "comet/cluster.cuh"
#include "comet/four_lanes.cuh"
#include "comet/pipeline.cuh"
#include "comet/token_scale.cuh"

using namespace comet;

constexpr int kInputs = FUSE == 2 ? 2 : 1; // rows a token: x, or gate and up
constexpr int kPiece = 16;                 // values of a lane whose codes lie side by side in memory
static_assert(FUSE != 1, "the norm is quantize_many.cu's");

// Bytes from the start of an input, of which two stand in a word; or, where rows are longer, channels.
constexpr int kUnit = FAR ? 1 : E::kBytes;
// The address of the one that is in the lower half, and in the upper half: an instruction each.
__device__ __forceinline__ uint32_t low_of(uint32_t two, uint32_t input) {
  asm("dp2a.lo.u32.u32 %0, %1, %2, %0;" : "+r"(input) : "r"(two), "n"(FAR ? 2 : 1));
  return input;
}
__device__ __forceinline__ uint32_t high_of(uint32_t two, uint32_t input) {
  if (!FAR) return input + (two >> 16);
  asm("dp2a.lo.u32.u32 %0, %1, 512, %0;" : "+r"(input) : "r"(two));
  return input;
}

// The same number, but what depends on it is found again rather than kept in registers from token to token.
__device__ __forceinline__ int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The stages of `hadamard_blocks`, but for the norm and signs (`negative`); compare four_lanes.cuh. The last exchange sends
// what the one before has brought, so that channel bits 3..0 stay in the lane.
__device__ __forceinline__ void rotate(float (&v)[kValues], int lane) {
  const float s0 = lane & 1 ? -1.f : 1.f, s1 = lane & 2 ? -1.f : 1.f;
#pragma unroll
  for (int stride = 1; stride <= 8; stride *= 2) { // 8: lanes with s1 = -1 hold the pair the other way round, and leave a sign
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i & stride) continue;
      const float low = v[i], high = v[i + stride];
      v[i] = __fadd_rn(low, high);
      v[i + stride] = __fsub_rn(low, high);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) { // lanes with s0 = -1 hold the pair the other way round, and still do after it
    const float a = v[i], b = v[i + 16];
    v[i] = __fmaf_rn(a, s0, b);
    v[i + 16] = __fmaf_rn(b, -s0, a);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) { // channel stride 32; lanes with s1 = -1 want the halves swapped
    const float mine = v[i], other = __shfl_xor_sync(kWarp, v[i + 16], 1);
    v[i] = __fmaf_rn(other, s1, mine);
    v[i + 16] = __fmaf_rn(other, -s1, mine);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) { // channel stride 64; of slots with s3 the lanes with s1 = -1 hold the negative
    const float mine = v[i], other = __shfl_xor_sync(kWarp, v[i + 16], 2);
    const float sum = __fadd_rn(mine, other), difference = __fsub_rn(mine, other);
    v[i] = i & 8 ? difference : sum;
    v[i + 16] = i & 8 ? sum : difference;
  }
}
// Whether `rotate` has left the negative of a slot of piece q (slot bits s4 s3).
__device__ __forceinline__ bool negative(int lane, int q) { return (lane & 2) && ((lane ^ q ^ (q >> 1)) & 1); }

// The blocks of one cta of a token.
struct Range {
  int first, end, eights, eight_warps, warps; // blocks; INT8 blocks of them; warps of INT8 blocks, and all
  __device__ __forceinline__ Range(const TokenParams& p, int rank) {
    const int each = (p.NB + CLUSTER - 1) / CLUSTER;
    first = rank * each, end = min(first + each, p.NB);
    eights = max(0, min(p.int8_blocks, end) - first);
    eight_warps = (eights + kBlocks - 1) / kBlocks;
    warps = eight_warps + (end - first - eights + kBlocks - 1) / kBlocks;
  }
};

// Shared memory: the channels of each input, padded to whole blocks; where each thread's channels lie; two
// tokens' ratios (of warps of INT4 blocks, 32 a cta; of INT8 blocks); what the scale's warp tells the others; what a block's
// largest magnitude is multiplied with; barriers.
struct Memory {
  uint32_t base, places, barriers, input_bytes;
  int channels; // that are held of each input
  float *tops, *published, *per_absmax;
  int pitch;    // floats from one token's ratios to the other's
  __device__ __forceinline__ Memory(const TokenParams& p, char* shared, const Range& range) {
    channels = GATHER ? p.K : min(range.end * kBlock, p.K) - range.first * kBlock;
    base = shared_address(shared);
    input_bytes = uint32_t(GATHER ? p.NB : (p.NB + CLUSTER - 1) / CLUSTER) * kBlock * E::kBytes;
    const uint32_t staged = kInputs * input_bytes;
    places = base + staged;
    const uint32_t used = staged + (GATHER ? (blockDim.x - 32) * kValues * 2 : 0);
    pitch = 32 * CLUSTER + (p.NB + 3) / 4 * 4;
    tops = reinterpret_cast<float*>(shared + used);
    published = tops + 2 * pitch; // 32 groups' maxima, the scale, its reciprocal
    per_absmax = published + 36;
    barriers = base + used + 8 * pitch + 4 * 36 + blockDim.x; // four bytes for each four threads
  }
  __device__ __forceinline__ uint32_t input(int i) const { return base + i * input_bytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers; }                       // the rows have come
  __device__ __forceinline__ uint32_t empty() const { return barriers + 8; }                  // they are read by all warps
  __device__ __forceinline__ uint32_t known() const { return barriers + 16; }                 // the scale is
  __device__ __forceinline__ uint32_t left(int set) const { return barriers + 24 + 8 * set; } // all ratios are here
  __device__ __forceinline__ float* ratios(int set) const { return tops + set * pitch + 32 * CLUSTER; }  // of INT8 blocks
  // Of a thread's piece q; so mixed that neither those who read one q of consecutive threads meet in a bank, nor those who
  // store all q of two.
  __device__ __forceinline__ uint32_t places_at(int q, int thread) const { return places + (q * (blockDim.x - 32) + (thread ^ 2 * q)) * 16; }
  __device__ __forceinline__ void copy(const TokenParams& p, int first, int token) const {
    const uint32_t bytes = uint32_t(channels) * E::kBytes;
    const unsigned long long policy = l2_evict_first();
    mbarrier_expect(full(), kInputs * bytes);
    const char* row = static_cast<const char*>(p.x) + (size_t(token) * (kInputs * p.K) + (GATHER ? 0 : first * kBlock)) * E::kBytes;
    bulk_copy(input(0), row, bytes, full(), policy);
    if (FUSE == 2) bulk_copy(input(1), row + size_t(p.K) * E::kBytes, bytes, full(), policy);
  }
};

// A warp's blocks, seen from one lane.
struct Place {
  int lane, block; // the lane among its four, and the block that they take (or another one of the warp, for nothing)
  int thread; // that takes this block
  bool exists, is_int4;
  uint32_t at; // without a gather: of its block, in bytes from the start of an input
  __device__ __forceinline__ Place(const TokenParams& p, const Range& range) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % kLanes;
    is_int4 = __any_sync(kWarp, warp >= range.eight_warps); // known to be the warp's
    const int from = is_int4 ? range.first + range.eights + (warp - range.eight_warps) * kBlocks : range.first + warp * kBlocks;
    const int end = is_int4 ? range.end : range.first + range.eights, own = from + int(threadIdx.x % 32) / kLanes;
    exists = own < end;
    block = exists ? own : from;
    thread = exists ? threadIdx.x : 32 * warp + lane;
    at = uint32_t(block - range.first) * kBlock * E::kBytes;
  }
  __device__ __forceinline__ void leave_clip(const TokenParams& p, const Memory& memory) const {
    const float clip = p.clip[block];
    memory.per_absmax[threadIdx.x / kLanes] = is_int4 ? divide(clip, 7.f, 1.f / 7.f) : divide(clip, 127.f, 1.f / 127.f);
  }
  // Channel of the block that piece q (8 slots) begins with; pieces are slot bits s4 s3.
  __device__ __forceinline__ int piece(int q) const {
    const int l0 = lane & 1, l1 = lane >> 1;
    return HADAMARD && is_int4 ? 32 * lane + 8 * (q ^ (2 * l0 + l1)) : 64 * (q >> 1) + 16 * lane + 8 * (q & 1);
  }
  __device__ __forceinline__ void read(const Memory& memory, float (&v)[kValues], uint32_t input) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if constexpr (GATHER) {
        const uint4 eight = load_shared_16(memory.places_at(q, thread));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t two = part(eight, i);
          v[8 * q + 2 * i] = E::to_float(load_shared_2(low_of(two, input)));
          v[8 * q + 2 * i + 1] = E::to_float(load_shared_2(high_of(two, input)));
        }
      } else {
        const uint4 eight = load_shared_16(input + at + piece(q) * E::kBytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[8 * q + i] = E::half_to_float(part(eight, i / 2), i % 2);
      }
    }
  }
};

// Where the channels of all blocks of the cta lie: pieces of eight are read one after the other, and stored where the lane
// that needs them finds them (see Place::piece).
__device__ __forceinline__ void find_places(const TokenParams& p, const Memory& memory, const Range& range) {
  constexpr int kRounds = 4; // pieces of a thread: sixteen a block, which has four threads
  const int pieces = 16 * (range.end - range.first), threads = blockDim.x - 32;
  int4 index[2 * kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int piece = i * threads + threadIdx.x, c = range.first * kBlock + 8 * piece;
    index[2 * i] = {c, c + 1, c + 2, c + 3}, index[2 * i + 1] = {c + 4, c + 5, c + 6, c + 7}; // padding stands for itself
    if (piece >= pieces || c >= p.K) continue;
    index[2 * i] = __ldg(reinterpret_cast<const int4*>(p.perm + c));
    index[2 * i + 1] = __ldg(reinterpret_cast<const int4*>(p.perm + c + 4));
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int piece = i * threads + threadIdx.x, block = piece / 16, of_block = piece % 16;
    if (piece >= pieces) continue;
    const bool is_int8 = block < range.eights;
    int lane = of_block >> 1 & 3, q = of_block >> 2 & 2 | of_block & 1;
    if (HADAMARD && !is_int8) lane = of_block / 4, q = (of_block ^ 2 * (lane & 1) ^ lane >> 1) & 3;
    const int thread = (is_int8 ? block : block - range.eights + range.eight_warps * kBlocks) * kLanes + lane;
    const int4 &a = index[2 * i], &b = index[2 * i + 1];
    const uint32_t at = memory.places_at(q, thread);
    store_shared_8(at, uint32_t(a.x * kUnit) | uint32_t(a.y * kUnit) << 16, uint32_t(a.z * kUnit) | uint32_t(a.w * kUnit) << 16);
    store_shared_8(at + 8, uint32_t(b.x * kUnit) | uint32_t(b.y * kUnit) << 16, uint32_t(b.z * kUnit) | uint32_t(b.w * kUnit) << 16);
  }
}

// The values of the warp's blocks as the producer leaves them.
__device__ __forceinline__ void read_values(const Place& place, const Memory& memory, float (&v)[kValues]) {
  place.read(memory, v, __shfl_sync(kWarp, memory.input(0), 0)); // known to be one value
  if constexpr (FUSE == 2) {
    float up[kValues];
    place.read(memory, up, __shfl_sync(kWarp, memory.input(1), 0));
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = sigmoid_times(v[i]);
    round_all(v);
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = __fmul_rn(v[i], up[i]);
    round_all(v);
  }
}

// The scale that each of the warp's blocks would choose alone; the values are left rotated, but for norm and signs.
template <bool kInt4> __device__ __forceinline__ float ratio_of(const Place& place, const Memory& memory, float (&v)[kValues]) {
  constexpr bool kRotated = HADAMARD && kInt4;
  if (kRotated) rotate(v, again(place.lane));
  float largest = over_lanes(largest_magnitude(v));
  if (kRotated) largest = __fmul_rn(largest, kHadamardNorm); // rounds as each value would
  return __fmul_rn(largest, memory.per_absmax[threadIdx.x / kLanes]);
}

// What the warp leaves for the scale's: the largest ratio of its INT4 blocks, or the ratio of each INT8 block.
template <bool kInt4>
__device__ __forceinline__ void leave(const Place& place, const Memory& memory, int set, int rank, float ratio) {
  float* to = memory.ratios(set) + place.block;
  bool mine = place.exists && place.lane < CLUSTER;
  [[maybe_unused]] int receiver = place.lane;
  if (kInt4) {
    ratio = __uint_as_float(__reduce_max_sync(kWarp, __float_as_uint(ratio)));
    to = memory.tops + set * memory.pitch + 32 * rank + threadIdx.x / 32;
    receiver = threadIdx.x % 32, mine = receiver < CLUSTER;
  }
#if CLUSTER > 1
  if (mine) send_to_cta(to, receiver, ratio, memory.left(set));
#else
  if (mine) *to = ratio;
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.left(set));
#endif
}

// Codes of the warp's blocks, the quick way or the exact one -> memory. False: some that the quick way found are in doubt.
// to: of the block's codes; within: of this lane's in the first half of them. divisor: or, for the quick way, its inverse.
template <bool kInt4, bool kQuick>
__device__ __forceinline__ bool store_codes(const Place& place, char* to, uint32_t within, const float (&v)[kValues], float divisor,
                                            uint32_t by) {
  const uint32_t bias = (256 - kBias4 * by) * kTwice; // of (code + bias of pairs) * by; the low bytes are two's complement
  bool certain = true;
  const int lane = again(place.lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mine[kPiece], factor[4];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) mine[i] = v[half * kPiece + i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] = HADAMARD && kInt4 ? (negative(lane, 2 * half + i / 2) ? -kHadamardNorm : kHadamardNorm) : 1.f;
      if (kQuick) factor[i] *= divisor;
    }
    uint32_t pairs[kPiece / 2], words[4];
    if constexpr (kQuick)
      certain &= quick_codes(mine, factor, pairs);
    else
      exact_codes<kInt4 ? 4 : 8>(mine, factor, divisor, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = pairs[2 * i], high = pairs[2 * i + 1];
      words[i] = kInt4 ? __byte_perm(low * by + bias, high * by + bias, 0x6420) : bytes_of<kInt4>(low, high);
    }
    if (place.exists) store_global(to + (within ^ (64 * half)), make_uint4(words[0], words[1], words[2], words[3]));
  }
  return certain;
}

template <bool kInt4>
__device__ __forceinline__ void store(const TokenParams& p, const Place& place, const Memory& memory, const float (&v)[kValues],
                                      float ratio, int token) {
  TokenScale scales(memory.published[32], memory.published[33]);
  const int row = token % 8, lane = again(place.lane);
  const uint32_t atom = place.block * ((p.M + 7) / 8) + token / 8;
  float divisor = scales.scale, inverse = kUnusual;
  uint32_t by = 1;
  if (kInt4) {
    const float multiple = scales.multiple(ratio);
    divisor = __fmul_rn(divisor, multiple), by = uint32_t(multiple);
    const bool quick = memory.per_absmax[threadIdx.x / kLanes] >= kQuickClip / 7.f; // so the clip is at least kQuickClip
    if (quick && divisor >= kQuickTiny && divisor <= kQuickHuge) inverse = reciprocal_of(divisor) * kStep;
  } else {
    const uint32_t* const groups = reinterpret_cast<const uint32_t*>(memory.published);
    const int e = scales.exponent(__uint_as_float(groups[31 - __clz(place.block + 1)]));
    divisor = __fmul_rn(divisor, __int_as_float((e + 127) << 23));
    const int next = place.block + 1;
    const int then = next < p.int8_blocks ? scales.exponent(__uint_as_float(groups[31 - __clz(next + 1)])) : 0;
    if (place.exists && place.lane == 0) {
      int* const words = p.multiples + size_t(atom) * 8;
      words[row] = e | (e - then) << 8;
      if (token == p.M - 1) // tokens that fill the last atom
        for (int more = row + 1; more < 8; ++more) words[more] = 0;
    }
  }
  char* const to = static_cast<char*>(p.codes) + size_t(atom) * 1024 + row * 128;
  const uint32_t within = 16 * (lane ^ row);
  if constexpr (kInt4) {
    if (store_codes<true, true>(place, to, within, v, inverse, by) && inverse < kUnusual) return;
  }
  store_codes<kInt4, false>(place, to, within, v, divisor, by);
}

// Bytes of a token's ratios.
__device__ __forceinline__ uint32_t ratio_bytes(const TokenParams& p) {
  uint32_t bytes = 4 * p.int8_blocks;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const Range range(p, r);
    bytes += 4 * (range.warps - range.eight_warps);
  }
  return bytes;
}

// The warp without blocks, before all others are ready: barriers, and the first row on its way.
__device__ __forceinline__ void begin(const TokenParams& p, const Memory& memory, const Range& own) {
  const bool first_lane = threadIdx.x % 32 == 0;
  if (first_lane) {
    mbarrier_init(memory.full(), 1);
    mbarrier_init(memory.empty(), own.warps);
    mbarrier_init(memory.known(), 1);
    for (int set = 0; set < 2; ++set) mbarrier_init(memory.left(set), CLUSTER > 1 ? 1 : own.warps);
    mbarrier_init_fence();
#if CLUSTER > 1
    for (int set = 0; set < 2; ++set) mbarrier_expect(memory.left(set), ratio_bytes(p));
#endif
  }
  __syncwarp();
#if CLUSTER > 1
  cluster_arrive_relaxed(); // others may send
#endif
  wait_for_previous_kernel();
  if (first_lane && blockIdx.x < p.M) memory.copy(p, own.first, blockIdx.x);
  __syncwarp();
}

// Then: the next row, and the scale of each token.
__device__ __forceinline__ void serve(const TokenParams& p, const Memory& memory, const Range& own, int rank) {
  const int lane = threadIdx.x % 32, step = gridDim.x;
  uint32_t valid = 0; // of which ctas' warps this lane's number has INT4 blocks
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const Range range(p, r);
    valid |= uint32_t(lane >= range.eight_warps && lane < range.warps) << r;
  }
  int set = 0, phase = 0; // set: also of barriers that all tokens use
  for (int token = blockIdx.x; token < p.M; token += step) {
    if (lane == 0 && token + step < p.M) {
      mbarrier_wait(memory.empty(), set);
      memory.copy(p, own.first, token + step);
    }
    __syncwarp();
#if CLUSTER > 1
    wait_for_cluster(memory.left(set), phase);
    if (lane == 0) mbarrier_expect(memory.left(set), ratio_bytes(p)); // of the token after the next
#else
    mbarrier_wait(memory.left(set), phase);
#endif
    uint32_t top = 0; // non-negative floats are ordered as integers
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r)
      top = max(top, valid >> r & 1 ? __float_as_uint(memory.tops[set * memory.pitch + 32 * r + lane]) : 0u);
    uint32_t of_group = 0;
    const TokenScale scales(__reduce_max_sync(kWarp, top), memory.ratios(set), p.int8_blocks, lane, of_group);
    reinterpret_cast<uint32_t*>(memory.published)[lane] = of_group;
    if (lane == 0) memory.published[32] = scales.scale, memory.published[33] = scales.reciprocal;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory.known());
    if (rank == 0) {
      if (lane == 0) p.scale[token] = scales.scale;
      const int padding = token + 1 + lane; // tokens that fill the last atom: any finite scale
      if (token == p.M - 1 && padding < (p.M + 7) / 8 * 8) p.scale[padding] = 1.f;
    }
    if (set) phase ^= 1;
    set ^= 1;
  }
}

template <bool kInt4> __device__ __forceinline__ void quantize(const TokenParams& p, const Place& place, const Memory& memory, int rank) {
  int set = 0;
  for (int token = blockIdx.x; token < p.M; token += gridDim.x) {
    mbarrier_wait(memory.full(), set);
    float v[kValues];
    read_values(place, memory, v);
    if (token + int(gridDim.x) < p.M) {
      fence_proxy_async(); // before the next row is copied over what these loads read
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.empty());
    }
    const float ratio = ratio_of<kInt4>(place, memory, v);
    leave<kInt4>(place, memory, set, rank, ratio);
    mbarrier_wait(memory.known(), set);
    store<kInt4>(p, place, memory, v, ratio, token);
    set ^= 1;
  }
}

extern "C" __global__ void CLUSTER_OF_CTAS __maxnreg__(REGISTERS) quantize_stay(const TokenParams p) {
  extern __shared__ __align__(128) char shared[];
  let_next_kernel_start(); // it waits for this one's end before it reads or writes
  const int rank = CLUSTER > 1 ? blockIdx.y : 0, warp = threadIdx.x / 32;
  const Range range(p, rank);
  const Memory memory(p, shared, range);
  const bool serves = __any_sync(kWarp, warp == int(blockDim.x) / 32 - 1), works = __any_sync(kWarp, warp < range.warps);
  if (serves) {
    begin(p, memory, range);
  } else {
#if CLUSTER > 1
    cluster_arrive_relaxed();
#endif
    const int padding = GATHER || range.end == p.NB ? p.NB * kBlock - p.K : 0; // zeros of the last block
    for (int i = threadIdx.x; i < kInputs * padding; i += blockDim.x - 32)
      store_shared_2(memory.input(i / padding) + uint32_t(memory.channels + i % padding) * E::kBytes, 0);
    if (works) Place(p, range).leave_clip(p, memory);
    if (GATHER) find_places(p, memory, range);
  }
  __syncthreads();
#if CLUSTER > 1
  cluster_wait();
#endif
  if (serves) serve(p, memory, range, rank);
  if (serves || !works) return;
  const Place place(p, range);
  wait_for_previous_kernel();
  if (place.is_int4)
    quantize<true>(p, place, memory, rank);
  else
    quantize<false>(p, place, memory, rank);
}
