// SPDX-License-Identifier: Apache-2.0
// The CPU executor of a plan: forward of all items, merge of the partials (PAT sections 6 and 7).
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "plan_view.h"
#include "state.h"

namespace pat {

// Rows or slots of heads; strides count elements, and the last dimension is contiguous.
struct Strided {
  void* data;  // null: none
  int64_t stride_row, stride_head;
};

// One step of one layer. The draft tokens of a query (plan.h) are neighbouring rows of q, out and
// lse.
struct DecodeArgs {
  Strided q;  // [num_queries * draft_tokens, num_q_heads, head_dim]
  // The last head_dim - v_head_dim numbers of q's rows, which then have v_head_dim, or none.
  Strided q_rope;
  Strided k_cache;  // [num_slots, num_kv_heads, head_dim]
  Strided v_cache;  // [num_slots, num_kv_heads, v_head_dim], may be the first part of k_cache
  int64_t num_slots;
  const int32_t* req_to_token;  // [table_rows, table_width] slot ids
  int64_t table_stride, table_rows, table_width;
  const int64_t* rows;      // [num_queries] row of req_to_token
  const int64_t* seq_lens;  // [num_queries] tokens, the draft tokens included
  Strided out;              // [num_queries * draft_tokens, num_q_heads, v_head_dim]
  float* lse;               // [num_queries * draft_tokens, num_q_heads], base 2, or null
  // [num_queries, draft_tokens], or null where each draft token attends to those before it. Bit j:
  // the draft token attends to draft token j of its query.
  const uint64_t* draft_masks;
  const void* sinks;  // [num_q_heads] of sink_dtype, or null: see with_sink()
  int num_queries, draft_tokens, num_q_heads, num_kv_heads, head_dim, v_head_dim;
  DType dtype;             // of q and out
  KVDType kv_dtype;        // of k_cache and v_cache
  float k_scale, v_scale;  // 1 unless kE4M3
  float scale;
  float logit_cap;      // 0 = off; else logit = cap * tanh(scale * (q . k) / cap)
  DType partial_dtype;  // kF32 or kBF16
  DType sink_dtype;     // of sinks
  int num_threads;
};

// Executes the plan at `plan` (at most `plan_bytes` long, see plan.h) and writes every element of
// `out`, and of `lse` unless null: 0 and -inf for a query without tokens, or its sink. The result
// does not depend on num_threads. Calls from several threads run one after another.
//
// Throws std::invalid_argument, before anything is written, for arguments that make no sense, a
// plan that is damaged or was made for other heads, queries or lengths; and, with `out` undefined,
// for a slot id outside the pool.
void decode_cpu(const void* plan, int64_t plan_bytes, const DecodeArgs& args);

// What the threads of a call run (attend.cpp).

// One checked decode call with its buffers.
struct DecodeJob {
  const DecodeArgs& args;
  const PlanView& plan;
  int head_group;  // query heads per KV head
  int group;       // packed rows of a query and KV head: head_group for each draft token
  void* partials;  // [num_partials, draft_tokens, num_q_heads, v_head_dim] of args.partial_dtype
  float* partial_lse;  // [num_partials, draft_tokens, num_q_heads], base 2
};

// Floats of scratch memory that an item of `rows` packed rows needs.
int64_t scratch_floats(const DecodeArgs& args, int64_t rows);

// Attends the packed rows of one item and KV head to the item's tokens and writes outputs or
// partials. Returns false, having read no K/V there, if the item names a slot outside the pool.
bool run_item(const DecodeJob& job, int item, int kv_head, float* scratch);

// Joins the partials of the query's packed rows for this KV head, in order of position.
void merge_query(const DecodeJob& job, int query, int kv_head, float* scratch);

// The state over all that a query head attends to, its sink included, from that over its tokens.
SoftmaxState complete(const DecodeArgs& args, int head, SoftmaxState tokens);

}  // namespace pat
