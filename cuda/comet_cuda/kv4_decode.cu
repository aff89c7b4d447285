// kv4_decode: attention of one new token per sequence over the paged 4-bit cache, split over the context.
//
// A cta takes one chunk of pages of one sequence and kv head, for up to 8 * NT of its q heads. Each of its four warps
// walks every fourth page alone, with its own ring of tiles in shared memory that it fills by cp.async; a lane reads
// what it copied, so there is no barrier. Chunk 0 also takes the open page and the sinks, in 16 bit. The four warps
// are added in shared memory; if a sequence has several chunks, each leaves (maximum, sum, output) in `partial`, and the
// last one to arrive, by an integer ticket, adds all in ascending order: the same bits every time.
//
// Definitions: those of kv4_attention.cuh, MIN_CTAS a multiprocessor.
#include "comet/kv4_attention.cuh"

using namespace comet;

constexpr int kWarps = 4, kThreads = 32 * kWarps, kHeads = 8 * NT;
constexpr int kBatch = 8;                       // partial outputs that a thread loads at once
constexpr int kOpenPages = 2;                   // pages of a chunk that the open page stands for
static_assert(STAGES >= NT, "the ring holds the four warps' outputs");

struct Params {
  Cache cache;
  const uint16_t* q; // [N, Hq, D]
  uint16_t* out;     // [N, Hq, D]
  float* partial;    // [N * gridDim.x, chunks, kHeads * (D + 4)]: outputs [kHeads, D], then [kHeads, 4] of which two are used
  int* tickets;      // [N * gridDim.x], zero before and after
  const int *slot, *length;
  int group, head_tiles, chunk, window; // q heads of a kv head; tiles of kHeads of them; pages a chunk
  float scale, cap_log2;                // q . k -> log2 units, or -> score over softcap
};

// Which part of a sequence is read, and which of it by one chunk.
struct Span {
  int sinks, paged;     // tokens
  int own;              // page of the newest token
  int oldest, visible;  // first token that is read, of all and of the paged ones
  int begin, end;       // pages of this chunk
  int chunks;           // of the sequence
  int heads;            // q heads of this cta
  long long q_row;      // element where they begin
  __device__ __forceinline__ Span() {}
  __device__ __forceinline__ Span(const Params& p, int length, int chunk) {
    sinks = min(p.cache.sinks, length), paged = length - sinks;
    own = paged > 0 ? (paged - 1) / kPage : 0;
    oldest = p.window > 0 ? max(length - p.window, 0) : 0;
    visible = max(oldest - p.cache.sinks, 0);
    const int low = visible / kPage, first = p.chunk - kOpenPages; // pages of chunk 0
    chunks = 1 + max(own - low - first + p.chunk - 1, 0) / p.chunk;
    begin = low + (chunk == 0 ? 0 : first + (chunk - 1) * p.chunk);
    end = min(low + first + chunk * p.chunk, own);
  }
};

struct Shared {
  char ring[kWarps][kRingBytes];
  char params[kWarps][2][kParamBytes];
  uint4 q[NT * kPieces * 32]; // InShared's order
  float top[kWarps][kHeads], total[kWarps][kHeads];
  Span span;
  int is_last;
};

__device__ __forceinline__ void hide(float (&score)[2][NT][4], int token, int from, int to) { // but [from, to)
#pragma unroll
  for (int a = 0; a < 4; ++a)
    if (token + a < from || token + a >= to)
#pragma unroll
      for (int n = 0; n < NT; ++n) score[a / 2][n][a % 2 * 2] = score[a / 2][n][a % 2 * 2 + 1] = kHidden;
}

// Pages first, first + 4, ... before end, in 4 bit; tokens before `visible` (of the paged ones) are hidden.
__device__ __forceinline__ void attend_pages(const Params& p, Attention& out, Producer<kWarps>& producer,
                                             const Shared& shared, const InShared& q, int first, int end, int visible,
                                             int warp, int lane) {
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int index = first; index < end; index += kWarps, parity ^= 1) {
    const char* params = shared.params[warp][parity];
    PageQuery<InRegisters> query;
    float exponent = 0.f;
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();
      producer.step();
      const char* values = params + 4 * kDim;
      if (tile == 0) {
        query.set(q, params, params + 2 * kDim, p.scale, lane);
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
      query.scores(words, score, p.scale, p.cap_log2);
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
__device__ __forceinline__ void attend_open(const Params& p, Attention& out, const InShared& q, int sequence, int at,
                                            char* ring, int tile, int from, int to, int lane) {
  const Cache& c = p.cache;
  const int g = lane / 4, t = lane % 4, token = tile * kTile + 4 * g;
  const uint16_t* k = c.k_open + (size_t(sequence) * kPage + token) * kDim + 8 * t;
  const uint32_t to_shared = shared_address(ring) + lane * 16;
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int y = 0; y < kPieces; ++y) copy_async_16(to_shared + (a * kPieces + y) * 512, k + a * kDim + 32 * y, true);
  commit_copies();
  uint32_t words[kWords];
  load_value_words(c, at, tile, lane, words);
  ValueParams params;
  const float exponent = load_value_params(c, at, token, from, to, params);
  float score[2][NT][4];
  wait_for_copies<0>();
  scores_16(
      q, [&](int a, int j) { return *reinterpret_cast<const uint4*>(ring + (a * kPieces + j) * 512 + lane * 16); }, score,
      p.scale, p.cap_log2);
  hide(score, token, from, to);
  out.add(score, words, params, exponent);
}

__device__ __forceinline__ void add_scaled(float4& sum, float f, float4 x) {
  sum.x = fmaf(f, x.x, sum.x), sum.y = fmaf(f, x.y, sum.y), sum.z = fmaf(f, x.z, sum.z), sum.w = fmaf(f, x.w, sum.w);
}
__device__ __forceinline__ void store_four(uint16_t* to, float4 sum, float total) {
  *reinterpret_cast<uint2*>(to) = make_uint2(E::pair(sum.x / total, sum.y / total), E::pair(sum.z / total, sum.w / total));
}

// The warps' outputs -> shared memory, scaled to their common maximum: [warp, head, D]. Returns them.
__device__ __forceinline__ const float4* gather_warps(const Attention& out, Shared& shared, int warp, int lane) {
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
  return reinterpret_cast<const float4*>(all);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_CTAS) kv4_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Cache& c = p.cache;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.x / p.head_tiles, head_tile = blockIdx.x % p.head_tiles, row = blockIdx.y, chunk = blockIdx.z;
  const int heads = min(p.group - head_tile * kHeads, kHeads);
  const long long q_row = (size_t(row) * c.heads * p.group + head * p.group + head_tile * kHeads) * kDim;
  const uint16_t* q = p.q + q_row;
  // slot, length, page_table and complete pages are older than the previous kernel, which appends one token.
  const int s = p.slot[row], length = p.length[row];
  let_next_kernel_start();
  if (s < 0 || length <= 0) {
    if (chunk == 0)
      for (int i = threadIdx.x; i < heads * kDim; i += kThreads) p.out[q_row + i] = 0;
    return;
  }
  const Span span(p, length, chunk);
  if (chunk >= span.chunks) return;
  if (threadIdx.x == 0) {
    shared.span = span;
    shared.span.heads = heads, shared.span.q_row = q_row;
  }
  const int* table = c.page_table + size_t(s) * c.table_width;
  const int first = span.begin + (chunk == 0 ? kWarps - 1 - warp : warp);
  Producer<kWarps> producer(c, table, shared_address(shared.ring[warp]), shared_address(shared.params[warp]), head, lane, first,
                    span.end);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) producer.step();
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < NT * kPieces * 32; i += kThreads) {
    const int hd = i / (kPieces * 32) * 8 + i % 32 / 4, d = i / 32 % kPieces * 32 + i % 4 * 8;
    shared.q[i] = hd < heads ? *reinterpret_cast<const uint4*>(q + hd * kDim + d) : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  Attention out;
  out.clear();
  const InShared lane_q{shared.q + lane};
  attend_pages(p, out, producer, shared, lane_q, first, span.end, span.visible, warp, lane);
  if (chunk == 0) {
    const Span again = shared.span; // registers are short in the loop over pages
    const int s = p.slot[row], sequence = page_head(c, s, head);
    if (again.paged > 0) {
      const int count = again.paged - again.own * kPage, from = max(again.visible - again.own * kPage, 0);
      const int at = page_head(c, c.page_table[size_t(s) * c.table_width + again.own], head);
      for (int tile = from / kTile + warp; tile * kTile < count; tile += kWarps)
        attend_open(p, out, lane_q, sequence, at, shared.ring[warp], tile, from, count, lane);
    }
    const uint16_t *k_sink = c.k_sink + size_t(sequence) * c.sinks * kDim, *v_sink = c.v_sink + size_t(sequence) * c.sinks * kDim;
    for (int base = (kWarps - 1 - warp) * kTile; base < again.sinks; base += kWarps * kTile)
      attend_sinks(
          out, lane_q, k_sink, v_sink, base, again.sinks, [&](int token, int, int) { return token < again.oldest; },
          p.scale, p.cap_log2, lane);
  }
  out.finish();
  const float4* all = gather_warps(out, shared, warp, lane);
  const int chunks = shared.span.chunks, all_heads = shared.span.heads;
  uint16_t* to = p.out + shared.span.q_row;
  const size_t pair = size_t(row) * gridDim.x + blockIdx.x;
  constexpr int kPart = kHeads * (kDim + 4); // floats of one cta: output, then maximum and sum
  float* part = p.partial + pair * gridDim.z * kPart;
  for (int i = threadIdx.x; i < all_heads * kDim / 4; i += kThreads) {
    const int hd = 4 * i / kDim;
    float total = 0.f, top = shared.top[0][hd];
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.top[w][hd]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      add_scaled(sum, 1.f, all[w * kHeads * kDim / 4 + i]);
      total = fmaf(shared.total[w][hd], exp2_fast(shared.top[w][hd] - top), total);
    }
    if (chunks == 1) {
      store_four(to + 4 * i, sum, total);
    } else {
      float* mine = part + chunk * kPart;
      reinterpret_cast<float4*>(mine)[i] = sum;
      if (4 * i % kDim == 0) *reinterpret_cast<float2*>(mine + kHeads * kDim + 4 * hd) = make_float2(top, total);
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
  for (int i = threadIdx.x; i < all_heads * kDim / 4; i += kThreads) {
    const float* ends = part + kHeads * kDim + 4 * (4 * i / kDim);
    float top = kNoScore, total = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int from = 0; from < chunks; from += kBatch) {
      float2 end[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int z = 0; z < kBatch; ++z) {
        const int at = min(from + z, chunks - 1) * kPart;
        end[z] = __ldcg(reinterpret_cast<const float2*>(ends + at));
        values[z] = __ldcg(reinterpret_cast<const float4*>(part + at) + i);
        if (from + z >= chunks) end[z] = make_float2(kHidden, 0.f);
      }
      float higher = top;
#pragma unroll
      for (int z = 0; z < kBatch; ++z) higher = fmaxf(higher, end[z].x);
      const float f = exp2_fast(top - higher);
      top = higher;
      total *= f, sum.x *= f, sum.y *= f, sum.z *= f, sum.w *= f;
#pragma unroll
      for (int z = 0; z < kBatch; ++z) {
        const float g = exp2_fast(end[z].x - top);
        add_scaled(sum, g, values[z]);
        total = fmaf(g, end[z].y, total);
      }
    }
    store_four(to + 4 * i, sum, total);
  }
}
