// kv4_append, rope_append, rope_qk_: new keys and values -> the paged 4-bit cache, with or without the rotary embedding.
//
// kv4_append: a cta takes one kv head of one *run*, the new tokens of one sequence that share a page. The cta of a
// token that is not the first of its run leaves at once, so the host need not know where runs begin. A run quantizes
// its values, and its keys if it fills the page. A page is read before the open page is overwritten, so there are two
// launches: stage 0 writes all but the open page of sequences with several runs, stage 2 that. Stage 3 is stage 0 where
// no sequence has more than one token.
// rope_append: a cta takes one kv head of one token with its q heads; a warp takes one head.
// rope_qk: a warp takes one q or k head of one token.
//
// Definitions: those of kv4_cache.cuh, and ENTRY (0 kv4_append, 1 rope_append, 2 rope_qk).
#include "comet/kv4_quantize.cuh"

using namespace comet;

struct Params {
  Cache cache;
  const uint16_t *k, *v; // ENTRY 0: [N, H, D] with rows k_pitch and v_pitch elements apart. Else k is qkv
  uint16_t* q;           // ENTRY 1: [N, Hq, D]; 2: qkv
  const float *cos, *sin;            // [positions, half]
  const uint16_t *q_weight, *k_weight; // [D] or null
  const int *slot, *position;        // [N]
  long long k_pitch, v_pitch;
  int tokens, q_heads, half, stage;
  float eps;
  int unused;
};

extern __shared__ __align__(16) char memory[];

// One head of D channels in a warp: lane l holds pairs l, l + 32, ... A pair is two channels that are rotated together,
// or two that are not rotated.
constexpr int kPairs = (kDim / 2 + 31) / 32;
struct Head {
  float low[kPairs], high[kPairs];
};
__device__ __forceinline__ bool pair_exists(int i) { return kDim / 2 % 32 == 0 || i < kDim / 2; }
__device__ __forceinline__ int low_channel(int i, int half) { return i < half ? i : i + half; }
__device__ __forceinline__ int high_channel(int i, int half) { return i < half ? i + half : i + kDim / 2; }

__device__ __forceinline__ Head load_head(const uint16_t* x, int half, int lane) {
  Head h;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    h.low[p] = h.high[p] = 0.f;
    if (pair_exists(i)) h.low[p] = E::one(x[low_channel(i, half)]), h.high[p] = E::one(x[high_channel(i, half)]);
  }
  return h;
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
__device__ __forceinline__ void rotate_head(Head& h, const float* cos, const float* sin, int half, int lane) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + 32 * p;
    if (i >= half) continue;
    const float a = h.low[p], b = h.high[p];
    h.low[p] = __fsub_rn(__fmul_rn(a, cos[i]), __fmul_rn(b, sin[i]));
    h.high[p] = __fadd_rn(__fmul_rn(b, cos[i]), __fmul_rn(a, sin[i]));
  }
}

#if ENTRY == 0

extern "C" __global__ void __launch_bounds__(kThreads) kv4_append(const __grid_constant__ Params p) {
  PageShared& shared = *reinterpret_cast<PageShared*>(memory);
  const Cache& c = p.cache;
  const int token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int next = token + threadIdx.x; // loaded before anything is decided: one trip to memory
  const bool exists = next < p.tokens;
  const int s = p.slot[token], place = p.position[token] - c.sinks; // place < 0: a sink
  const int s_before = token > 0 ? p.slot[token - 1] : -1, before = token > 0 ? p.position[token - 1] - c.sinks : 0;
  const int s_next = exists ? p.slot[next] : -1, place_next = exists ? p.position[next] - c.sinks : 0;
  if (s < 0) return;
  const auto page_of = [](int place) { return place < 0 ? -1 : place / kPage; };
  const int index = page_of(place);
  if (index >= 0 && s_before == s && page_of(before) == index) return; // a sink is a run of its own
  int count = 1; // the run's tokens stand side by side
  if (p.stage != 3 && index >= 0) {
    count = __syncthreads_count(threadIdx.x < kPage && s_next == s && page_of(place_next) == index);
    for (int from = kThreads; from < kPage && count == from; from += kThreads) {
      const int i = next + from;
      count += __syncthreads_count(from + threadIdx.x < kPage && i < p.tokens && p.slot[i] == s &&
                                   page_of(p.position[i] - c.sinks) == index);
    }
  }
  const uint16_t* k = p.k + token * p.k_pitch + head * kDim;
  const uint16_t* v = p.v + token * p.v_pitch + head * kDim;
  const auto copy = [&](uint16_t* to, const uint16_t* from, long long pitch, int n) {
    for (int i = threadIdx.x; i < n * kVectors; i += kThreads)
      reinterpret_cast<uint4*>(to + i / kVectors * kDim)[i % kVectors] =
          reinterpret_cast<const uint4*>(from + i / kVectors * pitch)[i % kVectors];
  };
  if (index < 0) {
    if (p.stage == 2) return;
    const size_t at = ((size_t(s) * c.heads + head) * c.sinks + c.sinks + place) * kDim;
    copy(c.k_sink + at, k, 0, 1);
    copy(c.v_sink + at, v, 0, 1);
    return;
  }
  const int first = place % kPage; // slot of the run's first token
  uint16_t* open = c.k_open + (size_t(s) * c.heads + head) * kPage * kDim;
  const bool later_run = s_before == s && before >= 0;
  const bool last_run = p.stage == 3 || token + count >= p.tokens || p.slot[token + count] != s;
  if (p.stage == 2) {
    if (last_run && later_run) copy(open + first * kDim, k, p.k_pitch, count);
    return;
  }
  const int page = c.page_table[size_t(s) * c.table_width + index];
  for (int word = first / 8 + warp; word <= (first + count - 1) / 8; word += kWarps) {
    const int begin = max(first, 8 * word), end = min(first + count, 8 * word + 8);
    append_values(c, page, head, begin, end - begin, v + (begin - first) * p.v_pitch, size_t(p.v_pitch), lane);
  }
  if (first + count == kPage)
    quantize_page(
        c, page, head, [&](int i) { return i < first ? open + i * kDim : k + (i - first) * p.k_pitch; }, shared);
  if (last_run && !later_run) copy(open + first * kDim, k, p.k_pitch, count);
}

#elif ENTRY == 1

extern "C" __global__ void __launch_bounds__(kThreads) rope_append(const __grid_constant__ Params p) {
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
    rotate_head(h, cos, sin, p.half, lane);
    uint16_t* to = !is_key    ? p.q + (size_t(token) * p.q_heads + which) * kDim
                   : place < 0 ? c.k_sink + (size_t(sequence) * c.sinks + c.sinks + place) * kDim
                               : open + place % kPage * kDim;
    store_head(to, h, p.half, lane);
  }
  if (s < 0 || place < 0 || place % kPage != kPage - 1) return;
  __syncthreads();
  quantize_page(c, page, head, [&](int i) { return open + i * kDim; }, shared);
}

#else

extern "C" __global__ void __launch_bounds__(kThreads) rope_qk(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % 32, heads = p.q_heads + p.cache.heads;
  const long long item = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (item >= (long long)p.tokens * heads) return;
  const int token = int(item / heads), head = int(item % heads), t = max(p.position[token], 0);
  uint16_t* x = p.q + (size_t(token) * (heads + p.cache.heads) + head) * kDim;
  Head h = load_head(x, p.half, lane);
  norm_head(h, head < p.q_heads ? p.q_weight : p.k_weight, p.eps, p.half, lane);
  rotate_head(h, p.cos + size_t(t) * p.half, p.sin + size_t(t) * p.half, p.half, lane);
  store_head(x, h, p.half, lane);
}

#endif
