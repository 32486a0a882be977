// SPDX-License-Identifier: Apache-2.0
// Decode attention of a plan on a CUDA device: snapshot of the slots, forward, merge. Every
// function only launches kernels on `stream`: no allocation, no synchronisation, so all of it can
// be captured in a CUDA graph, which then serves every plan that fits the buffers. Errors of a
// launch and arguments that the kernels do not support throw std::runtime_error and
// std::invalid_argument.
#pragma once

#include <cstdint>

#include "plan.h"

namespace pat {

enum class CudaType : int { kBF16 = 1, kF16 = 2 };

// How the forward is launched: one persistent kernel for all row tiles, one kernel a row tile on
// streams of their own (as the paper has it), or the same kernels one after the other.
enum class Launch : int { kQueue = 0, kStreams = 1, kSerial = 2 };

// The tokens of all branches, as the snapshot lists them.
struct BranchList {
  int32_t* slots;  // [max_branch_tokens], 16-byte aligned
  uint16_t* rows;  // [max_branch_tokens], 16-byte aligned: see kRowsCount
  // The packed rows of the branch that attend to a token: first | count << kRowsCount.
  static constexpr int kRowsCount = 8;
};

struct CudaDecodeArgs {
  const PlanHeader* plan;  // device memory, 16-byte aligned
  const void* q;           // [B, Hq, D], strides in elements, last dimension contiguous
  int64_t q_stride_query, q_stride_head;
  const void* k_cache;  // [slots, Hkv, D]
  int64_t k_stride_slot, k_stride_head;
  const void* v_cache;  // [slots, Hkv, D]
  int64_t v_stride_slot, v_stride_head;
  const int32_t* slots;  // [B, slots_stride] slot of a token position: the snapshot
  int64_t slots_stride;
  BranchList branches;
  void* out;  // [B, Hq, D]
  int64_t out_stride_query, out_stride_head;
  float* lse;          // [B, Hq] base 2, or null
  void* partials;      // [max_partials, Hq, D] of float or, partial_bytes == 2, of q's type
  float* partial_lse;  // [max_partials, Hq] base 2
  int32_t* queue;      // kQueueInts zeros; the kernels leave zeros
  uint64_t* trace;     // null, or zeros, 4 words and 4 for each consumer warp of each unit
  int32_t num_rows;    // B; the plan may cover fewer, the others get zeros
  int32_t head_dim, num_q_heads, num_kv_heads;
  int32_t partial_bytes;  // 4 or 2
  CudaType type;
  Launch launch;
  float scale;
  float logit_cap;  // 0: none; else logits are cap * tanh(logit / cap)
};

inline constexpr int kQueueInts = 64;
inline constexpr int kMaxGroup = 16;  // query heads a KV head

// Bytes of shared memory that a block of the forward needs at least. Throws std::invalid_argument
// for a head dim that has no kernel.
int min_shared_bytes(int head_dim);

// Throws std::invalid_argument for what the kernels do not have. Looks at sizes, strides and
// numbers only, so that it needs no device.
void check_decode_args(const CudaDecodeArgs& args);

// Forward of all items, then the merge of queries with several splits.
void decode_cuda(const CudaDecodeArgs& args, void* stream);

struct SnapshotArgs {
  PlanHeader* plan;             // device memory; Item::tokens are written
  const int32_t* req_to_token;  // [R, req_to_token_stride]
  int64_t req_to_token_stride;
  const void* rows;  // [B] row of req_to_token; int32 or int64
  int32_t rows_bytes;
  int32_t num_rows;      // B
  const void* seq_lens;  // [B] int32 or int64
  int32_t seq_lens_bytes;
  int32_t* slots;  // [B, slots_stride]
  int64_t slots_stride;
  BranchList branches;
};

// Copies the slots of every token that the plan's items read, and writes into the plan how many
// tokens each item has. Of a tail in a branch, no more than its room. Once a step.
void snapshot_cuda(const SnapshotArgs& args, void* stream);

}  // namespace pat
