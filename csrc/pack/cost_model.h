// SPDX-License-Identifier: Apache-2.0
// The cost model of plans: what packer, split and branch compare. Rates of a GPU are Target's,
// of the table in sglang_pat/gpus.py. What was fitted to times of Hoppers beside them stands where
// it is used, with the experiment that it comes from.
//
// There are four models of a plan's time, each fitted for one decision:
//   makespan_seconds() and merge_seconds(): into how many pieces packs are cut (split.cpp)
//   plan_seconds(): branches or not, and when an old plan is replaced (schedule.cpp, drift.cpp)
//   seconds_of() of separate.cpp: whether a small batch shares at all
//   Simulation: whether groups, other branches or other pieces are faster (alternatives.cpp)
//
// Seconds are those of one SM or thread unless a function says "all SMs"; K/V, items and partials
// are counted for one KV head unless it says otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "target.h"

namespace pat {

struct Pack;
struct Packs;
struct Plan;

// What the branches of a plan ask of the SMs beside its packs, for one KV head.
struct BranchLoad {
  double seconds = 0.0;  // modelled as those of items, all branches
  double longest = 0.0;  // seconds of the longest branch
  double items = 0.0;
  int64_t tokens = 0;  // of all branches
  int64_t longest_tokens = 0;
  int64_t partials = 0;  // of queries that have other items beside their branch
};

// The larger of two times, and up to a fifth more where they are near each other: memory that is
// almost busy slows the SMs, and SMs that are almost busy leave the memory gaps.
inline double smooth_max(double a, double b) {
  const double a2 = a * a, b2 = b * b;
  return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
}

// Items of a plan for one KV head.
struct ItemLoad {
  double seconds = 0.0;  // sum; of a wide item times the slots that it takes
  double longest = 0.0;  // seconds of the longest item
  double items = 0.0;
  double slots = 0.0;   // that the items take
  double tokens = 0.0;  // that they read
  double partials = 0.0;
  int32_t most_splits = 1;      // of a query, about: the most pieces of a pack
  double longest_tokens = 0.0;  // of an item, by the slots that it takes
  // Those of the above that are of long items, which take more than half as long as the longest.
  double long_seconds = 0.0;
  double long_slots = 0.0;
  double long_tokens = 0.0;
  double shared_tokens = 0.0;  // of items of several queries
  bool heavy = false;          // whether any item is a heavy one, a wide one or a branch
};

// Seconds of an item that has the memory nearly to itself: overhead, then K/V as fast as its SM can
// read and multiply. That all SMs together cannot read so fast is in makespan_seconds().
inline double item_seconds(const Target& target, int32_t row_tile, double tokens) {
  const double memory_s = target.token_bytes() / (target.bytes_per_s * target.sm_speedup);
  const double arithmetic_s = 4.0 * row_tile * target.head_dim / target.flops_per_s;
  return target.item_overhead_s + tokens * target.num_sms * (memory_s + arithmetic_s);
}
// Batches of fewer queries have few: their items begin earlier (overhead_in_batch()), and more
// plans of them are simulated (alternatives.cpp).
inline constexpr int32_t kFewQueries = 8;
// What an item takes beside its tokens in a batch of `num_queries`, where it takes `overhead_s` in
// a large one.
double overhead_in_batch(const Target& target, double overhead_s, int32_t num_queries);
// Seconds of one row tile of a pack that is not split.
double pack_seconds(const Target& target, const Pack& pack);
// Seconds of one of `pieces` equal pieces of an item that takes `seconds`.
inline double piece_seconds(const Target& target, double seconds, int32_t pieces) {
  return target.item_overhead_s + (seconds - target.item_overhead_s) / pieces;
}
// Whether one warp runs an item, so that four such items share half an SM (csrc/cuda/tiles.h).
inline bool is_narrow(const Target& target, int32_t queries, int32_t tokens) {
  return queries * target.group() <= 8 && tokens <= 64;
}
// Pieces that an item of `seconds` must be cut into so that none takes longer than `limit`; if
// `limit` is hardly longer than an item's overhead, so that none takes longer than 1.25 of that.
double pieces_within(const Target& target, double seconds, double limit);
// Slots that the row tiles of a pack take, of each piece if it is split.
double pack_slots(const Target& target, const Pack& pack);
// Seconds until all SMs are done with items of all KV heads: the smooth maximum of all bytes, and
// of all items in turn or of the long items wave by wave, whichever of these two takes longer.
double makespan_seconds(const Target& target, const ItemLoad& load);
// How often, one after the other, the merge of a batch of `queries` joins splits (MergeRule) of the
// query that has `most_splits`.
int32_t merge_rounds(const Target& target, int64_t queries, int32_t most_splits);
// Seconds that the merge adds to a plan for a batch of `queries`: the bytes of all partials, and
// the rounds of the query with the most splits, which follow one another.
double merge_seconds(const Target& target, const ItemLoad& load, int64_t queries);

// Bytes saved (> 0) or lost when `leaving` of a pack's `queries` take its `tokens` over, so that
// they read them themselves, which saves `partials` partials. Equations 1 and 2 of the paper
// compare the same two schemes; here a query's partial counts with its GQA group and dtype, K/V is
// read once per row tile, and an item that goes away saves its overhead.
inline double take_over_gain_bytes(const Target& target, double tokens, int64_t queries,
                                   int64_t leaving, double partials) {
  const double overhead_bytes = target.item_overhead_s * target.bytes_per_s / target.num_sms;
  const auto before = static_cast<double>(target.num_row_tiles(queries));
  const auto left = static_cast<double>(target.num_row_tiles(queries - leaving));
  const auto moved = static_cast<double>(target.num_row_tiles(leaving));
  return partials * target.partial_cost_bytes() + (before - left) * overhead_bytes -
         (left + moved - before) * tokens * target.token_bytes() * target.reread_weight;
}

// Counts of a plan, for one KV head.
struct PlanTerms {
  int64_t unique_tokens = 0;  // of the batch, each node's once
  int64_t reread_tokens = 0;  // that items read beyond the unique ones
  int64_t wide_tokens = 0;    // of wide items
  int64_t branches = 0;
  int64_t longest_branch_tokens = 0;
  int64_t partials = 0;
  int64_t items = 0;  // branches among them

  // `read`: tokens of all items.
  void set_tokens(int64_t read, int64_t unique) {
    unique_tokens = unique;
    reread_tokens = std::max<int64_t>(read - unique, 0);
  }
};

// Terms of packs that are split and the branches beside them.
PlanTerms packs_terms(const Target& target, const Packs& packs, const BranchLoad& branches,
                      int64_t unique_tokens);
// Terms of a plan as executors run it, with sequences of `seq_lens` ([queries] tokens). Those of
// the packs that it was made from count two things higher: as wide also the last row tile of a pack
// of several, which may be smaller, and a partial also for a query that has no other item.
PlanTerms plan_terms(const Plan& plan, const int64_t* seq_lens, int64_t unique_tokens);

// Seconds until all SMs are done with a plan, all KV heads and the merge included. What a launch
// takes is not in it.
double plan_seconds(const Target& target, const PlanTerms& terms);
// The same of packs_terms().
double plan_seconds(const Target& target, const Packs& packs, const BranchLoad& branches,
                    int64_t unique_tokens);

}  // namespace pat
