// kv4_prefill: attention of a chunk of new tokens over the 4-bit cache, in which they already stand.
//
// A warp takes 8 * NT rows of one sequence, page and kv head; a row is one query with one of the kv head's q heads. It
// walks alone, as in kv4_decode: the pages before its own in 4 bit through its ring in shared memory, then its own page
// with 16-bit keys (the chunk's, or the open page's where an earlier call brought them) and 4-bit values, then the
// sinks. Later pages see more keys, so they come first.
//
// Definitions: those of kv4_attention.cuh, WARPS a cta, MIN_CTAS a multiprocessor.
#include "comet/kv4_attention.cuh"

using namespace comet;

constexpr int kWarps = WARPS, kThreads = 32 * kWarps, kRowsOfWarp = 8 * NT;
constexpr int kLanesOperand = NT * kPieces * 32; // uint4

struct Params {
  Cache cache;
  const uint16_t *q, *k; // [N, Hq, D], [N, H, D]; rows q_pitch, k_pitch elements apart
  uint16_t* out;         // [N, Hq, D]
  const int *starts, *slot, *position;
  long long q_pitch, k_pitch;
  int group, tiles, window, unused; // q heads of a kv head; tiles of rows of a page
  float scale, cap_log2;
};

// What a warp does; kept in shared memory, as registers are short in the loop over pages.
struct Work {
  int begin, old; // the sequence's first row, and its position
  int slot;
  int index, base;  // the warp's page (-1: the sinks), position of its first token
  int first, last;  // positions of the warp's queries
  int first_row;    // of the page
};

struct Shared {
  char ring[kWarps][kRingBytes];
  char params[kWarps][2][kParamBytes];
  uint4 q[kWarps][kLanesOperand];
  uint4 factor[kWarps][kLanesOperand];
  Work work[kWarps];
  int position[kWarps][kRowsOfWarp]; // of each row's query; -1: there is no such row
};

template <typename Hidden>
__device__ __forceinline__ void hide(float (&score)[2][NT][4], const Hidden& hidden) {
#pragma unroll
  for (int a = 0; a < 4; ++a)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (hidden(a, n, i)) score[a / 2][n][a % 2 * 2 + i] = kHidden;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_CTAS) kv4_prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Cache& c = p.cache;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, r = blockIdx.z, s = p.slot[r];
  wait_for_previous_kernel();
  if (s < 0) return;
  const int begin = p.starts[r], count = p.starts[r + 1] - begin, old = p.position[r], length = old + count;
  // Its own page: -1 are the sinks. Row of the page -> query and q head.
  const int work = (gridDim.x - 1 - blockIdx.x) * kWarps + warp;
  const int index = (old < c.sinks ? -1 : (old - c.sinks) / kPage) + work / p.tiles;
  const int base = index < 0 ? 0 : c.sinks + index * kPage; // position of the page's first token
  const int page_end = min(index < 0 ? c.sinks : base + kPage, length);
  const int first_row = work % p.tiles * kRowsOfWarp;
  const int first = max(base + first_row / p.group, old); // positions of the warp's queries
  const int last = min(base + (first_row + kRowsOfWarp - 1) / p.group, page_end - 1);
  if (first > last) return;
  const int* position = shared.position[warp] + 2 * t;
  if (lane < kRowsOfWarp) {
    const int at = base + (first_row + lane) / p.group;
    shared.position[warp][lane] = at >= old && at < page_end ? at : -1;
  }
  if (lane == 0) shared.work[warp] = {begin, old, s, index, base, first, last, first_row};
  __syncwarp();
  const int before = p.window > 0 ? p.window : 0x3FFFFFFF; // a query reads keys from its position - before + 1 on
  const InShared q{shared.q[warp] + lane};
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int row = first_row + 8 * n + g, at = base + row / p.group;
    const bool exists = at >= old && at < page_end;
    const uint16_t* from =
        p.q + (exists ? begin + at - old : 0) * p.q_pitch + (head * p.group + row % p.group) * kDim + 8 * t;
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      q(n, j) = exists ? *reinterpret_cast<const uint4*>(from + 32 * j) : make_uint4(0, 0, 0, 0);
  }
  const int* table = c.page_table + size_t(s) * c.table_width;
  Attention out;
  out.clear();
  {
    const int low = max(first - before + 1 - c.sinks, 0) / kPage;
    Producer<1> producer(c, table, shared_address(shared.ring[warp]), shared_address(shared.params[warp]), head, lane, low,
                         index);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) producer.step();
    PageQuery<InShared> query;
    query.factor.at = shared.factor[warp] + lane;
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int page = low; page < index; ++page, parity ^= 1) {
      const char* params = shared.params[warp][parity];
      const char* values = params + 4 * kDim;
      float exponent = 0.f;
#pragma unroll 1
      for (int tile = 0; tile < kTiles; ++tile) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        producer.step();
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
        const int slot = tile * kTile + 4 * g, token = c.sinks + page * kPage + slot;
        if (token - 4 * g <= last - before)
          hide(score, [&](int a, int n, int i) { return token + a <= position[8 * n + i] - before; });
        ValueParams v;
        v.set(*reinterpret_cast<const uint2*>(values + slot * 2),
              *reinterpret_cast<const uint2*>(values + 2 * kPage + slot * 2));
        load_words(ring + kTileBytes, lane, words);
        out.add(score, words, v, exponent);
      }
    }
  }
  const Work w = shared.work[warp];
  const int sequence = page_head(c, w.slot, head);
  const auto unread = [&](int token, int n, int i) {
    const int own = position[8 * n + i];
    return token > own || token <= own - before;
  };
  if (w.index >= 0) {
    const int at = page_head(c, c.page_table[size_t(w.slot) * c.table_width + w.index], head);
    const uint16_t* open = c.k_open + size_t(sequence) * kPage * kDim + 8 * t;
    const uint16_t* chunk = p.k + (w.begin - w.old) * p.k_pitch + head * kDim + 8 * t;
    const int oldest = max(w.first - before + 1 - w.base, 0);
#pragma unroll 1
    for (int tile = oldest / kTile; w.base + tile * kTile <= w.last; ++tile) {
      const int slot = tile * kTile + 4 * g;
      uint32_t words[kWords];
      float score[2][NT][4];
      scores_16(
          q,
          [&](int a, int j) {
            const int token = min(w.base + slot + a, w.last);
            const uint16_t* k = token < w.old ? open + (token - w.base) * kDim : chunk + token * p.k_pitch;
            return *reinterpret_cast<const uint4*>(k + 32 * j);
          },
          score, p.scale, p.cap_log2);
      hide(score, [&](int a, int n, int i) { return unread(w.base + slot + a, n, i); });
      load_value_words(c, at, tile, lane, words);
      ValueParams v;
      const float exponent = load_value_params(c, at, slot, 0, w.last + 1 - w.base, v);
      out.add(score, words, v, exponent);
    }
  }
  const uint16_t *k_sink = c.k_sink + size_t(sequence) * c.sinks * kDim, *v_sink = c.v_sink + size_t(sequence) * c.sinks * kDim;
  const int sinks = min(c.sinks, w.last + 1);
  for (int from = 0; from < sinks; from += kTile)
    attend_sinks(out, q, k_sink, v_sink, from, sinks, unread, p.scale, p.cap_log2, lane);
  out.finish();
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position[8 * n + i] < 0) continue;
      const int row = w.first_row + 8 * n + 2 * t + i, token = w.begin + position[8 * n + i] - w.old;
      uint16_t* to = p.out + ((size_t(token) * c.heads + head) * p.group + row % p.group) * kDim + 4 * g;
      const float inverse = __fdividef(1.f, out.total[n][i]);
#pragma unroll
      for (int x = 0; x < kPieces; ++x)
        *reinterpret_cast<uint2*>(to + 32 * x) =
            make_uint2(E::pair(out.out[n][x][0][i] * inverse, out.out[n][x][0][i + 2] * inverse),
                       E::pair(out.out[n][x][1][i] * inverse, out.out[n][x][1][i + 2] * inverse));
    }
}
