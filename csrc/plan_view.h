// SPDX-License-Identifier: Apache-2.0
// The parts of a plan in a buffer that may hold anything, with the checks that every executor
// makes.
#pragma once

#include <cstdint>

#include "plan.h"

namespace pat {

struct PlanView {
  const PlanHeader* header;
  const Item* items;
  const ItemSegments* item_segments;
  const Member* members;
  const QuerySplits* queries;
  const Segment* segments;

  // The item that is paired with item `index`, or -1.
  int32_t peer_of(int32_t index) const {
    const int32_t paired = index - header->num_wide_items;  // items of pairs before it
    if (paired < 0 || paired >= header->num_paired_items) return -1;
    return paired % 2 == 0 ? index + 1 : index - 1;
  }

  // Calls visit(segment) for all that item `index` reads.
  template <typename Visit>
  void for_each_segment(int32_t index, const Visit& visit) const {
    const auto [first, count] = item_segments[index];
    for (int32_t i = first; i < first + count; ++i) visit(segments[i]);
  }
};

// What an executor's buffers must hold for a plan.
struct PlanReach {
  int64_t last_token = 0;  // where the last of the tokens ends that items read of any sequence,
                           // tails at their least
  int64_t most_rows = 0;   // the most packed rows of an item
};

// The parts of a plan in host memory. Throws std::invalid_argument with the values if the buffer is
// too short or its header damaged.
PlanView view_plan(const void* plan, int64_t plan_bytes);

// Throws std::invalid_argument if a plan is for other heads or draft tokens. `whose`: such as "the
// arguments have".
void check_heads(const PlanHeader& header, const char* whose, int num_q_heads, int num_kv_heads,
                 int draft_tokens);

// Reads all parts. Throws std::invalid_argument with the values unless each item's members and
// tokens are possible ones and each split of each query is written once. The lengths of sequences
// are not known here.
PlanReach check_parts(const PlanView& plan);

}  // namespace pat
