// Integer mma.sync: D[16 x 8] = A[16 x k] * B[k x 8] + C, A unsigned 4-bit codes of weights, B signed activations.
//
// Fragments, for lane = 4 * g + t: A registers 0 and 2 are row g, 1 and 3 row g + 8; B is column g; the accumulators are
// (row g, columns 2t and 2t + 1), then (row g + 8, the same). Which k lies where does not matter as long as A and B
// agree, because the sum over k is exact; weight_layout_sm80.py chooses it so that loads are 16 bytes wide.
#pragma once

typedef unsigned int uint32_t;

namespace comet {

// An accumulator that starts at these bits, read as a float, is 1.5 * 2^23 + sum, exactly, for |sum| < 2^22: the
// conversion from int32 to float costs one subtraction (|sum| <= 127 * 15 * 128 = 243,840 here).
constexpr int kFloatBits = 0x4B400000;
constexpr float kFloatOffset = 12582912.f;

// k = 64, 4-bit: native on sm_80, sm_86, sm_89; emulated (slowly, exactly) on later GPUs.
__device__ __forceinline__ void mma_m16n8k64_u4_s4(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// k = 32, 8-bit: native from sm_80 on.
__device__ __forceinline__ void mma_m16n8k32_u8_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Zero extension of eight interleaved nibbles: bits (0 4 1 5 2 6 3 7) -> bytes 0..3 and bytes 4..7. Three instructions
// for eight values (mask; shift; mask), no table and no sign handling, because codes are unsigned.
__device__ __forceinline__ void widen_nibbles(uint32_t nibbles, uint32_t& low, uint32_t& high) {
  low = nibbles & 0x0F0F0F0Fu;
  high = (nibbles >> 4) & 0x0F0F0F0Fu;
}

} // namespace comet
