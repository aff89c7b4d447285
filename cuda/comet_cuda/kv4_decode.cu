// kv4_decode: attention of one new token per sequence over the paged 4-bit cache, split over the context.
//
// A cta takes one chunk of pages of one sequence and kv head, for up to 8 * NT of its q heads. Each of its four warps
// walks every fourth page alone, with its own ring of tiles in shared memory that it fills by cp.async; a lane reads
// what it copied, so there is no barrier. Chunk 0 also takes the open page and the sinks, in 16 bit. The four warps
// are added in shared memory; if a sequence has several chunks, each leaves (maximum, sum, output) in `partial`, and the
// last one to arrive, by an integer ticket, adds all in ascending order: the same bits every time.
//
// Definitions: those of kv4_attend.cuh, STAGES of the ring, MIN_CTAS a multiprocessor.
#include "comet/kv4_attend.cuh"

#include "comet/async_copy.cuh"

using namespace comet;

constexpr int kWarps = 4, kThreads = 32 * kWarps, kHeads = 8 * NT;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kRingBytes = STAGES * kStageBytes;
constexpr int kParamBytes = 4 * (kDim + kPage); // scale and minimum of keys and values of a page
constexpr int kOpenPages = 2;                   // pages of a chunk that the open page stands for
static_assert(STAGES >= 2 && STAGES - 1 <= kTiles, "two parameter buffers are enough");
static_assert(STAGES >= NT, "the ring holds the four warps' outputs");

struct Params {
  Cache cache;
  const uint16_t* q; // [N, Hq, D]
  uint16_t* out;     // [N, Hq, D]
  float* partial;    // [N * gridDim.x, chunks, kHeads, D + 2]
  int* tickets;      // [N * gridDim.x], zero before and after
  const int *slot, *length;
  int group, head_tiles, chunk, window; // q heads of a kv head; tiles of kHeads of them; pages a chunk
  float scale, cap_log2;                // q . k -> log2 units, or -> score over softcap
};

struct Shared {
  char ring[kWarps][kRingBytes];
  char params[kWarps][2][kParamBytes];
  float q[NT * 8 * kDim]; // PageQuery's order
  float top[kWarps][kHeads], total[kWarps][kHeads];
  int is_last;
};

// Fills a warp's ring, tile after tile of every fourth page.
struct Producer {
  const Cache& c;
  const int* table;
  uint32_t ring, params; // addresses in shared memory
  int head, lane, index, end, tile = 0, parity = 0, stage = 0, page = 0, next = 0;

  __device__ __forceinline__ Producer(const Cache& c, const int* table, uint32_t ring, uint32_t params, int head, int lane,
                                      int first, int end)
      : c(c), table(table), ring(ring), params(params), head(head), lane(lane), index(first), end(end) {
    if (index < end) page = table[index];
    if (index + kWarps < end) next = table[index + kWarps];
  }
  __device__ __forceinline__ void copy_params(size_t at) {
    const char* from[4] = {reinterpret_cast<const char*>(c.k_scale + at * kDim),
                           reinterpret_cast<const char*>(c.k_min + at * kDim),
                           reinterpret_cast<const char*>(c.v_scale + at * kPage),
                           reinterpret_cast<const char*>(c.v_min + at * kPage)};
    const uint32_t to = params + parity * kParamBytes;
#pragma unroll
    for (int i = 0; i < (kDim + kPage) / 4; i += 32) {
      const int piece = i + lane;
      const int which = piece < kDim / 8 ? 0 : piece < kDim / 4 ? 1 : piece < kDim / 4 + kPage / 8 ? 2 : 3;
      const int start = which < 2 ? which * kDim / 8 : kDim / 4 + (which - 2) * kPage / 8;
      const char* base = which == 0 ? from[0] : which == 1 ? from[1] : which == 2 ? from[2] : from[3];
      if ((kDim + kPage) / 4 % 32 == 0 || piece < (kDim + kPage) / 4)
        copy_async_16(to + piece * 16, base + (piece - start) * 16, true);
    }
  }
  __device__ __forceinline__ void step() {
    if (index < end) {
      const size_t at = page_head(c, page, head);
      if (tile == 0) copy_params(at);
      const uint32_t to = ring + stage * kStageBytes + lane * 16;
      const uint8_t* k = c.k_codes + at * kPageBytes + tile * kTileBytes + lane * 16;
      const uint8_t* v = c.v_codes + at * kPageBytes + tile * kTileBytes + (lane % 4 * 8 + lane / 4) * 16;
#pragma unroll
      for (int x = 0; x < kPieces; ++x) copy_async_16(to + x * 512, k + x * 512, true);
#pragma unroll
      for (int x = 0; x < kPieces; ++x) copy_async_16(to + kTileBytes + x * 512, v + x * 512, true);
      if (++tile == kTiles) {
        tile = 0, parity ^= 1, index += kWarps, page = next;
        if (index + kWarps < end) next = table[index + kWarps];
      }
    }
    commit_copies();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

__device__ __forceinline__ void load_words(const char* from, int lane, uint32_t (&words)[kWords]) {
#pragma unroll
  for (int x = 0; x < kPieces; ++x) {
    const uint4 w = *reinterpret_cast<const uint4*>(from + x * 512 + lane * 16);
    words[4 * x] = w.x, words[4 * x + 1] = w.y, words[4 * x + 2] = w.z, words[4 * x + 3] = w.w;
  }
}
__device__ __forceinline__ void hide(float (&score)[2][NT][4], int token, int from, int to) { // but [from, to)
#pragma unroll
  for (int a = 0; a < 4; ++a)
    if (token + a < from || token + a >= to)
#pragma unroll
      for (int n = 0; n < NT; ++n) score[a / 2][n][a % 2 * 2] = score[a / 2][n][a % 2 * 2 + 1] = kHidden;
}

// Pages first, first + 4, ... before end, in 4 bit; tokens before `visible` (of the paged ones) are hidden.
__device__ __forceinline__ void attend_pages(const Params& p, Attention& out, Producer& producer, const Shared& shared,
                                             int first, int end, int visible, int warp, int lane) {
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int index = first; index < end; index += kWarps, parity ^= 1) {
    const char* params = shared.params[warp][parity];
    PageQuery query;
    float exponent = 0.f;
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      producer.step();
      const char* values = params + 4 * kDim;
      if (tile == 0) {
        query.set(shared.q, params, params + 2 * kDim, lane);
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          largest = max(largest, uint32_t(reinterpret_cast<const uint16_t*>(values)[32 * i + lane]));
        exponent = exponent_above(largest);
      }
      const char* ring = shared.ring[warp] + stage * kStageBytes;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      uint32_t words[kWords];
      float score[2][NT][4];
      load_words(ring, lane, words);
      query.scores(words, score, p.cap_log2);
      const int token = tile * kTile + lane / 4 * 4;
      if (index * kPage + tile * kTile < visible) hide(score, index * kPage + token, visible, end * kPage);
      ValueParams v;
      v.set(*reinterpret_cast<const uint2*>(values + token * 2),
            *reinterpret_cast<const uint2*>(values + 2 * kPage + token * 2));
      load_words(ring + kTileBytes, lane, words);
      out.add(score, words, v, exponent);
    }
  }
}

// A tile of the open page: 16-bit keys from k_open, 4-bit values from `page`; slots from `from` up to `to` are read.
__device__ __forceinline__ void attend_open(const Params& p, Attention& out, const uint16_t* q, int heads,
                                            size_t sequence, size_t at, char* ring, int tile, int from, int to, int lane) {
  const Cache& c = p.cache;
  const int g = lane / 4, t = lane % 4, token = tile * kTile + 4 * g;
  const uint16_t* k = c.k_open + (sequence * kPage + token) * kDim + 8 * t;
  const uint32_t to_shared = shared_address(ring) + lane * 16;
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int y = 0; y < kPieces; ++y) copy_async_16(to_shared + (a * kPieces + y) * 512, k + a * kDim + 32 * y, true);
  commit_copies();
  uint32_t words[kWords];
  const uint8_t* v = c.v_codes + at * kPageBytes + tile * kTileBytes + (8 * t + g) * 16;
#pragma unroll
  for (int x = 0; x < kPieces; ++x) {
    const uint4 w = *reinterpret_cast<const uint4*>(v + x * 512);
    words[4 * x] = w.x, words[4 * x + 1] = w.y, words[4 * x + 2] = w.z, words[4 * x + 3] = w.w;
  }
  const uint2 s2 = *reinterpret_cast<const uint2*>(c.v_scale + at * kPage + token);
  const uint2 m2 = *reinterpret_cast<const uint2*>(c.v_min + at * kPage + token);
  ValueParams params;
  params.set(s2, m2);
  uint32_t largest = 0;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const bool read = token + a >= from && token + a < to;
    const uint32_t bits = ((a < 2 ? s2.x : s2.y) >> (16 * (a % 2))) & 0xFFFFu;
    if (read) largest = max(largest, bits);
    if (!read) params.scale[a] = params.centre[a] = 0.f; // slots that nobody wrote may hold anything
  }
  const float exponent = exponent_above(largest);
  float score[2][NT][4] = {};
  wait_for_copies<0>();
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int y = 0; y < kPieces; ++y) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (8 * n + g < heads) b = *reinterpret_cast<const uint4*>(q + (8 * n + g) * kDim + 32 * y + 8 * t);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 r = *reinterpret_cast<const uint4*>(ring + (2 * m * kPieces + y) * 512 + lane * 16);
        const uint4 r8 = *reinterpret_cast<const uint4*>(ring + ((2 * m + 1) * kPieces + y) * 512 + lane * 16);
        E::mma(score[m][n], r.x, r8.x, r.y, r8.y, b.x, b.y);
        E::mma(score[m][n], r.z, r8.z, r.w, r8.w, b.z, b.w);
      }
    }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[m][n][i] *= p.scale;
        if (SOFTCAP) score[m][n][i] = capped(score[m][n][i], p.cap_log2);
      }
  hide(score, token, from, to);
  out.add(score, words, params, exponent);
}

// The sinks from `from` up to `to`, in 16 bit, one after the other: they are few.
__device__ __forceinline__ void attend_sinks(const Params& p, Attention& out, const uint16_t* q, int heads,
                                             size_t sequence, int from, int to, int lane) {
  const Cache& c = p.cache;
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int i = from; i < to; ++i) {
    const uint16_t* k = c.k_sink + (sequence * c.sinks + i) * kDim;
    const uint16_t* v = c.v_sink + (sequence * c.sinks + i) * kDim;
    float score[NT][2] = {};
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      float dot = 0.f;
#pragma unroll
      for (int d = 0; d < kPieces; ++d) dot = fmaf(E::one(q[head * kDim + lane + 32 * d]), E::one(k[lane + 32 * d]), dot);
#pragma unroll
      for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
      dot *= p.scale;
      if (SOFTCAP) dot = capped(dot, p.cap_log2);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (head == 8 * n + 2 * t + j) score[n][j] = dot;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      out.raise(n, score[n][0], score[n][1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float prob = exp2_fast(score[n][j] - (out.top[n][j] - kHeadroom)), part = prob * (1.f / kUnit);
        if (g == 0) out.total[n][j] += prob; // the other lanes hold the same
#pragma unroll
        for (int x = 0; x < kPieces; ++x)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            out.out[n][x][e / 2][e % 2 * 2 + j] = fmaf(part, E::one(v[32 * x + 4 * g + e]), out.out[n][x][e / 2][e % 2 * 2 + j]);
      }
    }
  }
}

// The warps' outputs -> shared memory, scaled to their common maximum: [warp, head, D]. Returns them.
__device__ __forceinline__ float* gather_warps(const Attention& out, Shared& shared, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  if (g == 0)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shared.top[warp][8 * n + 2 * t + i] = out.top[n][i], shared.total[warp][8 * n + 2 * t + i] = out.total[n][i];
  __syncthreads(); // also: all warps have left the ring
  float* all = reinterpret_cast<float*>(shared.ring);
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 8 * n + 2 * t + i;
      float top = shared.top[0][head];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.top[w][head]);
      const float f = exp2_fast(out.top[n][i] - top);
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
        *reinterpret_cast<float4*>(all + (warp * kHeads + head) * kDim + 32 * x + 4 * g) =
            make_float4(f * out.out[n][x][0][i], f * out.out[n][x][0][i + 2], f * out.out[n][x][1][i],
                        f * out.out[n][x][1][i + 2]);
    }
  __syncthreads();
  return all;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_CTAS) kv4_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Cache& c = p.cache;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x / p.head_tiles, head_tile = blockIdx.x % p.head_tiles, row = blockIdx.y, chunk = blockIdx.z;
  const int heads = min(p.group - head_tile * kHeads, kHeads);
  const size_t q_row = (size_t(row) * c.heads * p.group + head * p.group + head_tile * kHeads) * kDim;
  const uint16_t* q = p.q + q_row;
  // slot, length, page_table and complete pages are older than the previous kernel, which appends one token.
  const int s = p.slot[row], length = p.length[row];
  let_next_kernel_start();
  if (s < 0 || length <= 0) {
    if (chunk == 0)
      for (int i = threadIdx.x; i < heads * kDim; i += kThreads) p.out[q_row + i] = 0;
    return;
  }
  const int sinks = min(c.sinks, length), paged = length - sinks;
  const int own = paged > 0 ? (paged - 1) / kPage : 0; // the page of the newest token
  const int oldest = p.window > 0 ? max(length - p.window, 0) : 0;
  const int visible = max(oldest - c.sinks, 0); // the first paged token that is read
  const int low = visible / kPage, pages = own - low, first_chunk = p.chunk - kOpenPages;
  const int chunks = 1 + max(pages - first_chunk + p.chunk - 1, 0) / p.chunk;
  if (chunk >= chunks) return;
  const int begin = low + (chunk == 0 ? 0 : first_chunk + (chunk - 1) * p.chunk);
  const int end = min(low + first_chunk + chunk * p.chunk, own);
  const int* table = c.page_table + size_t(s) * c.table_width;
  const int first = begin + (chunk == 0 ? kWarps - 1 - warp : warp);
  Producer producer(c, table, shared_address(shared.ring[warp]), shared_address(shared.params[warp]), head, lane, first,
                    end);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) producer.step();
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < NT * 8 * kDim; i += kThreads) { // q -> PageQuery's order
    const int piece = i / 128, of = i / 4 % 32, g = of / 4, t = of % 4;
    const int hd = piece / (kDim / 16) * 8 + g, d = kDim / 4 * t + piece % (kDim / 16) * 4 + i % 4;
    shared.q[i] = hd < heads ? E::one(q[hd * kDim + d]) * p.scale : 0.f;
  }
  __syncthreads();
  Attention out;
  out.clear();
  attend_pages(p, out, producer, shared, first, end, visible, warp, lane);
  if (chunk == 0) {
    const size_t sequence = size_t(s) * c.heads + head;
    if (paged > 0) {
      const int count = paged - own * kPage, from = max(visible - own * kPage, 0);
      const size_t at = page_head(c, table[own], head);
      for (int tile = from / kTile + warp; tile * kTile < count; tile += kWarps)
        attend_open(p, out, q, heads, sequence, at, shared.ring[warp], tile, from, count, lane);
    }
    if (warp == kWarps - 1) attend_sinks(p, out, q, heads, sequence, min(oldest, sinks), sinks, lane);
  }
  out.finish();
  const float* all = gather_warps(out, shared, warp, lane);
  const size_t pair = size_t(row) * gridDim.x + blockIdx.x;
  float* mine = p.partial + (pair * gridDim.z + chunk) * kHeads * (kDim + 2);
  for (int i = threadIdx.x; i < heads * kDim; i += kThreads) {
    const int hd = i / kDim;
    float sum = 0.f, total = 0.f, top = shared.top[0][hd];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.top[w][hd]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += all[(w * kHeads + hd) * kDim + i % kDim];
      total = fmaf(shared.total[w][hd], exp2_fast(shared.top[w][hd] - top), total);
    }
    if (chunks == 1) {
      p.out[q_row + i] = E::from(sum / total);
    } else {
      mine[i] = sum;
      if (i % kDim == 0) mine[kHeads * kDim + 2 * hd] = top, mine[kHeads * kDim + 2 * hd + 1] = total;
    }
  }
  if (chunks == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicAdd(p.tickets + pair, 1) == chunks - 1;
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  if (threadIdx.x == 0) p.tickets[pair] = 0;
  const float* part = p.partial + pair * gridDim.z * kHeads * (kDim + 2);
  constexpr int kPart = kHeads * (kDim + 2);
  for (int i = threadIdx.x; i < heads * kDim; i += kThreads) {
    const float* ends = part + kHeads * kDim + 2 * (i / kDim);
    float top = kNoScore, sum = 0.f, total = 0.f;
#pragma unroll 4
    for (int z = 0; z < chunks; ++z) top = fmaxf(top, __ldcg(ends + z * kPart));
#pragma unroll 4
    for (int z = 0; z < chunks; ++z) {
      const float f = exp2_fast(__ldcg(ends + z * kPart) - top);
      sum = fmaf(f, __ldcg(part + z * kPart + i), sum);
      total = fmaf(f, __ldcg(ends + z * kPart + 1), total);
    }
    p.out[q_row + i] = E::from(sum / total);
  }
}
