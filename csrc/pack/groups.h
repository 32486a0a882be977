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

// Tokens of a group, at most, where the default's plan may be modelled to be slower. It has no node
// and no tail outside of its groups then: only such plans were faster in nearly all batches.
inline constexpr int32_t kGroupTokens[] = {1024, 2048};
// The plan with groups must be modelled to be that much faster: what the model is off by.
inline constexpr double kGroupsGain = 1.05;
// Queries of a batch that may be grouped, at least.
inline constexpr int32_t kLeastGrouped = 8;

// The target's rules for packs and branches, but for groups of so many tokens.
Target with_groups(const Target& target, int32_t tokens);
// Branches of at most split_tokens tokens. Longer nodes and tails stay items of their own.
BranchCut cut_of_groups(const Target& target);

}  // namespace pat
