// The KV4 cache as kernels see it: addresses of the tiled pages (kv4_layout.py).
//
// Definitions: ELEMENT (BFloat16, Float16), DIM (64, 96, 128, 256), PAGE (tokens; a multiple of 32).
#pragma once

#include "comet/kv4_ptx.cuh"

namespace comet {

constexpr int kDim = DIM, kPage = PAGE;
constexpr int kTile = 32;               // tokens that a warp reads at once
constexpr int kTiles = kPage / kTile;   // of a page
constexpr int kPieces = kDim / 32;      // 16-byte pieces of a lane and tile
constexpr int kTileBytes = kTile * kDim / 2;
constexpr int kPageBytes = kPage * kDim / 2; // of one head
constexpr float kHalfMax = 65504.f;
static_assert(kDim % 32 == 0 && kPage % kTile == 0, "a page is whole tiles");

struct Cache {
  uint8_t* k_codes;
  uint16_t *k_scale, *k_min; // f16 [P, H, D]
  uint8_t* v_codes;
  uint16_t *v_scale, *v_min; // f16 [P, H, T]
  uint16_t* k_open;          // [S, H, T, D]
  uint16_t *k_sink, *v_sink; // [S, H, sinks, D]
  const int* page_table;     // [S, table_width]
  int table_width, heads, sinks, unused;
};

using E = ELEMENT;

// Byte offset, inside a page of one head, of the word that holds channels 8 v .. 8 v + 7 of the key at `slot`.
__device__ __forceinline__ int key_word(int slot, int v) {
  const int t = v % 4, j = v / 4;
  const int lane = 4 * (slot % kTile / 4) + t, word = slot % 4 * kPieces + j;
  return slot / kTile * kTileBytes + word / 4 * 512 + lane * 16 + word % 4 * 4;
}
// Of the word that holds channel d of the eight values around `slot`, whose nibble is slot % 8.
__device__ __forceinline__ int value_word(int slot, int d) {
  const int t = slot % kTile / 8;
  return slot / kTile * kTileBytes + d / 32 * 512 + (4 * (d % 32 / 4) + t) * 16 + d % 4 * 4;
}
// Which of all heads of all pages (or sequences) this one is.
__device__ __forceinline__ int page_head(const Cache& c, int page, int head) { return page * c.heads + head; }

} // namespace comet
