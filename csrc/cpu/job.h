// SPDX-License-Identifier: Apache-2.0
// What forward.cpp hands to the vectorised kernels of one instruction set. Plain data, no inline
// functions: an inline function shared with forward_isa.cpp could be linked from its AVX copy.
#pragma once

#include <cstdint>

#include "cpu/forward.h"
#include "plan.h"

namespace pat {

// One checked decode call with its buffers.
struct DecodeJob {
  DecodeArgs args;
  const Item* items;
  const ItemSegments* item_segments;
  const Member* members;
  const QuerySplits* queries;
  const Segment* segments;
  int head_group;  // query heads per KV head
  int group;       // packed rows of a query and KV head: head_group for each draft token
  void* partials;  // [num_partials, draft_tokens, num_q_heads, v_head_dim] of args.partial_dtype
  float* partial_lse;  // [num_partials, draft_tokens, num_q_heads], base 2
};

// Largest number of tokens that a kernel holds at once.
inline constexpr int kBlockTokens = 64;
// Widest tile of packed rows that a kernel pads to.
inline constexpr int kMaxChunkRows = 32;

struct CpuKernels {
  // Attends the packed rows of one item and KV head to the item's tokens and writes outputs or
  // partials. Returns false, having read no K/V there, if the item names a slot outside the pool.
  bool (*run_item)(const DecodeJob& job, int item, int kv_head, float* scratch);
  // Joins the partials of the query's packed rows for this KV head, in order of position.
  void (*merge)(const DecodeJob& job, int query, int kv_head, float* scratch);
};

namespace base {
extern const CpuKernels kKernels;
}
#ifdef PAT_ISA_X86
namespace v3 {
extern const CpuKernels kKernels;
}
namespace v4 {
extern const CpuKernels kKernels;
}
#endif

}  // namespace pat
