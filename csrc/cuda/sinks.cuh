// SPDX-License-Identifier: Apache-2.0
// How the kernels join attention sinks: each where it writes the output of a query, and never where
// it writes a partial result.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "state.h"

namespace pat {

// The sink of a query head. `head`: counted on over rows and draft tokens, which have the same
// heads.
__device__ __forceinline__ float sink_of(const Sinks& sinks, int head) {
  const int at = head - sinks.heads * divide(head, sinks.heads_magic);
  // Selected, not branched to, which takes less code (see join_sinks()).
  const uint32_t bits = sinks.type == DType::kF32 ? static_cast<const uint32_t*>(sinks.values)[at]
                                                  : static_cast<const uint16_t*>(sinks.values)[at];
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  const float other = __uint_as_float(sinks.type == DType::kBF16 ? bits << 16 : bits);
  return sinks.type == DType::kF16 ? half : other;
}

}  // namespace pat
