// A CPU in the place of a GPU, for tests of kernels' logic: one fiber a thread, one cta after the other.
//
// Warp-wide operations meet at a barrier of 32 fibers and read each other's operands, so a kernel that depends on the
// order of its threads, or lets lanes part before such an operation, hangs or fails here. Races that need true
// simultaneity are not found, nor are alignment faults of cp.async. Stands before the kernel's source in one file.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kStack = 256 << 10;
struct Barrier {
  int members = 0, arrived = 0, generation = 0;
};
struct Warp {
  Barrier barrier;
  unsigned operand[32][8];
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
  int thread;
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier cta;
inline int counted[2];
inline ucontext_t scheduler;
inline Fiber* current;
inline dim3 thread_index, block_index, grid_size;

inline void give_way() { swapcontext(&current->context, &scheduler); }
inline void meet(Barrier& b) {
  const int generation = b.generation;
  if (++b.arrived == b.members) {
    b.arrived = 0, ++b.generation;
    return;
  }
  for (long waits = 0; b.generation == generation; ++waits) {
    if (waits > 1000000) std::fprintf(stderr, "a barrier is never reached by all\n"), std::abort();
    give_way();
  }
}
inline int lane() { return current->thread % 32; }
inline Warp& warp() { return warps[current->thread / 32]; }
// Shows n operands to the warp; `read` then sees all lanes' ones.
template <typename Read> auto exchange(const unsigned* mine, int n, const Read& read) {
  Warp& w = warp();
  std::memcpy(w.operand[lane()], mine, n * sizeof(unsigned));
  meet(w.barrier);
  const auto result = read(w.operand);
  meet(w.barrier);
  return result;
}
inline unsigned bits(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float number(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

using Kernel = void (*)(const void*);
inline Kernel kernel;
inline const void* parameters;
inline void enter() {
  kernel(parameters);
  current->done = true;
  --cta.members, --warp().barrier.members; // who has left is not waited for
  if (cta.arrived && cta.arrived == cta.members) cta.arrived = 0, ++cta.generation;
  give_way();
}
inline void run_cta(int threads) {
  fibers.resize(threads), warps.resize(threads / 32);
  cta = {threads, 0, 0};
  for (Warp& w : warps) w.barrier = {32, 0, 0};
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.stack.resize(kStack), f.done = false, f.thread = i;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (Fiber& f : fibers) {
      if (f.done) continue;
      alive = true, current = &f, thread_index = {f.thread, 0, 0};
      swapcontext(&scheduler, &f.context);
    }
  }
}

} // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size

inline void __syncthreads() { emulator::meet(emulator::cta); }
inline int __syncthreads_count(int yes) {
  const int turn = emulator::cta.generation & 2 ? 1 : 0;
  emulator::counted[turn] += yes != 0;
  emulator::meet(emulator::cta);
  const int count = emulator::counted[turn];
  emulator::meet(emulator::cta);
  emulator::counted[turn] = 0;
  emulator::meet(emulator::cta);
  emulator::meet(emulator::cta);
  return count;
}
inline void __syncwarp() { emulator::meet(emulator::warp().barrier); }
inline void __threadfence() {}
inline float __shfl_sync(unsigned, float x, int from) {
  const unsigned mine = emulator::bits(x);
  return emulator::exchange(&mine, 1, [&](auto& all) { return emulator::number(all[from & 31][0]); });
}
inline unsigned __shfl_sync(unsigned, unsigned x, int from) {
  return emulator::exchange(&x, 1, [&](auto& all) { return all[from & 31][0]; });
}
inline int __shfl_sync(unsigned mask, int x, int from) { return int(__shfl_sync(mask, unsigned(x), from)); }
inline float __shfl_xor_sync(unsigned mask, float x, int flip) { return __shfl_sync(mask, x, emulator::lane() ^ flip); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int flip) {
  return emulator::exchange(&x, 1, [&](auto& all) { return all[emulator::lane() ^ flip][0]; });
}
inline unsigned __ballot_sync(unsigned, int yes) {
  const unsigned mine = yes != 0;
  return emulator::exchange(&mine, 1, [](auto& all) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= all[i][0] << i;
    return bits;
  });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __any_sync(unsigned, int yes) {
  const unsigned mine = yes != 0;
  return emulator::exchange(&mine, 1, [](auto& all) {
    int any = 0;
    for (auto& other : all) any |= int(other[0]);
    return any;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  return emulator::exchange(&x, 1, [](auto& all) {
    unsigned most = 0;
    for (auto& other : all) most = other[0] > most ? other[0] : most;
    return most;
  });
}
inline int atomicAdd(int* at, int x) { return (*at += x) - x; }
template <typename T> T __ldcg(const T* p) { return *p; }
inline float __uint_as_float(unsigned x) { return emulator::number(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
