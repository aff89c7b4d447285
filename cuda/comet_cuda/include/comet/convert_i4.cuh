// Packed 4-bit codes -> 8-bit tensor-core operands, without a table: three instructions for eight values.
//
// A word holds eight codes of 0..15. Masking gives the low nibbles, shifting and masking the high nibbles, each
// zero-extended to a byte. That byte is the code itself as u8, and code * 2^-9 as e4m3 (0x00..0x07 are subnormals,
// 0x08..0x0F the first binade: the spacing is 2^-9 in both), so the same registers feed both kinds of wgmma. The layout
// (weight_layout.py) puts row g into the low nibbles and row g + 8 into the high ones: one word makes two A registers.
#pragma once

namespace comet {

__device__ __forceinline__ void expand_nibbles(unsigned word, unsigned& low, unsigned& high) {
    low = word & 0x0f0f0f0fu;
    high = (word >> 4) & 0x0f0f0f0fu;
}

// Two 16-byte chunks of a thread -> the A fragments of four k32 steps (4 registers each).
__device__ __forceinline__ void expand_fragment(const uint4& first, const uint4& second, unsigned (&a)[4][4]) {
    expand_nibbles(first.x, a[0][0], a[0][1]);
    expand_nibbles(first.y, a[0][2], a[0][3]);
    expand_nibbles(first.z, a[1][0], a[1][1]);
    expand_nibbles(first.w, a[1][2], a[1][3]);
    expand_nibbles(second.x, a[2][0], a[2][1]);
    expand_nibbles(second.y, a[2][2], a[2][3]);
    expand_nibbles(second.z, a[3][0], a[3][1]);
    expand_nibbles(second.w, a[3][2], a[3][3]);
}

}  // namespace comet
