// SPDX-License-Identifier: Apache-2.0
// Groups (PackInfer, section 3.1): branches of queries that need not share anything.
#pragma once

#include <array>
#include <cstdint>

#include "branch.h"
#include "target.h"
#include "tree.h"

namespace pat {

// Writes `tree` into `rooted` below one root of no tokens. For the brancher all queries then share
// something, so that it may put any of them into one branch.
void put_below_root(const PackTree& tree, int32_t num_queries, PackTree& rooted);

// Groups of at most so many tokens are weighed against the default's other plans, if each node and
// tail of the batch fits one: with longer ones beside them, groups were slower in many batches.
inline constexpr std::array<int32_t, 2> kGroupTokens = {1024, 2048};
// Groups are taken if the other plan is simulated to take more than so many times as long. The
// simulation is off by as much.
inline constexpr double kGroupsGain = 1.05;
// Queries of a batch that may be grouped, at least.
inline constexpr int32_t kLeastGrouped = 8;

// Branches of at most so many tokens. Longer nodes and tails stay items of their own.
BranchCut cut_of_groups(const Target& target, int32_t tokens);

}  // namespace pat
