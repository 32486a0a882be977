// SPDX-License-Identifier: Apache-2.0
// Every number of the planner that was fitted to measured times or chosen by them. They are of a
// Hopper at head dim 128 and bf16; `python -m benchmarks.kernel.fit` times plans on the GPU at hand
// and fits those of Costs anew. All times are microseconds.
#pragma once

#include <array>
#include <cstdint>

namespace pat {

// What an item takes before its first KV tile of 64 tokens, and for each tile while memory keeps
// up.
struct ItemCost {
  double start_us;
  double tile_us;
};

// What the judge (judge.h) charges. A light item's warps ask for the tokens of the next one early.
struct Costs {
  ItemCost narrow{1.109, 0.442};  // an item that one warp runs
  ItemCost single{0.490, 0.630};  // light, of one query
  ItemCost light{0.954, 0.594};   // light, of several
  ItemCost heavy{0.721, 0.756};
  ItemCost branch{0.968, 0.763};
  ItemCost paired{1.077, 0.808};  // one branch of a pair
  ItemCost wide{1.442, 0.743};
  ItemCost joint{1.318, 0.527};   // any item of a joint plan
  double launch_us = 10.2;        // what all plans of a batch share
  double round_us = 0.496;        // a round of the merge
  double split_us = 0.0131;       // each split of the query that has the most
  double segment_us = 0.067;      // each segment of a branch
  double partial_rate = 4.51e12;  // bytes/s of partials, written and read
  double reread_rate = 62.3e12;   // bytes/s of tokens that were read before: from the L2
  double masked = 0.0526;         // a masked tile takes so much longer, as a part of its time
  double beside = 0.356;          // the same of a tile while the SM's other half reads
  // An item that follows another on its half starts so many times as slowly.
  double light_later = 0.575;
  double heavy_later = 1.18;
  // A tile's time, as a multiple of that at head dim 128 in bf16.
  double head_dim_64 = 0.55;
  double head_dim_256 = 1.6;
  double fp8 = 0.75;
};

// The values of Costs in their order, with these names, as the program that fits them sees them.
inline constexpr std::array kCostNames = {
    "narrow_start", "narrow_tile", "single_start", "single_tile",  "light_start",  "light_tile",
    "heavy_start",  "heavy_tile",  "branch_start", "branch_tile",  "paired_start", "paired_tile",
    "wide_start",   "wide_tile",   "joint_start",  "joint_tile",   "launch_us",    "round_us",
    "split_us",     "segment_us",  "partial_rate", "reread_rate",  "masked",       "beside",
    "light_later",  "heavy_later", "head_dim_64",  "head_dim_256", "fp8"};
static_assert(sizeof(Costs) == kCostNames.size() * sizeof(double));

// Chosen: what a pair of branches must have in common. With 256 tokens pairs gain little.
inline constexpr int32_t kLeastCommonTokens = 320;
// Pairs run before all other items, though branches and light items run well beside each other. So
// there are none if the others read more than one part in so many of what the branches read.
inline constexpr int64_t kBranchesToOthers = 16;
// Tokens that a tail may grow before its plan is made anew: at least so many, of a branch just so
// many, as its items then no longer take equally long.
inline constexpr int32_t kMinHeadroom = 128;
inline constexpr int32_t kBranchHeadroom = 64;

}  // namespace pat
