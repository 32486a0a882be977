// SPDX-License-Identifier: Apache-2.0
// Checks of what the CPU executor is given: refuses a plan or arguments that it could not run
// safely.
#pragma once

#include <cstdint>

#include "cpu/forward.h"
#include "plan_view.h"

namespace pat {

// A plan proven to fit its arguments, with what the checks found out about its items.
struct CheckedPlan : PlanView {
  int max_item_queries = 0;  // of one item
  int64_t query_tokens = 0;  // sum over items of queries x tokens
};

// Throws std::invalid_argument with the values if an argument makes no sense, if the plan is
// damaged or made for other heads or queries, or if its items do not cover every query's tokens
// exactly as often as they must: each split of each query written once, tokens adding up.
CheckedPlan check_plan(const void* plan, int64_t plan_bytes, const DecodeArgs& args);

}  // namespace pat
