// SPDX-License-Identifier: Apache-2.0
// The PTX of Hopper's asynchronous matrix products (wgmma), one function per instruction. Operands
// are bf16, fp16 or e4m3. A row of an operand is 32 bytes for one instruction: 16 columns of 16
// bits or 32 of 8 bits.
#pragma once

#include "cuda/ptx.cuh"

namespace pat {

// Stands for float8_e4m3fn where the type of operands is a template parameter.
struct E4M3 {};

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
// Makes what was written to shared memory visible to the asynchronous matrix units.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The registers of a result, d[0] to d[N - 1], as operands 0 to N - 1 and as a list of them.
#define PAT_D8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PAT_D32(i) PAT_D8(i), PAT_D8(i + 8), PAT_D8(i + 16), PAT_D8(i + 24)
#define PAT_D64(i) PAT_D32(i), PAT_D32(i + 32)
#define PAT_D128(i) PAT_D64(i), PAT_D64(i + 64)
#define PAT_R32                                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define PAT_R64                                                                       \
  PAT_R32                                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
  "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PAT_R128                                                                          \
  PAT_R64                                                                                 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"     \
  "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,"  \
  "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120," \
  "%121,%122,%123,%124,%125,%126,%127"

// d[64 x N] = A B + (PREDICATE ? d : 0). SHAPE: N and how many columns of A. A and B: their places
// among the operands. ORDERS: which dimension of an operand of 16 bits is contiguous, 0: K, that
// of the sum, 1: N; of A only where it is in shared memory, and of e4m3, always K, not at all.
#define PAT_PRODUCT(PREDICATE, SHAPE, TYPE, REGISTERS, A, B, ORDERS)                            \
  "{ .reg .pred p; " PREDICATE "; wgmma.mma_async.sync.aligned.m64" SHAPE ".f32." TYPE "." TYPE \
  " {" REGISTERS "}, " A ", " B ", p, 1, 1" ORDERS "; }"
#define PAT_IN_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define PAT_WGMMA_RS(SHAPE, TYPE, ORDERS)                                                      \
  asm volatile(PAT_PRODUCT("setp.ne.b32 p, %37, 0", SHAPE, TYPE, PAT_R32, "{%32,%33,%34,%35}", \
                           "%36", ORDERS)                                                      \
               : PAT_D32(0)                                                                    \
               : PAT_IN_REGISTERS, "r"(accumulate))
#define PAT_WGMMA_SS(SHAPE, TYPE, ORDERS)                                                       \
  asm volatile(PAT_PRODUCT("setp.ne.b32 p, %34, 0", SHAPE, TYPE, PAT_R32, "%32", "%33", ORDERS) \
               : PAT_D32(0)                                                                     \
               : "l"(a), "l"(b), "r"(accumulate))

// d[64 x 64] (+)= A[64 x 32 bytes] B[64 x 32 bytes]^T, A in registers, B in shared memory.
template <typename T>
__device__ __forceinline__ void wgmma_k_major(float (&d)[32], const uint32_t* a, uint64_t b,
                                              int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS("n64k16", "bf16", ", 0");
  } else if constexpr (std::is_same_v<T, __half>) {
    PAT_WGMMA_RS("n64k16", "f16", ", 0");
  } else {
    PAT_WGMMA_RS("n64k32", "e4m3", "");
  }
}

// The same with A in shared memory, too.
template <typename T>
__device__ __forceinline__ void wgmma_k_major(float (&d)[32], uint64_t a, uint64_t b,
                                              int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_SS("n64k16", "bf16", ", 0, 0");
  } else if constexpr (std::is_same_v<T, __half>) {
    PAT_WGMMA_SS("n64k16", "f16", ", 0, 0");
  } else {
    PAT_WGMMA_SS("n64k32", "e4m3", "");
  }
}

#define PAT_WGMMA_OUTPUT(N, D, A, B)                                                        \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                         \
    asm volatile(PAT_PRODUCT("setp.eq.b32 p, 0, 0", N "k16", "bf16", PAT_R##D, A, B, ", 1") \
                 : PAT_D##D(0)                                                              \
                 : PAT_IN_REGISTERS);                                                       \
  } else {                                                                                  \
    asm volatile(PAT_PRODUCT("setp.eq.b32 p, 0, 0", N "k16", "f16", PAT_R##D, A, B, ", 1")  \
                 : PAT_D##D(0)                                                              \
                 : PAT_IN_REGISTERS);                                                       \
  }

// d[64 x N] += A[64 x 16] B[16 x N], A in registers, B in shared memory with N contiguous; bf16 and
// fp16 only. N is twice the registers of d: 64, 128 or 256.
template <typename T, int kCount>
__device__ __forceinline__ void wgmma_output(float (&d)[kCount], const uint32_t* a, uint64_t b) {
  static_assert(kCount == 32 || kCount == 64 || kCount == 128);
  if constexpr (kCount == 32) {
    PAT_WGMMA_OUTPUT("n64", 32, "{%32,%33,%34,%35}", "%36")
  } else if constexpr (kCount == 64) {
    PAT_WGMMA_OUTPUT("n128", 64, "{%64,%65,%66,%67}", "%68")
  } else {
    PAT_WGMMA_OUTPUT("n256", 128, "{%128,%129,%130,%131}", "%132")
  }
}

// Descriptor of a shared-memory operand whose rows have kRowBytes bytes, with the XOR swizzle of
// that width: of 16-byte chunks within 8 rows. `leading`: bytes between panels of the contiguous
// dimension (used where that is N); `stride`: bytes between groups of 8 rows.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t leading = 0,
                                                  uint32_t stride = 8 * kRowBytes) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32);
  return (kSwizzle << 62) | (static_cast<uint64_t>(stride >> 4) << 32) |
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

}  // namespace pat
