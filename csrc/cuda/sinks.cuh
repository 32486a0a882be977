// SPDX-License-Identifier: Apache-2.0
// How the kernels join attention sinks: each where it writes the output of a query, and never where
// it writes a partial result.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "state.h"

namespace pat {

// The state over all that a query head attends to, from that over all its tokens. `head`: counted
// on over rows and draft tokens, which have the same heads.
__device__ __forceinline__ SoftmaxState complete(const Sinks& sinks, int head,
                                                 SoftmaxState tokens) {
  const int at = head - sinks.heads * divide(head, sinks.heads_magic);
  float sink;
  if (sinks.type == SinkType::kF32) {
    sink = static_cast<const float*>(sinks.values)[at];
  } else if (sinks.type == SinkType::kBF16) {
    sink = __bfloat162float(static_cast<const __nv_bfloat16*>(sinks.values)[at]);
  } else {
    sink = __half2float(static_cast<const __half*>(sinks.values)[at]);
  }
  return with_sink(tokens, sink);
}

}  // namespace pat
