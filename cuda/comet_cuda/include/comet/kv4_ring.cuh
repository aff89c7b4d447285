// A warp's ring of 4-bit tiles in shared memory, filled by cp.async: a lane reads the codes that it copied itself, so no
// barrier stands between; a page's scales and minima are read by other lanes, after __syncwarp.
//
// Definitions: those of kv4_cache.cuh, STAGES of the ring.
#pragma once

#include "comet/async_copy.cuh"
#include "comet/kv4_cache.cuh"

namespace comet {

constexpr int kWords = 4 * kPieces; // of codes, of a lane and tile
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kRingBytes = STAGES * kStageBytes;
constexpr int kParamBytes = 4 * (kDim + kPage); // scale and minimum of keys and values of a page
static_assert(STAGES >= 2 && STAGES - 1 <= kTiles, "two parameter buffers are enough");

// Fills a warp's ring, tile after tile of every `stride`th page.
template <int kStride> struct Producer {
  const Cache& c;
  const int* table;
  uint32_t ring, params; // addresses in shared memory
  int head, lane, index, end, tile = 0, parity = 0, stage = 0, page = 0, next = 0;

  __device__ __forceinline__ Producer(const Cache& c, const int* table, uint32_t ring, uint32_t params, int head, int lane,
                                      int first, int end)
      : c(c), table(table), ring(ring), params(params), head(head), lane(lane), index(first), end(end) {
    if (index < end) page = table[index];
    if (index + kStride < end) next = table[index + kStride];
  }
  __device__ __forceinline__ void copy_params(int at) {
    const char* from[4] = {reinterpret_cast<const char*>(c.k_scale + size_t(at) * kDim),
                           reinterpret_cast<const char*>(c.k_min + size_t(at) * kDim),
                           reinterpret_cast<const char*>(c.v_scale + size_t(at) * kPage),
                           reinterpret_cast<const char*>(c.v_min + size_t(at) * kPage)};
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
      const int at = page_head(c, page, head);
      if (tile == 0) copy_params(at);
      const uint32_t to = ring + stage * kStageBytes + lane * 16;
      const uint8_t* k = c.k_codes + size_t(at) * kPageBytes + tile * kTileBytes + lane * 16;
      const uint8_t* v = c.v_codes + size_t(at) * kPageBytes + tile * kTileBytes + lane * 16;
#pragma unroll
      for (int x = 0; x < kPieces; ++x) copy_async_16(to + x * 512, k + x * 512, true);
#pragma unroll
      for (int x = 0; x < kPieces; ++x) copy_async_16(to + kTileBytes + x * 512, v + x * 512, true);
      if (++tile == kTiles) {
        tile = 0, parity ^= 1, index += kStride, page = next;
        if (index + kStride < end) next = table[index + kStride];
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

} // namespace comet
