// SPDX-License-Identifier: Apache-2.0
// Groups (PackInfer, section 3.1): branches of queries that need not share anything.
#pragma once

#include <cstdint>

#include "branch.h"
#include "target.h"
#include "tree.h"

namespace pat {

// Writes `tree` into `rooted` below one root of no tokens. For the brancher all queries then share
// something, so that it may put any of them into one branch.
void put_below_root(const PackTree& tree, int32_t num_queries, PackTree& rooted);

// Branches of at most so many tokens. Longer nodes and tails stay items of their own.
BranchCut cut_of_groups(const Target& target, int32_t tokens);

}  // namespace pat
