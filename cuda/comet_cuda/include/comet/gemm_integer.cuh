// The sm_90a GEMM for integer scales: its sizes, all known at compile time, and its parameter.
//
// Compile-time: TOKENS (n of wgmma), TOKEN_TILES (of TOKENS, a warpgroup), ROW_WGS (consumer warpgroups, 64 rows each),
// BATCH (INT4 blocks between two waits), QUICK (0 or 1: see Shares), STAGES, CONSUMER_REGS, PRODUCER_REGS and OUT (0
// bf16, 1 fp16, 2 f32); ONE_BY_ONE if nibbles are not expanded four at once; SPLIT, if it is not 1: ctas of a cluster,
// which share a tile along K.
#pragma once

#include "comet/tile_schedule.cuh"

namespace comet {

constexpr int kAtoms = TOKENS / 8;
constexpr int kResults = TOKENS / 2;  // sums of a thread and product
constexpr int kSets = TOKEN_TILES;
constexpr int kTileTokens = TOKENS * TOKEN_TILES;
constexpr int kTileAtoms = kTileTokens / 8;
constexpr int kNibbleBytes = 4096;
constexpr int kRecord = 4224;  // weight_layout.record_bytes(False)
constexpr int kCodesBytes = kTileTokens * 128;
constexpr int kMultipleBytes = kTileTokens * 4;
constexpr int kRecordsAt = kCodesBytes + kMultipleBytes;
constexpr int kStageBytes = (kRecordsAt + ROW_WGS * kRecord + 1023) / 1024 * 1024;
constexpr int kThreads = 128 * (ROW_WGS + 1);
constexpr unsigned kFullAt = kStageBytes * STAGES, kEmptyAt = kFullAt + 8 * STAGES;
constexpr int kGroupBarrier = 1;  // named barriers: one a consumer warpgroup,
constexpr int kGivenBarrier = kGroupBarrier + ROW_WGS;  // and one more for the warp that announces its partial sums
constexpr unsigned kRingEnd = kEmptyAt + 8 * STAGES;
static_assert(kRingEnd + 1024 <= 232448, "stages fit in shared memory");

// The kernel's one parameter (packed by w4ax_gemm_integer.py); stays in constant memory.
struct Operands {
    const unsigned char* weight;     // [row tiles, blocks, kRecord]
    const float* base;               // [row tiles * 64]: what a row's multiples are multiples of
    const unsigned char* codes;      // [blocks, atoms, 1024]
    const unsigned char* multiples;  // [INT8 blocks, atoms, 8] words: bits 0-7 e, bits 8-15 e less the next one
    const float* token_scale;        // [atoms * 8]
    const float* bias;               // [rows] or null
    void* out;                       // [tokens, rows]
    unsigned* partials;              // [ctas, warpgroup, kSets * kResults, 128]
    unsigned* flags;                 // [ctas, warpgroup]
    int tokens, rows, atoms, row_tiles;
    Schedule schedule;
    int int8_blocks;                 // the first ones
};

}  // namespace comet
