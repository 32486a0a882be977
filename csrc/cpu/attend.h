// SPDX-License-Identifier: Apache-2.0
// What the threads of the CPU executor run.
#pragma once

#include <cstdint>

#include "cpu/forward.h"
#include "plan_view.h"
#include "state.h"

namespace pat {

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
