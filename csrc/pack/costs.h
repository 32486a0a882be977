// SPDX-License-Identifier: Apache-2.0
// Numbers of the planner that were fitted to measured times or chosen by them. Those of Costs are
// of a Hopper at head dim 128 and bf16; `python -m benchmarks.kernel.fit` times plans on the GPU at
// hand and fits them anew. The cuts' own numbers stand in kCuts (cut.h), the packer's in
// sglang_pat/gpus.py.
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

// What the judge (judge.h) charges. On a GPU other than a Hopper and on a CPU items cost what
// Target's rates say, and rates and factors below do not hold.
struct Costs {
  ItemCost light{0.904, 0.606};
  ItemCost heavy{0.937, 0.823};  // and a wide item, on both halves
  ItemCost branch{0.161, 0.984};
  ItemCost joint{0.72, 0.653};    // any item of a joint plan
  double launch_us = 8.24;        // what all plans of a batch share
  double round_us = 0.569;        // a round of the merge
  double split_us = 0.0517;       // each split of the query that has the most
  double partial_rate = 3.72e12;  // bytes/s of partials, written and read
  double reread_rate = 184e12;    // bytes/s of tokens that were read before: from the L2
  double beside = 0.294;          // a tile takes so much longer while the SM's other half reads
  // Any item of keys of more than 512 numbers: row tiles of 64 rows, however many are used, which
  // the matrix units bound. Fitted by hand to the plans of 117 batches of 8, 16 and 20 heads.
  ItemCost long_key{1.5, 2.0};
  // A tile's time, as a multiple of that at head dim 128 in bf16.
  double head_dim_64 = 0.647;
  double head_dim_256 = 1.6;
  double fp8 = 0.927;
};

// The values of Costs in their order, as the program that fits them names them.
inline constexpr std::array kCostNames = {
    "light_start",   "light_tile",   "heavy_start",  "heavy_tile", "branch_start",
    "branch_tile",   "joint_start",  "joint_tile",   "launch_us",  "round_us",
    "split_us",      "partial_rate", "reread_rate",  "beside",     "long_key_start",
    "long_key_tile", "head_dim_64",  "head_dim_256", "fp8"};
static_assert(sizeof(Costs) == kCostNames.size() * sizeof(double));

// Chosen: tokens that a pair of branches must have in common. With 256 pairs gain little.
inline constexpr int32_t kLeastCommonTokens = 320;
// Pairs run before all other items, though branches and light items run well beside each other. So
// there are none if the others read more than one part in so many of what the branches read.
inline constexpr int64_t kBranchesToOthers = 16;
// Work units that take an SM each, wide ones or pairs, must have one for so many of the SMs.
inline constexpr int64_t kFilledPercent = 80;
// Pieces of a pack, at most.
inline constexpr int64_t kMostPieces = 512;
// Steps of a simulation, about: with more the plans are hardly less off.
inline constexpr double kSteps = 24.0;
// Tokens that a tail may grow before its plan is made anew: one part in so many of its length, but
// at least the next so many; of a branch just so many, as its items then no longer take equally
// long.
inline constexpr int32_t kTailToHeadroom = 4;
inline constexpr int32_t kMinHeadroom = 128;
inline constexpr int32_t kBranchHeadroom = 64;

}  // namespace pat
