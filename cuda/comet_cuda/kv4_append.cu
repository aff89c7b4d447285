// kv4_append, rope_append, rope_qk_: new keys and values -> the paged 4-bit cache, with or without the rotary embedding.
//
// kv4_append: a cta takes one kv head of one *run*, the new tokens of one sequence that share a page. Given single tokens,
// the cta of one that is not the first of its run leaves at once, so the host need not know where runs begin. A run quantizes
// its values, and its keys if it fills the page. A page is read before the open page is overwritten, so there are two
// launches: stage 0 writes all but the open page of sequences with several runs, stage 2 that.
// kv4_append_token: one token of each sequence; a warp takes one kv head of it. Further ctas, for four heads each, wait
// for nothing: they quantize the page if this token fills it.
// rope_append: a cta takes one kv head of one token with its q heads; a warp takes one head.
// rope_append_wave: the same in one wave: a warp takes one v head of one token, or up to four of its q and k heads, loaded
// at once, as what a wave takes is latency. A few ctas behind these complete pages: each of their warps finds the tokens
// that fill one, and takes every so many-th piece (eight channels of one kv head of such a page), with the newest key from
// qkv. So they wait for nobody, and one page is shared out over many warps.
// rope_qk: a warp takes one q or k head of one token.
//
// Definitions: those of kv4_cache.cuh, and ENTRY (0 kv4_append, 1 rope_append, 2 rope_qk,
// 3 kv4_append_chunk: kv4_append of whole sequences, with `starts`, 4 kv4_append_token,
// 5 rope_append_wave).
#include "comet/kv4_quantize.cuh"

using namespace comet;

struct Params {
  Cache cache;
  const uint16_t *k, *v; // ENTRY 0, 3, 4: [N, H, D] with rows k_pitch and v_pitch elements apart. Else k is qkv
  uint16_t* q;           // ENTRY 1: [N, Hq, D]; 2: qkv
  const float *cos, *sin;            // [positions, half]
  const uint16_t *q_weight, *k_weight; // [D] or null
  const int *slot, *position;          // [N], ENTRY 3: [R]
  const int* starts;                   // [R + 1], the first row of each sequence (ENTRY 3)
  long long k_pitch, v_pitch;
  int tokens, q_heads, half, stage;
  float eps;
  int unused;
};

extern __shared__ __align__(16) char memory[];

// Ctas a multiprocessor that registers must allow: many where a step of decoding waits for nothing but memory.
#if ENTRY == 5 && (__CUDA_ARCH__ < 900 || DIM == 96 || PAGE > 128)
constexpr int kManyThreads = PAGE > 128 ? 768 : 1024;
#else
constexpr int kManyThreads = 1280;
#endif
constexpr int kThreadsOfSm = (ENTRY == 1 || ENTRY == 4 || ENTRY == 5) && kDim < 256 ? kManyThreads : 768;
constexpr int kCtas = kThreadsOfSm < kThreads ? 1 : kThreadsOfSm / kThreads;

// One head of D channels in a warp: lane l holds pairs l, l + 32, ... A pair is two channels that are rotated together,
// or two that are not rotated.
constexpr int kPairs = (kDim / 2 + 31) / 32;
struct Head {
  float low[kPairs], high[kPairs];
};
__device__ __forceinline__ bool pair_exists(int i) { return kDim / 2 % 32 == 0 || i < kDim / 2; }
__device__ __forceinline__ int low_channel(int i, int half) { return i < half ? i : i + half; }
__device__ __forceinline__ int high_channel(int i, int half) { return i < half ? i + half : i + kDim / 2; }

// A pair as it lies in memory: the low channel in the low half.
__device__ __forceinline__ void load_pairs(const uint16_t* x, int half, int lane, uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    pairs[p] = pair_exists(i) ? x[low_channel(i, half)] | uint32_t(x[high_channel(i, half)]) << 16 : 0;
  }
}
__device__ __forceinline__ Head head_of(const uint32_t (&pairs)[kPairs]) {
  Head h;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) h.low[p] = E::low(pairs[p]), h.high[p] = E::high(pairs[p]);
  return h;
}
__device__ __forceinline__ Head load_head(const uint16_t* x, int half, int lane) {
  uint32_t pairs[kPairs];
  load_pairs(x, half, lane, pairs);
  return head_of(pairs);
}
__device__ __forceinline__ void store_head(uint16_t* x, const Head& h, int half, int lane) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    if (pair_exists(i)) x[low_channel(i, half)] = E::from(h.low[p]), x[high_channel(i, half)] = E::from(h.high[p]);
  }
}
__device__ __forceinline__ float rounded(float x) { return E::one(E::from(x)); }

__device__ __forceinline__ void norm_head(Head& h, const uint16_t* weight, float eps, int half, int lane) {
  if (weight == nullptr) return;
  float squares = 0.f;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) squares += h.low[p] * h.low[p] + h.high[p] * h.high[p];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  const float inverse = rsqrtf(squares / float(kDim) + eps);
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    if (!pair_exists(i)) continue;
    h.low[p] = rounded(E::one(weight[low_channel(i, half)]) * rounded(h.low[p] * inverse));
    h.high[p] = rounded(E::one(weight[high_channel(i, half)]) * rounded(h.high[p] * inverse));
  }
}
// cos and sin of a lane's pairs; `cos` and `sin` are the row of a position.
struct Angles {
  float cos[kPairs], sin[kPairs];
};
__device__ __forceinline__ Angles load_angles(const float* cos, const float* sin, int half, int lane) {
  Angles a;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    a.cos[p] = i < half ? cos[i] : 1.f, a.sin[p] = i < half ? sin[i] : 0.f;
  }
  return a;
}
__device__ __forceinline__ void rotate_head(Head& h, const Angles& angles, int half, int lane) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    if (lane + 32 * p >= half) continue;
    const float a = h.low[p], b = h.high[p];
    h.low[p] = __fsub_rn(__fmul_rn(a, angles.cos[p]), __fmul_rn(b, angles.sin[p]));
    h.high[p] = __fadd_rn(__fmul_rn(b, angles.cos[p]), __fmul_rn(a, angles.sin[p]));
  }
}

#if ENTRY == 0 || ENTRY == 3

// New tokens of one sequence that share a page, or are sinks.
struct Run {
  int token, count; // rows token .. token + count - 1; count 0: none
  int slot, place;  // of the first; place counts from the sinks on, place < 0: a sink
  bool is_last;     // of the sequence in this call
  bool is_later;    // another run with a page comes before
};
__device__ __forceinline__ int page_of(int place) { return place < 0 ? -1 : place / kPage; }

// The run that begins with row `token`; none if it begins earlier. By the whole cta, in one trip to memory.
__device__ __forceinline__ Run run_of_token(const Params& p, int token) {
  const int next = token + threadIdx.x, sinks = p.cache.sinks;
  const bool exists = next < p.tokens;
  const int s = p.slot[token], place = p.position[token] - sinks;
  const int s_before = token > 0 ? p.slot[token - 1] : -1, before = token > 0 ? p.position[token - 1] - sinks : 0;
  const int s_next = exists ? p.slot[next] : -1, place_next = exists ? p.position[next] - sinks : 0;
  const int index = page_of(place);
  Run run = {token, 1, s, place, true, s_before == s && before >= 0};
  if (s < 0 || (index >= 0 && s_before == s && page_of(before) == index)) run.count = 0; // a sink is a run of its own
  if (run.count == 0 || index < 0) return run;
  run.count = __syncthreads_count(threadIdx.x < kPage && s_next == s && page_of(place_next) == index);
  for (int from = kThreads; from < kPage && run.count == from; from += kThreads) {
    const int i = next + from;
    run.count += __syncthreads_count(from + threadIdx.x < kPage && i < p.tokens && p.slot[i] == s &&
                                     page_of(p.position[i] - sinks) == index);
  }
  run.is_last = token + run.count >= p.tokens || p.slot[token + run.count] != s;
  return run;
}
// The n-th run of sequence r, where the host knows how many there may be.
__device__ __forceinline__ Run run_of_sequence(const Params& p, int n, int r) {
  const int begin = p.starts[r], end = p.starts[r + 1], s = p.slot[r], old = p.position[r], sinks = p.cache.sinks;
  const int index = page_of(old - sinks) + n, base = index < 0 ? 0 : sinks + index * kPage;
  const int from = max(base, old), to = min(index < 0 ? sinks : base + kPage, old + end - begin);
  return {begin + from - old, s < 0 ? 0 : max(to - from, 0), s, from - sinks, to == old + end - begin,
          from > old && from > sinks};
}

#if ENTRY == 0
#define NAME kv4_append
#else
#define NAME kv4_append_chunk
#endif
extern "C" __global__ void __launch_bounds__(kThreads, kCtas) NAME(const __grid_constant__ Params p) {
  PageShared& shared = *reinterpret_cast<PageShared*>(memory);
  const Cache& c = p.cache;
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
#if ENTRY == 0
  const Run run = run_of_token(p, blockIdx.x);
#else
  const Run run = run_of_sequence(p, blockIdx.x, blockIdx.z);
#endif
  if (run.count == 0) return;
  const int s = run.slot, place = run.place, count = run.count;
  const uint16_t* k = p.k + run.token * p.k_pitch + head * kDim;
  const uint16_t* v = p.v + run.token * p.v_pitch + head * kDim;
  const auto copy = [&](uint16_t* to, const uint16_t* from, long long pitch, int n) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n * kVectors; i += kThreads)
      reinterpret_cast<uint4*>(to + i / kVectors * kDim)[i % kVectors] =
          reinterpret_cast<const uint4*>(from + i / kVectors * pitch)[i % kVectors];
  };
  if (place < 0) {
    if (p.stage == 2) return;
    const size_t at = ((size_t(s) * c.heads + head) * c.sinks + c.sinks + place) * kDim;
    copy(c.k_sink + at, k, p.k_pitch, count);
    copy(c.v_sink + at, v, p.v_pitch, count);
    return;
  }
  const int first = place % kPage; // slot of the run's first token
  uint16_t* open = c.k_open + (size_t(s) * c.heads + head) * kPage * kDim;
  if (p.stage == 2) {
    if (run.is_last && run.is_later) copy(open + first * kDim, k, p.k_pitch, count);
    return;
  }
  const int page = c.page_table[size_t(s) * c.table_width + place / kPage];
#pragma unroll 1
  for (int word = first / 8 + warp; word <= (first + count - 1) / 8; word += kWarps) {
    const int begin = max(first, 8 * word), end = min(first + count, 8 * word + 8);
    append_values(c, page, head, begin, end - begin, v + (begin - first) * p.v_pitch, size_t(p.v_pitch), lane);
  }
  if (first + count == kPage)
    quantize_page(
        c, page, head, [&](int i) { return i < first ? open + i * kDim : k + (i - first) * p.k_pitch; }, shared);
  if (run.is_last && !run.is_later) copy(open + first * kDim, k, p.k_pitch, count);
}

#elif ENTRY == 4

constexpr int kHeadsOfPageCta = 4;

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) kv4_append_token(const __grid_constant__ Params p) {
  PageShared& shared = *reinterpret_cast<PageShared*>(memory);
  const Cache& c = p.cache;
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int groups = (c.heads + kWarps - 1) / kWarps;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int s = p.slot[token], place = p.position[token] - c.sinks, slot = place % kPage;
  if (s < 0) return;
  const uint16_t *k = p.k + token * p.k_pitch, *v = p.v + token * p.v_pitch;
  const int* table = c.page_table + size_t(s) * c.table_width;
  if (blockIdx.y < groups) {
    const int head = blockIdx.y * kWarps + warp;
    if (head >= c.heads) return;
    const size_t sequence = page_head(c, s, head);
    uint16_t* k_to = place < 0 ? c.k_sink + (sequence * c.sinks + c.sinks + place) * kDim
                               : c.k_open + (sequence * kPage + slot) * kDim;
    if (lane < kVectors)
      reinterpret_cast<uint4*>(k_to)[lane] = reinterpret_cast<const uint4*>(k + head * kDim)[lane];
    if (place >= 0)
      append_values(c, table[place / kPage], head, slot, 1, v + head * kDim, 0, lane);
    else if (lane < kVectors)
      reinterpret_cast<uint4*>(c.v_sink + (sequence * c.sinks + c.sinks + place) * kDim)[lane] =
          reinterpret_cast<const uint4*>(v + head * kDim)[lane];
    return;
  }
  if (place < 0 || slot != kPage - 1) return;
  const int first = (blockIdx.y - groups) * kHeadsOfPageCta;
  for (int head = first; head < min(first + kHeadsOfPageCta, c.heads); ++head) {
    const uint16_t* open = c.k_open + size_t(page_head(c, s, head)) * kPage * kDim;
    const uint16_t* newest = k + head * kDim;
    quantize_page(
        c, table[place / kPage], head, [&](int i) { return i < kPage - 1 ? open + i * kDim : newest; }, shared);
    __syncthreads(); // `shared` is read until here
  }
}

#elif ENTRY == 1

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) rope_append(const __grid_constant__ Params p) {
  PageShared& shared = *reinterpret_cast<PageShared*>(memory);
  const Cache& c = p.cache;
  const int token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int s = p.slot[token], t = p.position[token], place = t - c.sinks;
  const int group = p.q_heads / c.heads;
  const uint16_t* row = p.k + size_t(token) * (p.q_heads + 2 * c.heads) * kDim;
  const float *cos = p.cos + size_t(max(t, 0)) * p.half, *sin = p.sin + size_t(max(t, 0)) * p.half;
  const int sequence = page_head(c, s, head);
  uint16_t* open = c.k_open + size_t(sequence) * kPage * kDim;
  const int page = s >= 0 && place >= 0 ? c.page_table[size_t(s) * c.table_width + place / kPage] : 0;
  for (int task = warp; task < group + 2; task += kWarps) {
    if (task == 1) { // the value
      const uint16_t* v = row + (p.q_heads + c.heads + head) * kDim;
      if (s < 0) continue;
      if (place >= 0) {
        append_values(c, page, head, place % kPage, 1, v, 0, lane);
      } else {
        uint16_t* to = c.v_sink + (size_t(sequence) * c.sinks + c.sinks + place) * kDim;
        for (int d = lane; d < kDim; d += 32) to[d] = v[d];
      }
      continue;
    }
    const bool is_key = task == 0;
    if (is_key && s < 0) continue;
    const int which = is_key ? p.q_heads + head : head * group + task - 2;
    Head h = load_head(row + which * kDim, p.half, lane);
    norm_head(h, is_key ? p.k_weight : p.q_weight, p.eps, p.half, lane);
    rotate_head(h, load_angles(cos, sin, p.half, lane), p.half, lane);
    uint16_t* to = !is_key    ? p.q + (size_t(token) * p.q_heads + which) * kDim
                   : place < 0 ? c.k_sink + (size_t(sequence) * c.sinks + c.sinks + place) * kDim
                               : open + place % kPage * kDim;
    store_head(to, h, p.half, lane);
  }
  if (s < 0 || place < 0 || place % kPage != kPage - 1) return;
  __syncthreads();
  quantize_page(c, page, head, [&](int i) { return open + i * kDim; }, shared);
}

#elif ENTRY == 5

constexpr int kRotated = 4; // q and k heads of a warp, all loaded before the first is stored
constexpr int kSeen = 8;    // times 32 tokens that a warp looks at in one trip to memory

// Angles of position t (that of padding may be anything).
__device__ __forceinline__ Angles angles_at(const Params& p, int t, int lane) {
  const size_t row = size_t(max(t, 0)) * p.half;
  return load_angles(p.cos + row, p.sin + row, p.half, lane);
}

// The pages that this call's tokens fill: pieces index, index + warps, ... of them, by one warp. newest: shared, [D].
__device__ __forceinline__ void complete_pages(const Params& p, int index, int warps, uint16_t* newest, int lane) {
  const Cache& c = p.cache;
  const int heads = p.q_heads + c.heads, pieces = c.heads * kVectors; // of a token
#pragma unroll 1
  for (int base = 0; base < p.tokens; base += 32 * kSeen) {
    uint32_t filled = 0; // lane i: those of tokens base + 32 i on that fill a page
    int before = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kSeen; ++i) {
      const int at = base + 32 * i + lane;
      const int s = at < p.tokens ? p.slot[at] : -1, place = at < p.tokens ? p.position[at] - c.sinks : -1;
      const uint32_t bits = __ballot_sync(~0u, s >= 0 && place >= 0 && place % kPage == kPage - 1);
      if (lane == i) filled = bits, before = count;
      count += __popc(bits);
    }
#pragma unroll 1
    for (int item = index; item < count * pieces; item += warps) {
      int nth = item / pieces;
      const uint32_t here = __ballot_sync(~0u, nth >= before && nth < before + __popc(filled));
      const int from = __ffs(int(here)) - 1;
      uint32_t bits = __shfl_sync(~0u, filled, from);
      for (nth -= __shfl_sync(~0u, before, from); nth > 0; --nth) bits &= bits - 1;
      const int token = base + 32 * from + __ffs(int(bits)) - 1;
      const int head = item % pieces / kVectors, s = p.slot[token], t = p.position[token];
      const int page = c.page_table[size_t(s) * c.table_width + (t - c.sinks) / kPage];
      const uint16_t* k = p.k + (size_t(token) * (heads + c.heads) + p.q_heads + head) * kDim;
      const auto newest_key = [&] {
        Head h = load_head(k, p.half, lane);
        norm_head(h, p.k_weight, p.eps, p.half, lane);
        rotate_head(h, angles_at(p, t, lane), p.half, lane);
        __syncwarp(); // the key of the piece before is read until here
        store_head(newest, h, p.half, lane);
        __syncwarp();
        return newest;
      };
      quantize_piece(c, page, head, item % kVectors, c.k_open + size_t(page_head(c, s, head)) * kPage * kDim, newest_key,
                     lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) rope_append_wave(const __grid_constant__ Params p) {
  const Cache& c = p.cache;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.q_heads + c.heads;
  const int parts = c.heads + (heads + kRotated - 1) / kRotated; // of a token, a warp each
  const int ctas = (p.tokens * parts + kWarps - 1) / kWarps;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (int(blockIdx.x) >= ctas) {
    complete_pages(p, (blockIdx.x - ctas) * kWarps + warp, (gridDim.x - ctas) * kWarps,
                   reinterpret_cast<uint16_t*>(memory) + warp * kDim, lane);
    return;
  }
  const int item = blockIdx.x * kWarps + warp, token = item / parts, part = item % parts;
  if (token >= p.tokens) return;
  const int s = p.slot[token], t = p.position[token], place = t - c.sinks, slot = place % kPage;
  const uint16_t* row = p.k + size_t(token) * (heads + c.heads) * kDim;
  if (part < c.heads) { // a value
    if (s < 0) return;
    const int page = place >= 0 ? c.page_table[size_t(s) * c.table_width + place / kPage] : 0;
    const uint16_t* v = row + (heads + part) * kDim;
    if (place >= 0)
      append_values(c, page, part, slot, 1, v, 0, lane);
    else if (lane < kVectors)
      reinterpret_cast<uint4*>(c.v_sink + (size_t(page_head(c, s, part)) * c.sinks + c.sinks + place) * kDim)[lane] =
          reinterpret_cast<const uint4*>(v)[lane];
    return;
  }
  const int first = (part - c.heads) * kRotated;
  const Angles angles = angles_at(p, t, lane);
  uint32_t pairs[kRotated][kPairs] = {};
#pragma unroll
  for (int n = 0; n < kRotated; ++n)
    if (n == 0 || first + n < heads) load_pairs(row + first * kDim + n * kDim, p.half, lane, pairs[n]);
#pragma unroll 1 // one norm's registers at a time
  for (int n = 0; n < kRotated; ++n) {
    const int head = first + n, kv = head - p.q_heads;
    if (head >= heads || (kv >= 0 && s < 0)) return;
    Head h = head_of(pairs[0]);
#pragma unroll
    for (int i = 1; i < kRotated; ++i)
      if (n == i) h = head_of(pairs[i]);
    norm_head(h, kv < 0 ? p.q_weight : p.k_weight, p.eps, p.half, lane);
    rotate_head(h, angles, p.half, lane);
    uint16_t* to = kv < 0      ? p.q + (size_t(token) * p.q_heads + head) * kDim
                   : place < 0 ? c.k_sink + (size_t(page_head(c, s, kv)) * c.sinks + c.sinks + place) * kDim
                               : c.k_open + (size_t(page_head(c, s, kv)) * kPage + slot) * kDim;
    store_head(to, h, p.half, lane);
  }
}

#else

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) rope_qk(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, heads = p.q_heads + p.cache.heads;
  const long long item = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (item >= (long long)p.tokens * heads) return;
  const int token = int(item / heads), head = int(item % heads), t = max(p.position[token], 0);
  uint16_t* x = p.q + (size_t(token) * (heads + p.cache.heads) + head) * kDim;
  Head h = load_head(x, p.half, lane);
  norm_head(h, head < p.q_heads ? p.q_weight : p.k_weight, p.eps, p.half, lane);
  rotate_head(h, load_angles(p.cos + size_t(t) * p.half, p.sin + size_t(t) * p.half, p.half, lane), p.half, lane);
  store_head(x, h, p.half, lane);
}

#endif
