// SPDX-License-Identifier: Apache-2.0
// Attention sinks as the CPU executor reads them.
#pragma once

#include "cpu/forward.h"
#include "cpu/numbers.h"
#include "state.h"

namespace pat {

inline float sink_of(const DecodeArgs& args, int head) {
  switch (args.sink_dtype) {
    case DType::kBF16:
      return to_float(static_cast<const BF16*>(args.sinks)[head]);
    case DType::kF16:
      return to_float(static_cast<const F16*>(args.sinks)[head]);
    default:
      return static_cast<const float*>(args.sinks)[head];
  }
}

// The state over all that a query head attends to, from that over all its tokens.
inline SoftmaxState complete(const DecodeArgs& args, int head, SoftmaxState tokens) {
  return args.sinks ? with_sink(tokens, sink_of(args, head)) : tokens;
}

}  // namespace pat
