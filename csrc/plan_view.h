// SPDX-License-Identifier: Apache-2.0
// A plan's parts, out of a buffer that may hold anything: what every executor checks of a plan.
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

  // Calls visit(segment) for all that an item reads. Of an item that is no branch that is one
  // segment, for all of its queries and without bound to its length.
  template <typename Visit>
  void for_each_segment(const Item& item, const Visit& visit) const {
    if (item.kv_len != kBranch) {
      const int32_t any = std::numeric_limits<int32_t>::max();
      return visit(Segment{item.row, item.kv_start, item.kv_len, any, 0, item.num_queries});
    }
    for (int32_t i = 0; i < item.partial; ++i) visit(segments[item.row + i]);
  }
};

// The parts of a plan in host memory. Throws std::invalid_argument with the values if the buffer is
// too short or its header damaged; what the parts hold is left to the two functions below.
PlanView view_plan(const void* plan, int64_t plan_bytes);

// Throws std::invalid_argument unless each query's partial slots exist.
void check_splits(const PlanView& plan);

// Throws std::invalid_argument unless an item's members, rows and tokens are possible ones. Members
// themselves and the lengths of sequences are not looked at.
void check_item_shape(const PlanView& plan, int index);

}  // namespace pat
