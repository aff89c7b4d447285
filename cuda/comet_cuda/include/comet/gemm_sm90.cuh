// The sm_90a GEMM's sizes, all known at compile time (see w4ax_gemm_sm90.cu for the definitions), and its parameter.
#pragma once

#include "comet/tile_schedule.cuh"

namespace comet {

constexpr int kAtoms = TOKENS / 8;
constexpr int kResults = TOKENS / 2;  // f32 a thread and product
constexpr int kNibbleBytes = 4096;
constexpr int kRecord = ZERO ? 4288 : 4224;  // weight_layout.record_bytes
constexpr int kCodesBytes = TOKENS * 128;
constexpr int kMetaBytes = TOKENS * 8;
constexpr int kRecords = ROW_WGS * ROW_TILES;  // row tiles of a cta
constexpr int kStageBytes = (kCodesBytes + kMetaBytes + kRecords * kRecord + 1023) / 1024 * 1024;
constexpr int kThreads = 128 * (ROW_WGS + 1);
constexpr int kAtomShare = (kAtoms + CLUSTER - 1) / CLUSTER;  // atoms that one cta of a cluster loads
constexpr bool kCluster = CLUSTER > 1;
constexpr int kTermBlocks = 32;                              // blocks of one zero-point product
constexpr int kTermBytes = ZERO_PRODUCT ? TOKENS * 128 : 0;  // its activations: 32 high and 32 low halves a token
constexpr int kTermBuffers = 2;
constexpr int kRingBytes = kStageBytes * STAGES + kTermBuffers * kTermBytes;
constexpr float kE4m3Unit = 1.0f / 512;  // a zero-extended nibble read as e4m3 is code * 2^-9
constexpr int kMaskWords = 16;           // up to 512 blocks
constexpr int kGroupBarrier = 1;         // named barriers: one a consumer warpgroup
static_assert(kRecord % 16 == 0, "bulk copies move multiples of 16 bytes");
static_assert(kRingBytes + 1024 + 16 * (STAGES + kTermBuffers) <= 232448, "stages fit in shared memory");

// The kernel's one parameter (packed by `launch` in w4ax_gemm_sm90.py); stays in constant memory.
struct Operands {
    const unsigned char* weight;  // [row tiles, blocks, kRecord]
    const uint4* zero_terms;      // [row tiles, ceil(blocks / 32), 4, 128]: high, low, high, low halves of -z * sw
    const unsigned char* codes;   // [blocks, atoms, 1024]
    const unsigned char* meta;    // [blocks, atoms, 64]
    const float* bias;            // [rows] or null
    void* out;                    // [tokens, rows]
    float4* partials;             // [clusters, cta, warpgroup, kResults * ROW_TILES / 4, 128]
    unsigned* flags;              // [clusters, cta, warpgroup]
    int tokens, rows, atoms, row_tiles;
    Schedule schedule;
    unsigned int8_mask[kMaskWords];  // bit b: block b holds INT8 activations
};

}  // namespace comet
