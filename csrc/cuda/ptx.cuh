// SPDX-License-Identifier: Apache-2.0
// The PTX that the kernels use, one function per instruction. PAT_WGMMA marks the code of sm_90a,
// whose matrix products are in forward/wgmma.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PAT_WGMMA 1
#else
#define PAT_WGMMA 0
#endif

namespace pat {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Lane of the thread in its warp. The compiler cannot see through the asm, so it computes what
// depends on the lane where that is used instead of holding it in registers across the kernel.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Gives `predicate`, and makes the compiler compute it here, not where it is used.
__device__ __forceinline__ bool computed_here(bool predicate) {
  int value = predicate;
  asm volatile("" : "+r"(value));
  return value != 0;
}

// value / divisor, by divisor_magic(divisor), for 0 <= value < 2^32 / divisor. A division takes 30
// instructions, and some kernels have no registers left for it.
__device__ __forceinline__ int divide(int value, uint32_t magic) {
  return magic == 0 ? value : static_cast<int>(__umulhi(value, magic));
}

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}

// How many lanes arrive when a warp releases a buffer that all its lanes have read. One is enough
// after __syncwarp. But racecheck (compute-sanitizer) regards only threads that arrive themselves
// as ordered, so in a build for it (PAT_SANITIZER) all lanes do.
#ifdef PAT_SANITIZER
constexpr uint32_t kArriving = 32;
#else
constexpr uint32_t kArriving = 1;
#endif

// With a predicate instead of a branch: around a branch the compiler keeps the lanes of a warp
// apart, which in the loops of the consumers costs instructions and registers.
__device__ __forceinline__ void barrier_release(uint32_t bar, uint32_t lane) {
  __syncwarp();
  asm volatile(
      "{ .reg .b64 t; .reg .pred p; setp.lt.u32 p, %1, %2; @p mbarrier.arrive.shared.b64 t, [%0]; "
      "}" ::"r"(bar),
      "r"(lane), "n"(kArriving)
      : "memory");
}

// Arrives once all earlier asynchronous copies of this thread are done.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// Is a phase complete? `test_wait` never waits, `try_wait` of sm_90 may.
#define PAT_TEST_BARRIER(INSTRUCTION)                                    \
  uint32_t done;                                                         \
  asm volatile("{ .reg .pred p; mbarrier." INSTRUCTION                   \
               ".parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" \
               : "=r"(done)                                              \
               : "r"(bar), "r"(parity)                                   \
               : "memory");                                              \
  return done != 0
__device__ __forceinline__ bool barrier_ready(uint32_t bar, uint32_t parity) {
  PAT_TEST_BARRIER("test_wait");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  const auto complete = [=] { PAT_TEST_BARRIER("try_wait"); };
#else
  const auto complete = [=] { PAT_TEST_BARRIER("test_wait"); };
#endif
  while (!complete()) {
  }
}

// Named barrier among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- a counter in shared memory: one thread counts, others may see it late

__device__ __forceinline__ void count_one(int32_t& counter) {
#ifdef PAT_SANITIZER
  atomicAdd(&counter, 1);
#else
  volatile int32_t& seen = counter;
  seen = seen + 1;
#endif
}

__device__ __forceinline__ void set_counter(int32_t& counter, int32_t value) {
#ifdef PAT_SANITIZER
  atomicExch(&counter, value);
#else
  *const_cast<volatile int32_t*>(&counter) = value;
#endif
}

__device__ __forceinline__ int32_t counted(int32_t& counter) {
#ifdef PAT_SANITIZER
  return atomicAdd(&counter, 0);
#else
  return *const_cast<const volatile int32_t*>(&counter);
#endif
}

// Element i of an array of integers of 4 or 8 bytes.
__device__ __forceinline__ int64_t integer_at(const void* array, int bytes, int64_t i) {
  return bytes == 8 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// ---- copies

__device__ __forceinline__ void copy16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void copy4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

// Copies 16 bytes, or writes zeros and reads nothing.
__device__ __forceinline__ void copy16_or_zero(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}

// Makes a group of this thread's asynchronous copies since the last group.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups of this thread are done.
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared2(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared4(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared4(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four matrices of 8 rows of 16 bytes, as load_matrix() reads them: sm_90.
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- matrix products

template <typename T>
__device__ __forceinline__ void mma16816(float* d, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#define PAT_MMA(TYPE)                                                  \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE  \
               ".f32 "                                                 \
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_MMA("bf16");
  } else {
    PAT_MMA("f16");
  }
}

// Two floats as one register of 16-bit values, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t subtract_half2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four e4m3 values as fp16, which holds all of them exactly: those of the lower bytes in `low`.
__device__ __forceinline__ void widen_e4m3(uint32_t bytes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2;"
      "cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  // Exponent and mantissa of a byte, moved to where fp16 has them, are 2^-8 of the value. A NaN,
  // the one byte whose seven lower bits are all set, gets the greatest exponent.
  const uint32_t magnitude = bytes & 0x7F7F7F7F;
  const uint32_t marked = magnitude | ((magnitude + 0x01010101) & 0x80808080);
  const auto widen = [&](uint32_t selector) {
    const uint32_t bits =
        (__byte_perm(marked, 0, selector) >> 1) | (__byte_perm(bytes, 0, selector) & 0x80008000);
    return multiply_half2(bits, 0x5C005C00);  // 256
  };
  low = widen(0x1404);
  high = widen(0x3424);
#endif
}

// Two values of T as fp16; those beyond its range become the greatest that it has.
template <typename T>
__device__ __forceinline__ uint32_t to_half2(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return pair;
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;"
      : "=r"(r)
      : "f"(__uint_as_float(pair & 0xFFFF0000)), "f"(__uint_as_float(pair << 16)));
  return r;
}

// Four floats as e4m3, the first one in the lowest byte; those beyond its range become the greatest
// that it has: sm_89.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{ .reg .b16 low, high;"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      "mov.b32 %0, {low, high}; }"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// The same of four fp16 values: sm_89.
__device__ __forceinline__ uint32_t pack_e4m3(uint32_t low, uint32_t high) {
  uint32_t r;
  asm("{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f16x2 a, %1; cvt.rn.satfinite.e4m3x2.f16x2 b, %2;"
      "mov.b32 %0, {a, b}; }"
      : "=r"(r)
      : "r"(low), "r"(high));
  return r;
}

// ---- dependent launches: the next kernel of the stream starts while this one drains

__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace pat
