#ifndef AFTER_THE_KERNEL
// CUDA's language and intrinsics in plain C++, enough to run the quantize_*.cu kernels on a CPU:
// test_quantize_act_emulated.py puts this file before the kernel (named ENTRY) and calls emulate() after it.
//
// The threads of a cta, or of all ctas of a cluster, are fibers of one thread. A shuffle or vote is a meeting of the 32
// lanes of a warp: each leaves its value and sleeps until the last one has come. PTX statements are replaced by calls of the functions in `emu`.
#include <cmath>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <deque>
#include <map>
#include <vector>
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CLUSTER_OF_CTAS
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ ARCH
#define uint64_t emu_u64
#ifndef CLUSTER
#define CLUSTER 1
#endif
typedef unsigned int u32;
struct dim3_ { int x, y, z; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
inline uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
namespace emu {
struct Barrier { int expected, pending; long bytes; u32 phase; };
struct Cta { dim3_ block; char* memory; int arrived, running; long generation; std::map<u32, Barrier> barriers; };
struct Warp { u32 in[32], out[32]; int arrived = 0; long generation = 0; };
struct Fiber { ucontext_t context; dim3_ thread; bool done = false; Warp* warp; Cta* cta; long cluster_generation; bool waited; std::vector<char> stack; };
inline Fiber* now; // the one that runs
inline ucontext_t scheduler;
inline dim3_ grid, threads;
inline Cta ctas[8]; // of a cluster at most (one size: libraries share inline variables)
inline int cluster_arrived;
inline long cluster_generation;
inline void yield() { swapcontext(&now->context, &scheduler); }
inline const u32* exchange(u32 v) {
  Warp& w = *now->warp;
  w.in[now->thread.x % 32] = v;
  const long g = w.generation;
  if (++w.arrived == 32) { memcpy(w.out, w.in, sizeof w.in); w.arrived = 0; ++w.generation; }
  else while (w.generation == g) yield();
  return w.out;
}
inline u32 bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }
inline float value(u32 u) { float f; memcpy(&f, &u, 4); return f; }
}
#define threadIdx (emu::now->thread)
#define blockIdx (emu::now->cta->block)
#define gridDim emu::grid
#define blockDim emu::threads
inline void __syncthreads() {
  emu::Cta& c = *emu::now->cta;
  const long g = c.generation;
  if (++c.arrived == emu::threads.x) { c.arrived = 0; ++c.generation; }
  else while (c.generation == g) emu::yield();
}
inline float __uint_as_float(u32 u) { return emu::value(u); }
inline u32 __float_as_uint(float f) { return emu::bits(f); }
inline float __int_as_float(int u) { return emu::value(u32(u)); }
inline int __float_as_int(float f) { return int(emu::bits(f)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return expf(a); }
inline float rsqrtf(float a) { return 1 / sqrtf(a); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
  const unsigned long long both = (unsigned long long)b << 32 | a; u32 r = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 n = s >> (4 * i) & 15; u32 v = u32(both >> (8 * (n & 7))) & 255;
    if (n & 8) v = v & 128 ? 255 : 0;
    r |= v << (8 * i);
  }
  return r;
}
inline u32 __shfl_xor_sync(u32, u32 v, int d) { return emu::exchange(v)[(threadIdx.x % 32) ^ d]; }
inline u32 __shfl_down_sync(u32, u32 v, int d, int width) { const int l = threadIdx.x % 32; return emu::exchange(v)[l % width + d < width ? l + d : l]; }
inline int __shfl_xor_sync(u32 m, int v, int d) { return int(__shfl_xor_sync(m, u32(v), d)); }
inline float __shfl_xor_sync(u32 m, float v, int d) { return emu::value(__shfl_xor_sync(m, emu::bits(v), d)); }
inline float __shfl_sync(u32, float v, int src, int width = 32) { const int l = threadIdx.x % 32; return emu::value(emu::exchange(emu::bits(v))[(l & ~(width - 1)) | (src & (width - 1))]); }
inline u32 __shfl_sync(u32, u32 v, int src, int width = 32) { const int l = threadIdx.x % 32; return emu::exchange(v)[(l & ~(width - 1)) | (src & (width - 1))]; }
inline int __shfl_sync(u32, int v, int src) { return int(emu::exchange(u32(v))[src]); }
inline void __syncwarp() { emu::exchange(0); }
inline u32 __ballot_sync(u32, bool p) { const u32* o = emu::exchange(p); u32 r = 0; for (int i = 0; i < 32; ++i) r |= (o[i] ? 1u : 0u) << i; return r; }
inline bool __all_sync(u32 m, bool p) { return __ballot_sync(m, p) == ~0u; }
inline bool __any_sync(u32 m, bool p) { return __ballot_sync(m, p) != 0; }
inline u32 __reduce_max_sync(u32, u32 v) { const u32* o = emu::exchange(v); u32 r = 0; for (int i = 0; i < 32; ++i) r = o[i] > r ? o[i] : r; return r; }
inline u32 __reduce_add_sync(u32, u32 v) { const u32* o = emu::exchange(v); u32 r = 0; for (int i = 0; i < 32; ++i) r += o[i]; return r; }
inline int4 __ldg(const int4* p) { return *p; }
inline float __ldg(const float* p) { return *p; }
inline uint4 __ldg(const uint4* p) { return *p; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 __viaddmin_s16x2_relu(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int h = 0; h < 2; ++h) {
    const short sum = short((a >> (16 * h)) + (b >> (16 * h))), top = short(c >> (16 * h));
    short v = sum < top ? sum : top; if (v < 0) v = 0;
    r |= u32((unsigned short)v) << (16 * h);
  }
  return r;
}
inline u32 __vimin3_u16x2(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int h = 0; h < 2; ++h) r |= min(min(a >> (16 * h) & 0xFFFF, b >> (16 * h) & 0xFFFF), c >> (16 * h) & 0xFFFF) << (16 * h);
  return r;
}
namespace emu {
inline _Float16 half(u32 u) { unsigned short s = u; _Float16 h; memcpy(&h, &s, 2); return h; }
inline u32 hbits(_Float16 h) { unsigned short s; memcpy(&s, &h, 2); return s; }
template <class F> u32 pairwise(u32 a, u32 b, F f) { return hbits(f(half(a), half(b))) | hbits(f(half(a >> 16), half(b >> 16))) << 16; }
inline u32 add_pair(u32 a, u32 b) { return pairwise(a, b, [](_Float16 x, _Float16 y) { return _Float16(double(x) + double(y)); }); }
inline u32 mul_pair(u32 a, u32 b) { return pairwise(a, b, [](_Float16 x, _Float16 y) { return _Float16(double(x) * double(y)); }); }
inline u32 minp(u32 a, u32 b) { return pairwise(a, b, [](_Float16 x, _Float16 y) { return x != x ? y : y != y ? x : x < y ? x : y; }); }
inline u32 maxp(u32 a, u32 b) { return pairwise(a, b, [](_Float16 x, _Float16 y) { return x != x ? y : y != y ? x : x > y ? x : y; }); }
inline u32 fma_pair(u32 a, u32 b, u32 c) {
  auto f = [](u32 x, u32 y, u32 z) { return hbits(_Float16(double(half(x)) * double(half(y)) + double(half(z)))); };
  return f(a, b, c) | f(a >> 16, b >> 16, c >> 16) << 16;
}
inline u32 e4m3(_Float16 h) {
  const double x = double(h), m = fabs(x); const u32 sign = std::signbit(x) ? 0x80 : 0;
  if (m == 0) return sign;
  if (m > 448) return sign | 0x7E;
  int e; frexp(m, &e); e -= 1; if (e < -6) e = -6;
  const double unit = ldexp(1.0, e - 3); const double n = nearbyint(m / unit); // 8..16, or below 8 for subnormal
  u32 code; if (n >= 16) code = u32(e + 1 + 7) << 3; else if (n >= 8) code = (u32(e + 7) << 3) | (u32(n) - 8); else code = u32(n);
  return sign | code;
}
inline unsigned short e4m3_pair(float low, float high) { return e4m3(_Float16(low)) | e4m3(_Float16(high)) << 8; } // exact: small integers times powers of two
inline unsigned short e4m3_pair(u32 p) { return e4m3(half(p)) | e4m3(half(p >> 16)) << 8; }
inline u32 bf16(float x) { u32 u = bits(x); if (x != x) return 0x7FFF; return (u + 0x7FFF + (u >> 16 & 1)) >> 16; }
// rcp.approx may be off by a unit in the last place: here it is, two times out of three.
inline float reciprocal(float x) { static int n = 0; const float r = 1 / x; return value(bits(r) + (n++ % 3 - 1)); }
}
// pipeline.cuh. A bulk copy spoils its target at once and arrives when somebody waits, so that too early a read or
// refill is seen; so does what is sent to another cta, which must still be there then.
namespace emu {
struct Copy { Cta* cta; u32 to; const void* from; u32 bytes, barrier; float sent; }; // sent: where there is no `from`
inline std::deque<Copy> copies;
inline void settle(Barrier& b) { if (b.pending == 0 && b.bytes == 0) b.pending = b.expected, b.phase ^= 1; }
inline void arrive_first() {
  const Copy c = copies.front(); copies.pop_front();
  if (c.cta->running == 0) abort();
  memcpy(c.cta->memory + c.to, c.from ? c.from : &c.sent, c.bytes);
  Barrier& b = c.cta->barriers.at(c.barrier); b.bytes -= c.bytes; settle(b);
}
}
namespace comet {
inline char* memory_of_cta() { return emu::now->cta->memory; }
inline std::map<u32, emu::Barrier>& barriers_of_cta() { return emu::now->cta->barriers; }
inline u32 shared_address(const void* p) { return u32((const char*)p - memory_of_cta()); }
inline u32 load_shared_2(u32 at) { unsigned short v; memcpy(&v, memory_of_cta() + at, 2); return v; }
inline uint4 load_shared_16(u32 at) { uint4 v; if (at % 16) abort(); memcpy(&v, memory_of_cta() + at, 16); return v; }
inline void store_shared_2(u32 at, u32 v) { memcpy(memory_of_cta() + at, &v, 2); }
inline void store_shared_8(u32 at, u32 a, u32 b) { if (at % 8) abort(); memcpy(memory_of_cta() + at, &a, 4); memcpy(memory_of_cta() + at + 4, &b, 4); }
inline void fence_proxy_async() {}
inline void mbarrier_init(u32 at, u32 n) { if (at % 8) abort(); memset(memory_of_cta() + at, 0, 8); barriers_of_cta()[at] = {int(n), int(n), 0, 0}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(u32 at) { emu::Barrier& b = barriers_of_cta().at(at); --b.pending; emu::settle(b); }
inline void mbarrier_expect(u32 at, u32 bytes) { barriers_of_cta().at(at).bytes += bytes; mbarrier_arrive(at); }
inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, unsigned long long) {
  if (to % 16 || bytes % 16 || (unsigned long long)from % 16) abort();
  memset(memory_of_cta() + to, 0xFF, bytes);
  emu::copies.push_back({emu::now->cta, to, from, bytes, barrier, 0.f});
}
inline void mbarrier_wait(u32 at, u32 parity) {
  while (barriers_of_cta().at(at).phase == parity) {
    if (!emu::copies.empty()) emu::arrive_first(); else emu::yield();
  }
}
inline void wait_for_cluster(u32 at, u32 parity) { mbarrier_wait(at, parity); }
inline unsigned long long l2_evict_first() { return 0; }
inline void named_sync(int, int members) { // one barrier a kernel
  static int arrived = 0;
  static long generation = 0;
  const long g = generation;
  if (++arrived == members) { arrived = 0; ++generation; } else while (generation == g) emu::yield();
}
// cluster.cuh. Nothing may be sent to a cta that may not have begun, or that has ended.
inline void cluster_arrive() {
  emu::now->cluster_generation = emu::cluster_generation;
  if (++emu::cluster_arrived == CLUSTER * emu::threads.x) emu::cluster_arrived = 0, ++emu::cluster_generation;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() { while (emu::cluster_generation == emu::now->cluster_generation) emu::yield(); emu::now->waited = true; }
inline emu::Cta& other_cta(u32 rank) {
  if (rank >= CLUSTER || !emu::now->waited || emu::ctas[rank].running == 0) abort();
  return emu::ctas[rank];
}
inline void store_in_cta(float* at, u32 rank, float x) { *(float*)(other_cta(rank).memory + shared_address(at)) = x; }
inline void send_to_cta(float* at, u32 rank, float x, u32 barrier) {
  emu::copies.push_back({&other_cta(rank), shared_address(at), nullptr, 4, barrier, x});
}
}
#endif

// ---- after the kernel
#ifdef AFTER_THE_KERNEL
#ifndef PARAMS
#define PARAMS Params
#endif
namespace emu {
inline const PARAMS* params;
inline int shared_end = 0; // the first byte of shared memory beyond all that was written
inline void body() {
  ENTRY(*params);
  now->done = true, --now->cta->running;
  swapcontext(&now->context, &scheduler);
}
}
char memory[CLUSTER][1 << 18] __attribute__((aligned(1024)));
extern "C" int shared_used() { const int found = emu::shared_end; emu::shared_end = 0; return found; }
extern "C" void emulate(const PARAMS* p, int gx, int gy, int n) {
  using namespace emu;
  grid = {gx, gy, 1}; threads = {n, 1, 1}; params = p;
  std::vector<Fiber> fibers(CLUSTER * n);
  for (auto& f : fibers) f.stack.resize(1 << 16);
  for (int y = 0; y < gy; y += CLUSTER) for (int x = 0; x < gx; ++x) {
    cluster_arrived = 0; cluster_generation = 0; copies.clear();
    memset(memory, 0xFF, sizeof memory);
    std::vector<Warp> warps(CLUSTER * n / 32);
    for (int i = 0; i < CLUSTER; ++i) ctas[i] = {{x, y + i, 0}, memory[i], 0, n, 0, {}};
    for (int i = 0; i < CLUSTER * n; ++i) {
      Fiber& f = fibers[i]; f.thread = {i % n, 0, 0}; f.done = false; f.warp = &warps[i / 32]; f.cta = &ctas[i / n]; f.waited = false;
      getcontext(&f.context); f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = nullptr;
      makecontext(&f.context, body, 0);
    }
    // Threads run from the first to the last and back, of every second cta or cluster the other way round; each cta of a
    // cluster stands still in turn.
    long rounds = 0;
    for (bool any = true; any;) {
      if (++rounds > 200000) abort(); // they wait for each other
      any = false;
      const bool back = (rounds + x) % 2;
      const int still = CLUSTER > 1 ? rounds / 32 % (CLUSTER + 1) : 1;
      for (int i = 0; i < CLUSTER * n; ++i) {
        const int at = back ? CLUSTER * n - 1 - i : i;
        Fiber& f = fibers[at];
        if (f.done) continue;
        any = true, now = &f;
        if (at / n != still) swapcontext(&scheduler, &f.context);
      }
    }
    if (!copies.empty()) abort(); // on their way to ctas that have ended
    for (auto& used : memory)
      for (int i = sizeof used; i > shared_end; --i) if (used[i - 1] != char(0xFF)) shared_end = i;
  }
}
#endif
