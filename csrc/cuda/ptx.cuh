// SPDX-License-Identifier: Apache-2.0
// The PTX that the kernels use, one function per instruction. PAT_WGMMA marks the code of sm_90a.
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

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}

// How many lanes arrive when a warp releases a buffer that all its lanes have read. One is enough
// after __syncwarp. But racecheck (compute-sanitizer) regards only threads that arrive themselves
// as ordered, so in a build for it (PAT_RACECHECK) all lanes do.
#ifdef PAT_RACECHECK
constexpr uint32_t kArriving = 32;
#else
constexpr uint32_t kArriving = 1;
#endif

__device__ __forceinline__ void barrier_release(uint32_t bar, uint32_t lane) {
  __syncwarp();
  if (lane < kArriving) barrier_arrive(bar);
}

// Arrives once all earlier asynchronous copies of this thread are done.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ bool barrier_test(uint32_t bar, uint32_t parity) {
  uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  while (!barrier_test(bar, parity)) {
  }
}

// Is a phase complete? Never waits, as barrier_test() may.
__device__ __forceinline__ bool barrier_ready(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Named barrier among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- a counter in shared memory: one thread counts, others may see it late

__device__ __forceinline__ void count_one(int32_t& counter) {
#ifdef PAT_RACECHECK
  atomicAdd(&counter, 1);
#else
  volatile int32_t& seen = counter;
  seen = seen + 1;
#endif
}

__device__ __forceinline__ int32_t counted(int32_t& counter) {
#ifdef PAT_RACECHECK
  return atomicAdd(&counter, 0);
#else
  return *const_cast<const volatile int32_t*>(&counter);
#endif
}

// ---- hints

__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// ---- time

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ uint32_t sm_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
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

// ---- matrix products

template <typename T>
__device__ __forceinline__ void mma16816(float* d, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
    uint32_t value;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(bits), "r"(0x5C005C00));  // 256
    return value;
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

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if PAT_WGMMA
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of these registers across an asynchronous product.
template <typename R, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(R (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<R, float>) {
      asm volatile("" : "+f"(r[i])::"memory");
    } else {
      asm volatile("" : "+r"(r[i])::"memory");
    }
  }
}
// Makes shared memory that copies wrote visible to the asynchronous matrix units.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define PAT_F8(d, i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PAT_D32                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31}"
#define PAT_D64                                                                                 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,"    \
  "%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

#define PAT_D128                                                                                \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,"    \
  "%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,"    \
  "%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,"    \
  "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110," \
  "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"

#define PAT_WGMMA_RS_SCORES(TYPE)                                             \
  asm volatile(                                                               \
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;"                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " PAT_D32 \
      ", {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"                               \
      : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// d[64 x 64] (+)= A[64 x 16] B[64 x 16]^T, A in registers, B in shared memory.
template <typename T>
__device__ __forceinline__ void wgmma_scores(float (&d)[32], const uint32_t* a, uint64_t b,
                                             int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS_SCORES("bf16");
  } else {
    PAT_WGMMA_RS_SCORES("f16");
  }
}

#define PAT_WGMMA_SS_SCORES(TYPE)                                             \
  asm volatile(                                                               \
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;"                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " PAT_D32 \
      ", %32, %33, p, 1, 1, 0, 0; }"                                          \
      : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)              \
      : "l"(a), "l"(b), "r"(accumulate))

// The same with A in shared memory, too.
template <typename T>
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b,
                                             int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_SS_SCORES("bf16");
  } else {
    PAT_WGMMA_SS_SCORES("f16");
  }
}

#define PAT_WGMMA_RS32(TYPE)                                                  \
  asm volatile(                                                               \
      "{ .reg .pred p; setp.eq.b32 p, 0, 0;"                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " PAT_D32 \
      ", {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"                               \
      : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PAT_WGMMA_RS64(TYPE)                                                                    \
  asm volatile(                                                                                 \
      "{ .reg .pred p; setp.eq.b32 p, 0, 0;"                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " PAT_D64                  \
      ", {%64,%65,%66,%67}, %68, p, 1, 1, 1; }"                                                 \
      : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24), PAT_F8(d, 32), PAT_F8(d, 40), \
        PAT_F8(d, 48), PAT_F8(d, 56)                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define PAT_WGMMA_RS128(TYPE)                                                                     \
  asm volatile(                                                                                   \
      "{ .reg .pred p; setp.eq.b32 p, 0, 0;"                                                      \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " PAT_D128                   \
      ", {%128,%129,%130,%131}, %132, p, 1, 1, 1; }"                                              \
      : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24), PAT_F8(d, 32), PAT_F8(d, 40),   \
        PAT_F8(d, 48), PAT_F8(d, 56), PAT_F8(d, 64), PAT_F8(d, 72), PAT_F8(d, 80), PAT_F8(d, 88), \
        PAT_F8(d, 96), PAT_F8(d, 104), PAT_F8(d, 112), PAT_F8(d, 120)                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d[64 x N] += A[64 x 16] B[16 x N], A in registers, B in shared memory with N contiguous.
template <typename T>
__device__ __forceinline__ void wgmma_output(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS32("bf16");
  } else {
    PAT_WGMMA_RS32("f16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_output(float (&d)[64], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS64("bf16");
  } else {
    PAT_WGMMA_RS64("f16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_output(float (&d)[128], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS128("bf16");
  } else {
    PAT_WGMMA_RS128("f16");
  }
}

// Descriptor of a shared-memory operand with 128-byte rows and the 128-byte XOR swizzle. `leading`:
// bytes between panels of 64 elements of the contiguous dimension (used where that is N); `stride`:
// bytes between groups of 8 rows.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t leading,
                                                  uint32_t stride) {
  return (uint64_t{1} << 62) | (static_cast<uint64_t>(stride >> 4) << 32) |
         (static_cast<uint64_t>(leading >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif  // PAT_WGMMA

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
