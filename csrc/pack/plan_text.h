// SPDX-License-Identifier: Apache-2.0
// A plan as people read it: what Python's repr() and str() of a plan give.
#pragma once

#include <string>

#include "emit.h"

namespace pat {

// One line: queries, heads, items, partial results, and why the plan is degraded if it is.
std::string plan_line(const Plan& plan);

// plan_line(), then the pack tree and the items, a line each and `max_lines` lines of either at
// most; what was left out is counted.
std::string plan_text(const Plan& plan, int max_lines);

}  // namespace pat
