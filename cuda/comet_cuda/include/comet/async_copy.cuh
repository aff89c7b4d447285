// cp.async (sm_80 and later): copies from global to shared memory that the issuing thread does not wait for.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned int uint32_t;

namespace comet {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// 16 bytes past L1; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// 8 bytes.
__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
// Closes the group of copies that this thread has issued since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's newest groups are still under way.
template <int kPending> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of shared memory in one access.
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&w)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(from));
}
__device__ __forceinline__ float4 load_shared_float4(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_32(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_16(uint32_t from) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

} // namespace comet
