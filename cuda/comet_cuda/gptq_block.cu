// GPTQ inside one block of 128 columns, its grid search included: a warp a row, one launch a block.
//
// Each lane holds 4 of the row's weights, columns lane + 32 * slot. First the warp tries all ranges and keeps the one
// with the least weighted rounding error; then it walks the columns: the column's weight is handed to all lanes, each
// rounds it, and takes the error's share from its own columns. The factor lies in shared memory, read without conflicts.
// Operations and their order are those of the reference (gptq_block.py), but for sums over a row, whose order differs.
constexpr int kBlock = 128, kThreads = 512, kOwn = kBlock / 32; // columns of a block and of a lane
constexpr unsigned kWarp = ~0u;

struct Params {
  const float* block;      // [rows, 128], rows `block_stride` apart
  const float* factor;     // [128, 128], rows `factor_stride` apart; upper triangular
  const float* importance; // [128]
  signed char* codes;           // [rows, 128]
  float* errors;           // [rows, 128]
  float* scale;            // [rows], read where `given`, else written
  float* zero;             // [rows], likewise
  const float* base;       // [rows]: scales are multiples of it (weight_grid.py); null: they are free
  long long block_stride, factor_stride;
  double step;             // by which a candidate's range is narrower than the one before
  int steps, rows, low, high, qmax, middle, symmetric, given;
};

extern __shared__ __align__(16) char memory[];

struct Grid {
  float scale, zero, low, high;
  __device__ __forceinline__ float code(float w) const {
    return fminf(fmaxf(rintf(__fdiv_rn(w, scale)) + zero, low), high);
  }
  __device__ __forceinline__ float value(float code) const { return __fmul_rn(__fsub_rn(code, zero), scale); }
};

__device__ __forceinline__ float storable(float scale) { // as bfloat16; 1 where that is zero or not finite
  const unsigned bits = __float_as_uint(scale); // never NaN
  const float rounded = __uint_as_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
  return rounded > 0.f && rounded < __uint_as_float(0x7F800000u) ? rounded : 1.f;
}
__device__ __forceinline__ float most_multiple(float zero) { // that keeps 4-bit codes' products with it in 8 bits
  return fminf(floorf(__fdiv_rn(127.f, fmaxf(zero, 15.f - zero))), 15.f);
}
template <typename Join> __device__ __forceinline__ float over_lanes(float x, const Join& join) {
  for (int lanes = 16; lanes; lanes /= 2) x = join(x, __shfl_xor_sync(kWarp, x, lanes));
  return x;
}

extern "C" __global__ void __launch_bounds__(kThreads) gptq_block(const __grid_constant__ Params p) {
  float* factor = reinterpret_cast<float*>(memory);
  for (int i = threadIdx.x; i < kBlock * kBlock; i += kThreads)
    factor[i] = p.factor[(i / kBlock) * p.factor_stride + i % kBlock];
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const long long row = static_cast<long long>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  float w[kOwn];
#pragma unroll
  for (int s = 0; s < kOwn; ++s) w[s] = p.block[row * p.block_stride + lane + 32 * s];

  Grid best = {1.f, float(p.middle), float(p.low), float(p.high)};
  if (p.given) {
    best.scale = p.scale[row], best.zero = p.zero[row];
  } else {
    float least = 0.f, most = 0.f, weight[kOwn]; // the range holds zero
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      weight[s] = p.importance[lane + 32 * s];
      least = fminf(least, w[s]), most = fmaxf(most, w[s]);
    }
    least = over_lanes(least, [](float a, float b) { return fminf(a, b); });
    most = over_lanes(most, [](float a, float b) { return fmaxf(a, b); });
    float best_error = 0.f;
    const float base = p.base ? p.base[row] : 0.f;
    for (int step = 0; step < p.steps; ++step) {
      const float shrink = static_cast<float>(1.0 - step * p.step);
      Grid grid = best;
      const float low = __fmul_rn(least, shrink), high = __fmul_rn(most, shrink);
      const float span = p.symmetric ? __fmul_rn(fmaxf(-least, most), shrink) : __fsub_rn(high, low);
      const float wanted = __fdiv_rn(span, float(p.qmax));
      const float multiple = p.base ? fminf(fmaxf(rintf(__fdiv_rn(wanted, base)), 1.f), 15.f) : 1.f;
      grid.scale = p.base ? __fmul_rn(multiple, base) : storable(wanted);
      if (!p.symmetric) grid.zero = fminf(fmaxf(rintf(__fdiv_rn(-low, grid.scale)), 0.f), float(p.qmax));
      if (p.base) grid.scale = __fmul_rn(fminf(multiple, most_multiple(grid.zero)), base);
      float error = 0.f;
#pragma unroll
      for (int s = 0; s < kOwn; ++s) {
        const float off = __fsub_rn(grid.value(grid.code(w[s])), w[s]);
        error = __fadd_rn(error, __fmul_rn(__fmul_rn(off, off), weight[s]));
      }
      error = over_lanes(error, [](float a, float b) { return __fadd_rn(a, b); });
      if (step == 0 || error < best_error) best = grid, best_error = error;
    }
    if (lane == 0) p.scale[row] = best.scale, p.zero[row] = best.zero;
  }

  signed char* codes = p.codes + row * kBlock + lane;
  float* errors = p.errors + row * kBlock + lane;
#pragma unroll
  for (int s = 0; s < kOwn; ++s) {
    float own_code = 0.f, own_error = 0.f;
    for (int l = 0; l < 32; ++l) {
      const float* line = factor + (32 * s + l) * kBlock;
      const float weight = __shfl_sync(kWarp, w[s], l);
      const float code = best.code(weight);
      const float error = __fdiv_rn(__fsub_rn(weight, best.value(code)), line[32 * s + l]);
      if (lane == l) own_code = code, own_error = error;
#pragma unroll
      for (int t = s; t < kOwn; ++t) w[t] = fmaf(-error, line[lane + 32 * t], w[t]); // earlier columns: done with
    }
    codes[32 * s] = static_cast<signed char>(own_code);
    errors[32 * s] = own_error;
  }
}
