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

#define PAT_PRODUCT(SHAPE, KIND) "wgmma.mma_async.sync.aligned.m64" SHAPE KIND " "
#define PAT_BF16 "k16.f32.bf16.bf16"
#define PAT_F16 "k16.f32.f16.f16"
#define PAT_E4M3 "k32.f32.e4m3.e4m3"

// Which dimension of an operand is contiguous: K, that of the sum, or N, that of the result. Of
// e4m3 it is always K, so its instruction has no flag for that.
#define PAT_K_MAJOR ", 0"
#define PAT_N_MAJOR ", 1"
#define PAT_NO_FLAGS ""

#define PAT_WGMMA_RS_K_MAJOR(KIND, B_ORDER)                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;" PAT_PRODUCT("n64", KIND) PAT_D32 \
               ", {%32,%33,%34,%35}, %36, p, 1, 1" B_ORDER "; }"                         \
               : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// d[64 x 64] (+)= A[64 x 32 bytes] B[64 x 32 bytes]^T, A in registers, B in shared memory.
template <typename T>
__device__ __forceinline__ void wgmma_k_major(float (&d)[32], const uint32_t* a, uint64_t b,
                                              int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_RS_K_MAJOR(PAT_BF16, PAT_K_MAJOR);
  } else if constexpr (std::is_same_v<T, __half>) {
    PAT_WGMMA_RS_K_MAJOR(PAT_F16, PAT_K_MAJOR);
  } else {
    PAT_WGMMA_RS_K_MAJOR(PAT_E4M3, PAT_NO_FLAGS);
  }
}

#define PAT_WGMMA_SS_K_MAJOR(KIND, ORDERS)                                               \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;" PAT_PRODUCT("n64", KIND) PAT_D32 \
               ", %32, %33, p, 1, 1" ORDERS "; }"                                        \
               : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)                \
               : "l"(a), "l"(b), "r"(accumulate))

// The same with A in shared memory, too.
template <typename T>
__device__ __forceinline__ void wgmma_k_major(float (&d)[32], uint64_t a, uint64_t b,
                                              int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    PAT_WGMMA_SS_K_MAJOR(PAT_BF16, PAT_K_MAJOR PAT_K_MAJOR);
  } else if constexpr (std::is_same_v<T, __half>) {
    PAT_WGMMA_SS_K_MAJOR(PAT_F16, PAT_K_MAJOR PAT_K_MAJOR);
  } else {
    PAT_WGMMA_SS_K_MAJOR(PAT_E4M3, PAT_NO_FLAGS);
  }
}

#define PAT_WGMMA_RS32(KIND)                                                           \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;" PAT_PRODUCT("n64", KIND) PAT_D32 \
               ", {%32,%33,%34,%35}, %36, p, 1, 1" PAT_N_MAJOR "; }"                   \
               : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24)              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PAT_WGMMA_RS64(KIND)                                                              \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;" PAT_PRODUCT("n128", KIND) PAT_D64   \
               ", {%64,%65,%66,%67}, %68, p, 1, 1" PAT_N_MAJOR "; }"                      \
               : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24), PAT_F8(d, 32), \
                 PAT_F8(d, 40), PAT_F8(d, 48), PAT_F8(d, 56)                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PAT_WGMMA_RS128(KIND)                                                                 \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;" PAT_PRODUCT("n256", KIND) PAT_D128      \
               ", {%128,%129,%130,%131}, %132, p, 1, 1" PAT_N_MAJOR "; }"                     \
               : PAT_F8(d, 0), PAT_F8(d, 8), PAT_F8(d, 16), PAT_F8(d, 24), PAT_F8(d, 32),     \
                 PAT_F8(d, 40), PAT_F8(d, 48), PAT_F8(d, 56), PAT_F8(d, 64), PAT_F8(d, 72),   \
                 PAT_F8(d, 80), PAT_F8(d, 88), PAT_F8(d, 96), PAT_F8(d, 104), PAT_F8(d, 112), \
                 PAT_F8(d, 120)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define PAT_OF_16_BITS(RS)                          \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    RS(PAT_BF16);                                   \
  } else {                                          \
    RS(PAT_F16);                                    \
  }

// d[64 x N] += A[64 x 16] B[16 x N], A in registers, B in shared memory with N contiguous; bf16 and
// fp16 only. N is twice the registers of d: 64, 128 or 256.
template <typename T, int kCount>
__device__ __forceinline__ void wgmma_output(float (&d)[kCount], const uint32_t* a, uint64_t b) {
  static_assert(kCount == 32 || kCount == 64 || kCount == 128);
  if constexpr (kCount == 32) {
    PAT_OF_16_BITS(PAT_WGMMA_RS32)
  } else if constexpr (kCount == 64) {
    PAT_OF_16_BITS(PAT_WGMMA_RS64)
  } else {
    PAT_OF_16_BITS(PAT_WGMMA_RS128)
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
