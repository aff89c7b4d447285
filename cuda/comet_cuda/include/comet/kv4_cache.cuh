// The KV4 cache as kernels see it: element types, addresses of the tiled pages (kv4_layout.py), small PTX helpers.
//
// Definitions: ELEMENT (BFloat16, Float16), DIM (64, 96, 128, 256), PAGE (tokens; a multiple of 32).
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

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

__device__ __forceinline__ float half_to_float(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16_t(bits)));
  return x;
}
__device__ __forceinline__ uint32_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
// Two floats -> a pair of f16, `low` in the low half.
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct BFloat16 {
  __device__ static __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
  __device__ static __forceinline__ float one(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
  __device__ static __forceinline__ uint32_t pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  __device__ static __forceinline__ uint16_t from(float x) {
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
  }
  __device__ static __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  // D[16 x 8] += A[16 x 16] * B[16 x 8], A row-major, B column-major, fragments as mma.sync's.
  __device__ static __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
struct Float16 {
  __device__ static __forceinline__ float low(uint32_t pair) { return half_to_float(pair & 0xFFFFu); }
  __device__ static __forceinline__ float high(uint32_t pair) { return half_to_float(pair >> 16); }
  __device__ static __forceinline__ float one(uint16_t x) { return half_to_float(x); }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return half_pair(low, high); }
  __device__ static __forceinline__ uint16_t from(float x) { return uint16_t(float_to_half(x)); }
  __device__ static __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("min.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
  }
  __device__ static __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
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

// Transposes an 8 x 8 matrix of 16-bit elements held by a warp (row lane / 4, columns 2 (lane % 4) and the next).
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Programmatic dependent launch (sm_90 and later; nothing before).
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

} // namespace comet
