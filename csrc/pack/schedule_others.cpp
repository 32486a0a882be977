// SPDX-License-Identifier: Apache-2.0
// What the scheduler weighs against the packs at hand: ways to cut the tree into branches, every
// query by itself, and groups.
#include <limits>
#include <utility>

#include "cost_model.h"
#include "groups.h"
#include "schedule.h"
#include "separate.h"
#include "split.h"

namespace pat {

BranchCut Scheduler::fastest_cut(const PackTree& tree, const int64_t* seq_lens,
                                 int32_t num_queries) {
  split_ = split_packs(target_, packs_, true);
  double least = target_.branching == Branching::kAlways
                     ? std::numeric_limits<double>::infinity()
                     : plan_seconds(target_, packs_, {}, unique_tokens_);
  BranchCut best;
  for (const int32_t rows : target_.branch_rows) {
    if (rows < target_.group()) continue;
    bool whole = false;  // whether a limit was tried that keeps no item out
    for (const int32_t limit : target_.branch_limits) {
      if (whole && limit >= longest_) continue;
      whole |= limit >= longest_;
      const BranchCut cut{limit, rows / target_.group()};
      const BranchLoad load = brancher_.cut(target_, cut, cut_packs_);
      if (load.items == 0.0) continue;
      split_packs(target_, cut_packs_, true, load);
      const double seconds = plan_seconds(target_, cut_packs_, load, unique_tokens_);
      if (seconds < least) {
        least = seconds;
        best = cut;
      }
    }
  }
  if (best.queries > 0 && shares_little(target_, seq_lens, num_queries, unique_tokens_)) {
    packer_.choose(tree, seq_lens, num_queries, false, cut_packs_);
    split_packs(target_, cut_packs_, true);
    const double separate = plan_seconds(target_, cut_packs_, {}, unique_tokens_);
    if (least >= kBranchedShare * separate) return {};
  }
  return best;
}

// Gives every query items of its own, if that is modelled to be faster than the packs at hand.
void Scheduler::separate(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  if (tree.nodes.empty() || !brancher_.branches().empty() || !may_separate(*tiles_, packs_) ||
      !shares_little(target_, seq_lens, num_queries, unique_tokens_)) {
    return;
  }
  packer_.choose(tree, seq_lens, num_queries, false, cut_packs_);
  split_packs(*tiles_, cut_packs_, true);
  if (!is_faster(*tiles_, cut_packs_, packs_, unique_tokens_)) return;
  std::swap(packs_, cut_packs_);
  if (assign_partials(num_queries)) return;
  std::swap(packs_, cut_packs_);
  assign_partials(num_queries);
}

// Takes the groups that are simulated to be the fastest, if they are faster than the plan at hand.
void Scheduler::choose_groups(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  if (!weighs_groups_ || tree.nodes.empty() || num_queries < kLeastGrouped ||
      longest_ > kGroupTokens.back()) {
    return;
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto simulated = [&](double limit) {
    return simulation_.seconds(*tiles_, packs_, brancher_, assigned_, unique_tokens_, limit);
  };
  put_below_root(tree, num_queries, rooted_);
  double least = simulated(kNever) / kGroupsGain;
  for (const int32_t tokens : kGroupTokens) {
    if (longest_ > tokens) continue;  // it would stay outside of the groups
    swap_plans();
    const bool made = make_groups(tokens, seq_lens, num_queries, least);
    const double seconds = made ? simulated(least) : kNever;
    if (seconds < least) {
      least = seconds;
    } else {
      swap_plans();
    }
  }
}

// Returns whether groups of so many tokens fit the buffers and may take less than `limit` seconds.
bool Scheduler::make_groups(int32_t tokens, const int64_t* seq_lens, int32_t num_queries,
                            double limit) {
  brancher_.read(rooted_, seq_lens, num_queries);
  const BranchLoad load = brancher_.cut(target_, cut_of_groups(target_, tokens), packs_);
  return Simulation::least_seconds(target_, load.tokens) <= limit && brancher_.build(target_) &&
         assign_partials(num_queries);
}

// Swaps what is emitted. Row tiles stay: groups have no packs that would need them.
void Scheduler::swap_plans() {
  std::swap(packs_, other_.packs);
  std::swap(brancher_, other_.brancher);
  std::swap(assigned_, other_.assigned);
}

}  // namespace pat
