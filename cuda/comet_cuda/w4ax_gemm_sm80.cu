// w4ax_gemm for GPUs whose mma.sync multiplies INT4 natively (sm_80, sm_86, sm_89); with PORTABLE=1, every block as INT8.
//
// Y^T = W X^T: weights are the A operand (16 rows), activations the B operand (8 tokens). A cta computes 128 rows times
// TOKENS tokens, block by block of 128 channels. STAGES blocks are in flight by cp.async; a block's INT4 product is two
// m16n8k64 steps, its INT8 product four m16n8k32 steps on zero-extended nibbles. The exact integer sum of each block is
// promoted to float32 with scales and zero points (mma_sync.cuh says how without a conversion instruction).
// Work comes as segments (w4ax_gemm_sm80.py): a cta walks its own list, each a range of blocks of one tile, dealt so that
// all ctas carry equal cost. A segment that is not a whole tile leaves its float32 sums in the workspace, and
// `reduce_parts` adds them in ascending order of K: the result does not depend on which cta was faster.
// Layouts of the operands: weight_layout_sm80.py.
//
// Definitions: TOKENS (8, 16, 32, 64, 128), STAGES, ZERO (1: records hold zero points; 0: symmetric, all are 8),
// OUT (0 bf16, 1 f16, 2 f32), PORTABLE (0, 1), MIN_CTAS a multiprocessor.
#include "comet/async_copy.cuh"
#include "comet/mma_sync.cuh"

using namespace comet;

constexpr int kThreads = 256, kWarps = 8;
constexpr int kRows = 128; // weight rows of a tile
constexpr int kWarpsN = TOKENS <= 16 ? 8 : 4, kWarpsM = kWarps / kWarpsN;
constexpr int kRowTiles = kRows / 16 / kWarpsN;     // m16 tiles of a warp
constexpr int kTokenTiles = TOKENS / 8 / kWarpsM;   // n8 tiles of a warp
constexpr int kNibbleBytes = kRows * 64;            // of a record
constexpr int kScaleBytes = kRows * 2;
constexpr int kRecordBytes = kNibbleBytes + kScaleBytes + (ZERO ? kRows : 0);
constexpr int kCodesAt = kRecordBytes;              // in a stage
constexpr int kMetaAt = kCodesAt + TOKENS * 128;
constexpr int kStageBytes = kMetaAt + TOKENS * 8;
static_assert(kRecordBytes % 16 == 0 && kStageBytes % 16 == 0, "16-byte copies");
static_assert(kTokenTiles >= 1, "every warp has tokens");

struct Segment { // of one cta's work
  int row_tile, token_tile, first_block, end_block;
  int slot; // in the workspace, or -1: the whole tile, written to y
};

struct Params {
  const uint8_t* codes;   // [NB, M, 128]
  const float* meta;      // [NB, M, 2]: scale, sum
  const uint8_t* records; // [R, NB, kRecordBytes]
  const uint8_t* bits;    // [NB]
  const int* starts;      // [ctas + 1]: a cta's first segment
  const Segment* segments;
  float* parts;           // [slots, kRows * TOKENS] in the order of the threads' registers
  const float* bias;      // [N] or null
  void* y;                // [M, N]
  int M, N, NB;
};

// Eight lanes that read 16 bytes each must meet all 32 banks: INT8 rows of 128 bytes put chunk 2t + h at h * 4 + t, the
// halves swapped in odd tokens; INT4 rows of 64 bytes need no swizzle. (tests compute this.)
__device__ __forceinline__ int int8_offset(int token, int chunk) {
  return token * 128 + ((((chunk & 1) * 4) + (chunk >> 1)) ^ ((token & 1) * 4)) * 16;
}
__device__ __forceinline__ bool is_int8(const Params& p, int block) { return PORTABLE || p.bits[block] == 8; }

// Calls copy(i) for i in 0 .. count - 1, dealt to the threads of the cta, without a loop at run time.
template <int kCount, typename Copy> __device__ __forceinline__ void deal(const Copy& copy) {
#pragma unroll
  for (int first = 0; first < kCount; first += kThreads) {
    const int i = first + threadIdx.x;
    if (first + kThreads <= kCount || i < kCount) copy(i);
  }
}

// Start the copies of one block of one tile into one stage.
__device__ __forceinline__ void load_stage(const Params& p, uint32_t stage, int row_tile, int token0, int block) {
  const uint8_t* record = p.records + (size_t(row_tile) * p.NB + block) * kRecordBytes;
  deal<kRecordBytes / 16>([&](int i) { copy_async_16(stage + 16 * i, record + 16 * i, true); });
  const int tokens = p.M - token0; // that exist; the rest are zeros
  const uint8_t* codes = p.codes + size_t(block) * p.M * 128 + size_t(token0) * 64;
  if (is_int8(p, block)) {
    codes += size_t(token0) * 64;
    deal<TOKENS * 8>([&](int i) {
      const bool valid = i / 8 < tokens;
      copy_async_16(stage + kCodesAt + int8_offset(i / 8, i % 8), codes + (valid ? 16 * i : 0), valid);
    });
  } else {
    deal<TOKENS * 4>([&](int i) {
      const bool valid = i / 4 < tokens;
      copy_async_16(stage + kCodesAt + 16 * i, codes + (valid ? 16 * i : 0), valid);
    });
  }
  const float* meta = p.meta + (size_t(block) * p.M + token0) * 2;
  deal<TOKENS>([&](int i) {
    const bool valid = i < tokens;
    copy_async_8(stage + kMetaAt + 8 * i, meta + (valid ? 2 * i : 0), valid);
  });
}

struct Lane {
  int g, t, row0, token0; // of the warp's part of the tile
  __device__ Lane() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    g = lane / 4;
    t = lane % 4;
    row0 = warp / kWarpsM * kRowTiles * 16;
    token0 = warp % kWarpsM * kTokenTiles * 8;
  }
};

using Sums = float[kRowTiles][kTokenTiles][4];

// y += scales * (dot - zero * sum) for the four outputs of one m16n8 tile; all but the last operation are exact.
struct RowScales {
  float scale[2], zero[2]; // of rows 2g and 2g + 1 of an m16 tile
};
__device__ __forceinline__ RowScales row_scales(uint32_t stage, const Lane& at, int m) {
  const int row = at.row0 + 16 * m + 2 * at.g;
  const uint32_t pair = load_shared_32(stage + kNibbleBytes + 2 * row);
  RowScales r{{__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)}, {8.f, 8.f}};
  if (ZERO) {
    const uint32_t zeros = load_shared_16(stage + kNibbleBytes + kScaleBytes + row);
    r.zero[0] = __uint_as_float(kFloatBits | (zeros & 0xFFu)) - kFloatOffset;
    r.zero[1] = __uint_as_float(kFloatBits | (zeros >> 8)) - kFloatOffset;
  }
  return r;
}
__device__ __forceinline__ void promote(float (&y)[4], const int (&d)[4], const RowScales& row, const float4& meta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) { // meta: scale and sum of token 2t, then of 2t + 1
    const float scale = i % 2 ? meta.z : meta.x, sum = i % 2 ? meta.w : meta.y;
    const float dot = __int_as_float(d[i]) - fmaf(row.zero[i / 2], sum, kFloatOffset);
    y[i] = fmaf(dot, scale * row.scale[i / 2], y[i]);
  }
}

__device__ __forceinline__ void multiply_int4(uint32_t stage, const Lane& at, Sums& y) {
  uint32_t a[kRowTiles][2][4]; // [.][step]: a fragment of m16n8k64, as it lies in memory
  RowScales rows[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const uint32_t from = stage + (at.row0 / 16 + m) * 1024 + (threadIdx.x % 32) * 16;
#pragma unroll
    for (int s = 0; s < 2; ++s) load_shared(from + 512 * s, a[m][s]);
    rows[m] = row_scales(stage, at, m);
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    uint32_t b[4];
    load_shared(stage + kCodesAt + (at.token0 + 8 * n + at.g) * 64 + at.t * 16, b);
    const float4 meta = load_shared_float4(stage + kMetaAt + (at.token0 + 8 * n + 2 * at.t) * 8);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      int d[4] = {kFloatBits, kFloatBits, kFloatBits, kFloatBits};
#pragma unroll
      for (int s = 0; s < 2; ++s)
        mma_m16n8k64_u4_s4(d, a[m][s][0], a[m][s][1], a[m][s][2], a[m][s][3], b[2 * s], b[2 * s + 1]);
      promote(y[m][n], d, rows[m], meta);
    }
  }
}

__device__ __forceinline__ void multiply_int8(uint32_t stage, const Lane& at, Sums& y) {
  uint32_t a[kRowTiles][4][4]; // [.][step]: a fragment of m16n8k32
  RowScales rows[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const uint32_t from = stage + (at.row0 / 16 + m) * 1024 + (threadIdx.x % 32) * 16;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t nibbles[4]; // of steps 2 * pair and 2 * pair + 1: rows g and g + 8
      load_shared(from + 512 * pair, nibbles);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        widen_nibbles(nibbles[i], a[m][2 * pair + i / 2][i % 2], a[m][2 * pair + i / 2][2 + i % 2]);
    }
    rows[m] = row_scales(stage, at, m);
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const int token = at.token0 + 8 * n + at.g;
    uint32_t b[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) load_shared(stage + kCodesAt + int8_offset(token, 2 * at.t + h), b[h]);
    const float4 meta = load_shared_float4(stage + kMetaAt + (at.token0 + 8 * n + 2 * at.t) * 8);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      int d[4] = {kFloatBits, kFloatBits, kFloatBits, kFloatBits};
#pragma unroll
      for (int s = 0; s < 4; ++s)
        mma_m16n8k32_u8_s8(d, a[m][s][0], a[m][s][1], a[m][s][2], a[m][s][3], b[s / 2][s % 2 * 2],
                           b[s / 2][s % 2 * 2 + 1]);
      promote(y[m][n], d, rows[m], meta);
    }
  }
}

// Two neighbouring outputs of one token.
__device__ __forceinline__ void store_pair(const Params& p, int token, int row, float low, float high) {
  const size_t at = size_t(token) * p.N + row;
#if OUT == 2
  reinterpret_cast<float2*>(p.y)[at / 2] = make_float2(low, high);
#else
  uint32_t pair;
  if constexpr (OUT == 0)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  reinterpret_cast<uint32_t*>(p.y)[at / 2] = pair;
#endif
}

// Fragment rows g and g + 8 are rows 2g and 2g + 1 of the 16 (weight_layout_sm80.py), so a thread stores pairs.
__device__ __forceinline__ void store_tile(const Params& p, int row_tile, int token_tile, int m, int n, const Lane& at,
                                           const float (&y)[4]) {
  const int row = row_tile * kRows + at.row0 + 16 * m + 2 * at.g;
  if (row >= p.N) return; // N is even
  const float bias0 = p.bias ? p.bias[row] : 0.f, bias1 = p.bias ? p.bias[row + 1] : 0.f;
  const int token = token_tile * TOKENS + at.token0 + 8 * n + 2 * at.t;
  if (token < p.M) store_pair(p, token, row, y[0] + bias0, y[2] + bias1);
  if (token + 1 < p.M) store_pair(p, token + 1, row, y[1] + bias0, y[3] + bias1);
}

__device__ __forceinline__ float4* part_of(const Params& p, int slot, int m, int n) {
  return reinterpret_cast<float4*>(p.parts) + (size_t(slot) * kRowTiles * kTokenTiles + m * kTokenTiles + n) * kThreads +
         threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_CTAS) w4ax_gemm_sm80(const Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = shared_address(shared);
  const Lane at;
  for (int i = p.starts[blockIdx.x]; i < p.starts[blockIdx.x + 1]; ++i) {
    const Segment work = p.segments[i];
    const int token0 = work.token_tile * TOKENS;
    Sums y = {};
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
      if (work.first_block + s < work.end_block)
        load_stage(p, ring + s * kStageBytes, work.row_tile, token0, work.first_block + s);
      commit_copies();
    }
    int stage = 0;
    for (int block = work.first_block; block < work.end_block; ++block) {
      wait_for_copies<STAGES - 2>();
      __syncthreads(); // the block is there for all warps, and all have left the stage that is filled next
      const int ahead = block + STAGES - 1;
      if (ahead < work.end_block)
        load_stage(p, ring + (stage == 0 ? STAGES - 1 : stage - 1) * kStageBytes, work.row_tile, token0, ahead);
      commit_copies();
      const uint32_t now = ring + stage * kStageBytes;
#if PORTABLE
      multiply_int8(now, at, y);
#else
      if (is_int8(p, block))
        multiply_int8(now, at, y);
      else
        multiply_int4(now, at, y);
#endif
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads(); // the next segment fills the ring from its start
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        if (work.slot < 0)
          store_tile(p, work.row_tile, work.token_tile, m, n, at, y[m][n]);
        else
          *part_of(p, work.slot, m, n) = make_float4(y[m][n][0], y[m][n][1], y[m][n][2], y[m][n][3]);
      }
  }
}

struct SplitTile { // a tile whose sum lies in `count` slots, ascending in K
  int row_tile, token_tile, first_slot, count;
};

// One cta a split tile and m16n8 tile of each warp (blockIdx.y).
extern "C" __global__ void __launch_bounds__(kThreads) reduce_parts(const Params p, const SplitTile* tiles) {
  const SplitTile tile = tiles[blockIdx.x];
  const int m = blockIdx.y / kTokenTiles, n = blockIdx.y % kTokenTiles;
  float y[4] = {};
  for (int i = 0; i < tile.count; ++i) {
    const float4 part = *part_of(p, tile.first_slot + i, m, n);
    y[0] += part.x;
    y[1] += part.y;
    y[2] += part.z;
    y[3] += part.w;
  }
  store_tile(p, tile.row_tile, tile.token_tile, m, n, Lane(), y);
}
