// SPDX-License-Identifier: Apache-2.0
// The parts of a plan in a buffer that may hold anything, with the checks that every executor
// makes.
#pragma once

#include <cstdint>
#include <limits>

#include "plan.h"

namespace pat {

struct PlanView {
  const PlanHeader* header;
  const Item* items;
  const Member* members;
  const QuerySplits* queries;
  const Segment* segments;

  // Calls visit(segment) for all that an item reads. An ordinary item reads one segment: for all of
  // its queries, with room for any length.
  template <typename Visit>
  void for_each_segment(const Item& item, const Visit& visit) const {
    if (!is_branch(item)) {
      const int32_t any = std::numeric_limits<int32_t>::max();
      return visit(
          Segment{source_query(item), item.kv_start, item.kv_len, any, 0, item.num_queries});
    }
    for (int32_t i = 0; i < num_segments(item); ++i) visit(segments[first_segment(item) + i]);
  }
};

// The parts of a plan in host memory. Throws std::invalid_argument with the values if the buffer is
// too short or its header damaged. The two functions below check what the parts hold.
PlanView view_plan(const void* plan, int64_t plan_bytes);

// Throws std::invalid_argument unless each query's partial slots exist.
void check_splits(const PlanView& plan);

// Throws std::invalid_argument unless an item's members, queries and tokens are possible ones. Does
// not check the members themselves, nor the lengths of sequences.
void check_item_shape(const PlanView& plan, int index);

}  // namespace pat
