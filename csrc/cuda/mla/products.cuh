// SPDX-License-Identifier: Apache-2.0
// The matrix products of MLA.
#pragma once

#include "cuda/forward/wgmma.cuh"
#include "cuda/mla/shape.cuh"

namespace pat::mla {

#if PAT_WGMMA

// From the operand of a product to that of the next one, which takes 16 further columns of a
// panel of Q, K or weights, or 16 further tokens of V.
inline constexpr uint32_t kNextColumns = 32 >> 4, kNextTokens = 16 * 128 >> 4;

// scores (+)= Q K^T of one panel: 64 rows, 64 tokens, 64 columns.
__device__ __forceinline__ void issue_scores(float (&scores)[32], uint64_t q, uint64_t k,
                                             int accumulate) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wgmma_k_major<__nv_bfloat16>(scores, q + i * kNextColumns, k + i * kNextColumns,
                                 i > 0 ? 1 : accumulate);
  }
}

#endif  // PAT_WGMMA

}  // namespace pat::mla
