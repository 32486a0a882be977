// SPDX-License-Identifier: Apache-2.0
// What a plan is made for: the machine, the model's heads and the rules to use. A value type, so
// that a machine without a GPU can make and test an H200's plan.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "../check.h"
#include "../plan.h"

namespace pat {

// Numbers of the planner that were fitted to measured times or chosen by them. Those of Costs are
// of a Hopper at head dim 128 and bf16; `python -m benchmarks.kernel.fit` times plans on the GPU at
// hand and fits them anew. The cuts' own numbers stand in kCuts (cut.h), the packer's in
// sglang_pat/gpus.py.

// What an item takes before its first KV tile of 64 tokens, and for each tile while memory keeps
// up.
struct ItemCost {
  double start_us;
  double tile_us;
};

// What the judge (judge.h) charges. On a GPU other than a Hopper and on a CPU items cost what
// Target's rates say; of the numbers below, launch_us, round_us, split_us and beside hold there
// too.
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
inline constexpr int32_t kLeastHeadroom = std::min(kMinHeadroom, kBranchHeadroom);

inline constexpr uint32_t kAllCuts = UINT32_MAX;

struct Target {
  int32_t num_sms;  // SMs that run items; of a CPU its threads
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t draft_tokens;  // of a query (plan.h): 1 in a decode step
  int32_t head_dim;
  int32_t v_head_dim;
  // Numbers of a token that the cache holds for a KV head: those of K and V, or fewer where V is a
  // part of K.
  int64_t token_values;
  int32_t kv_bytes;        // bytes of a K or V element
  int32_t partial_bytes;   // bytes of an element of a partial output: 4 or 2
  double bytes_per_s;      // memory bandwidth of all SMs together
  double flops_per_s;      // matrix rate of all SMs together
  double item_overhead_s;  // fixed time of an item
  double sm_speedup;       // K/V rate of an SM that has the memory to itself, over its share; >= 1
  int32_t items_per_sm;    // that an SM runs side by side, 1 or 2; a wide item takes all of it
  double reread_weight;    // the packer's: cost of a token read again, over a first read, in (0, 1]
  bool hopper;             // whether items cost what `costs` says
  Costs costs;
  std::vector<int32_t> row_tiles;  // ascending, packed rows
  std::vector<int32_t> kv_tiles;   // ascending, tokens
  int32_t max_queries;             // capacities of the executor's buffers
  int32_t max_items;
  int32_t max_partials;
  int32_t max_segments;       // of branches
  int32_t max_branch_tokens;  // of the snapshot's list of their tokens
  uint32_t cuts = kAllCuts;   // bit i: whether cut i of kCuts (cut.h) is weighed; 0: no splits
  bool by_paper = false;      // PAT to the letter instead of the cuts

  // Packed rows of a query and KV head.
  int32_t group() const { return draft_tokens * (num_q_heads / num_kv_heads); }
  // Queries of one KV head that fit the largest row tile.
  int32_t max_tile_queries() const {
    const int32_t queries = row_tiles.back() / group();
    return queries > 0 ? queries : 1;
  }

  // Row tiles, hence items, that `queries` queries take.
  int64_t num_row_tiles(int64_t queries) const {
    const int64_t most = max_tile_queries();
    return (queries + most - 1) / most;
  }

  // Places in which all SMs run items at once, and how many of them an item of a row tile takes.
  // These are no slots of the K/V cache.
  double slots() const { return static_cast<double>(num_sms) * items_per_sm; }
  int32_t slots_of(int32_t row_tile) const { return row_tile > kWideRows ? items_per_sm : 1; }
  // Whether both halves of an SM work on each of a plan's items (PlanHeader::joint): where all are
  // heavy and there is at most one for each SM, whose other half would have nothing to do.
  bool runs_jointly(int64_t items, int64_t heavy_items) const {
    return items_per_sm == 2 && items > 0 && items == heavy_items &&
           items * num_kv_heads <= num_sms;
  }

  // Whether work units that take an SM each, wide ones or pairs, are enough to be worth it.
  bool fills_sms(int64_t units) const { return 100 * units >= kFilledPercent * num_sms; }
  // Packed rows of the smallest row tile that holds `queries` queries, else of the largest: a pack
  // of more queries than fit takes several row tiles.
  int32_t row_tile_for(int32_t queries) const {
    const int64_t rows = int64_t{queries} * group();
    for (const int32_t tile : row_tiles) {
      if (tile >= rows) return tile;
    }
    return row_tiles.back();
  }

  // The same target without the row tile of wide items, if it has that and can do without.
  Target without_wide() const {
    Target without = *this;
    auto& tiles = without.row_tiles;
    const int32_t needed = std::max(kWideRows, group());
    if (tiles.size() > 1 && tiles.back() == 2 * kWideRows && tiles[tiles.size() - 2] >= needed) {
      tiles.pop_back();
    }
    return without;
  }

  // K and V bytes of one token and KV head.
  double token_bytes() const { return static_cast<double>(token_values) * kv_bytes; }
  // Bytes that one partial of a query costs per KV head: written once and read once, LSE included.
  double partial_cost_bytes() const {
    return 2.0 * group() * (static_cast<double>(v_head_dim) * partial_bytes + 4.0);
  }

  // Throws std::invalid_argument that names the field.
  void validate() const {
    for (const auto& [name, value] : {std::pair<const char*, int64_t>{"num_sms", num_sms},
                                      {"head_dim", head_dim},
                                      {"v_head_dim", v_head_dim},
                                      {"token_values", token_values},
                                      {"kv_bytes", kv_bytes},
                                      {"max_queries", max_queries}}) {
      PAT_CHECK(value > 0, "Target.", name, " is ", value, ", must be positive");
    }
    PAT_CHECK(num_kv_heads > 0 && num_q_heads > 0 && num_q_heads % num_kv_heads == 0,
              "Target.num_q_heads is ", num_q_heads,
              ", must be a positive multiple of num_kv_heads, ", num_kv_heads);
    PAT_CHECK(draft_tokens > 0 && draft_tokens <= INT16_MAX, "Target.draft_tokens is ",
              draft_tokens, ", must be from 1 to ", INT16_MAX);
    PAT_CHECK(partial_bytes == 2 || partial_bytes == 4, "Target.partial_bytes is ", partial_bytes,
              ", must be 2 (bf16) or 4 (fp32)");
    PAT_CHECK(bytes_per_s > 0 && flops_per_s > 0 && item_overhead_s > 0,
              "Target rates must be positive: bytes_per_s ", bytes_per_s, ", flops_per_s ",
              flops_per_s, ", item_overhead_s ", item_overhead_s);
    PAT_CHECK(reread_weight > 0 && reread_weight <= 1, "Target.reread_weight is ", reread_weight,
              ", must be in (0, 1]");
    PAT_CHECK(sm_speedup >= 1, "Target.sm_speedup is ", sm_speedup, ", must be 1 or more");
    PAT_CHECK(items_per_sm == 1 || items_per_sm == 2, "Target.items_per_sm is ", items_per_sm,
              ", must be 1 or 2");
    for (const auto* tiles : {&row_tiles, &kv_tiles}) {
      const char* name = tiles == &row_tiles ? "row_tiles" : "kv_tiles";
      PAT_CHECK(!tiles->empty() && tiles->front() > 0 && tiles->back() <= INT16_MAX &&
                    std::adjacent_find(tiles->begin(), tiles->end(), std::greater_equal<>()) ==
                        tiles->end(),
                "Target.", name, " must be a strictly ascending list of 1..32767");
    }
    PAT_CHECK(row_tiles.back() >= group(), "Target.row_tiles end at ", row_tiles.back(),
              " rows, fewer than the ", group(), " of one query: a GQA group of ",
              num_q_heads / num_kv_heads, " for each of its draft tokens, ", draft_tokens);
    PAT_CHECK(max_items >= max_queries, "Target.max_items is ", max_items,
              ", must hold one item per query, at least ", max_queries);
    for (const auto& [name, value] : {std::pair{"max_partials", max_partials},
                                      {"max_segments", max_segments},
                                      {"max_branch_tokens", max_branch_tokens}}) {
      PAT_CHECK(value >= 0, "Target.", name, " is ", value, ", must not be negative");
    }
  }
};

}  // namespace pat
