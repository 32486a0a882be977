// SPDX-License-Identifier: Apache-2.0
// Is a plan sound, and does it fit the buffers it is to be copied to? Kernels trust what passed.
#pragma once

#include <cstdint>

namespace pat {

struct PlanRoom {
  int64_t bytes;
  int32_t max_queries, max_partials, max_context, max_branch_tokens, max_list_tokens;
  int32_t num_q_heads, num_kv_heads, draft_tokens;
};

// Both throw std::invalid_argument that names what was given and what fits. Host memory only.
void check_plan_fits(const void* plan, int64_t plan_bytes, const PlanRoom& room);
// The same of a plan that this process made, in constant time: `last_token` and `most_rows` are the
// Plan's (emit.h).
void check_made_plan_fits(const void* plan, int64_t plan_bytes, int64_t last_token,
                          int64_t most_rows, const PlanRoom& room);

}  // namespace pat
