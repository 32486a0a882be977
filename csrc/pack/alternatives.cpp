// SPDX-License-Identifier: Apache-2.0
// What the scheduler weighs against the packs at hand: ways to cut the tree into branches and every
// query by itself, by models; branches beside longer items, groups and packs, by simulation.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "cost_model.h"
#include "groups.h"
#include "schedule.h"
#include "separate.h"
#include "split.h"

namespace pat {
namespace {

// What the simulation weighs against the plan of the cost model.
// Branches of nodes and tails of at most so many tokens; longer ones stay items of their own.
constexpr std::array<int32_t, 2> kBranchLimits = {128, INT32_MAX};
// Groups of at most so many tokens.
constexpr std::array<int32_t, 3> kGroupTokens = {512, 1024, 2048};
// Packs without branches in pieces of so many tokens: shorter ones of few queries only.
constexpr std::array<int32_t, 5> kPieceTokens = {128, 256, 512, 1024, 2048};
constexpr int32_t kLongPiece = 512;
// The same in equal parts, about one for every SM, and one for every half of an SM, unless these
// are shorter than all of kPieceTokens. A tail that is shorter than a part stays whole. Parts for
// halves take less time than is simulated, by kOverrated, unless they are shorter than kLongPiece.
constexpr double kOverrated = 1.03;
// Another plan is taken if the one at hand is simulated to take more than so many times as long.
// Chosen by timed plans of both GPUs (docs/lessons.md).
constexpr double kSimulatedGain = 1.02;

// Tokens of a piece, in whole tiles, if the batch is cut into `parts` equal parts.
int32_t tokens_of_part(const Target& target, int64_t unique_tokens, int32_t parts) {
  const double tokens = static_cast<double>(unique_tokens) * target.num_kv_heads / parts;
  const int32_t tile = target.kv_tiles.back();
  return std::max(static_cast<int32_t>(std::ceil(tokens / tile)), 1) * tile;
}

}  // namespace

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
      const BranchLoad load = brancher_.cut(target_, cut, other_packs_);
      if (load.items == 0.0) continue;
      split_packs(target_, other_packs_, true, load);
      const double seconds = plan_seconds(target_, other_packs_, load, unique_tokens_);
      if (seconds < least) {
        least = seconds;
        best = cut;
      }
    }
  }
  if (best.queries > 0 && shares_little(target_, seq_lens, num_queries, unique_tokens_)) {
    packer_.choose(tree, seq_lens, num_queries, false, other_packs_);
    split_packs(target_, other_packs_, true);
    const double separate = plan_seconds(target_, other_packs_, {}, unique_tokens_);
    if (least >= kBranchedShare * separate) return {};
  }
  return best;
}

// Gives every query items of its own, if that is modelled to be faster than the packs at hand.
// Returns whether it did.
bool Scheduler::separate(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  if (tree.nodes.empty() || !brancher_.branches().empty() || !may_separate(*tiles_, packs_) ||
      !shares_little(target_, seq_lens, num_queries, unique_tokens_)) {
    return false;
  }
  packer_.choose(tree, seq_lens, num_queries, false, other_packs_);
  split_packs(*tiles_, other_packs_, true);
  if (!is_faster(*tiles_, other_packs_, packs_, unique_tokens_)) return false;
  std::swap(packs_, other_packs_);
  if (assign_partials(num_queries)) return true;
  std::swap(packs_, other_packs_);
  assign_partials(num_queries);
  return false;
}

// Takes the branches, groups or packs that are simulated to be the fastest, if they are faster than
// the plan at hand, which separate() made if it is `separated`. Returns Plan::simulated_factor.
double Scheduler::choose_by_simulation(const PackTree& tree, const int64_t* seq_lens,
                                       int32_t num_queries, bool separated) {
  const bool shares = !tree.nodes.empty();
  // Of many queries that share nothing, no other plan was faster.
  if (!simulates_ || (!shares && num_queries >= kFewQueries)) return 1.0;
  const auto modelled = [&] { return plan_seconds(*tiles_, packs_, branches_, unique_tokens_); };
  const double before = simulated(Simulation::kNever), modelled_before = modelled();
  least_ = before / kSimulatedGain;
  // Packs do not take the place of joint plans: one took 1.27 of its time where a gain was
  // simulated.
  const bool joint =
      tiles_->runs_jointly(assigned_.num_items, static_cast<int64_t>(branches_.items));
  const bool has_packs = !separated && brancher_.branches().empty();
  if (shares) weigh_branches(tree, seq_lens, num_queries);
  if (!joint) weigh_packs(tree, seq_lens, num_queries, has_packs);
  const bool other = least_ < before / kSimulatedGain;
  return other ? least_ / before * modelled_before / modelled() : 1.0;
}

// Of the plan at hand; infinity if they are more than `limit`.
double Scheduler::simulated(double limit) {
  return simulation_.seconds(*tiles_, packs_, brancher_, assigned_, unique_tokens_, limit);
}

// Takes the plan that `make` makes, if it does and that plan is simulated to take less than
// `least_`. `over`: by how much the simulation overrates its time.
template <typename Make>
void Scheduler::weigh(const Make& make, double over) {
  swap_plans();
  const double seconds = make() ? simulated(over * least_) / over : Simulation::kNever;
  if (seconds < least_) {
    least_ = seconds;
  } else {
    swap_plans();
  }
}

void Scheduler::weigh_branches(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  const auto weigh_cut = [&](const PackTree& of, const BranchCut& cut) {
    weigh([&] { return make_branches(of, cut, seq_lens, num_queries); });
  };
  for (const int32_t limit : kBranchLimits) {
    for (const int32_t rows : target_.branch_rows) {
      weigh_cut(tree, {limit, rows / target_.group()});
    }
    if (limit >= longest_) break;  // a higher limit gives the same branches
  }
  put_below_root(tree, num_queries, rooted_);
  for (const int32_t tokens : kGroupTokens) weigh_cut(rooted_, cut_of_groups(target_, tokens));
}

// Packs without branches: as the cost model splits them, unless it is what the plan of the model
// has, and in pieces of given lengths.
void Scheduler::weigh_packs(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                            bool has_packs) {
  const auto weigh_pieces = [&](int32_t tokens, double over = 1.0) {
    weigh([&] { return make_packs(tree, tokens, seq_lens, num_queries); }, over);
  };
  if (!has_packs) weigh_pieces(0);
  for (const int32_t tokens : kPieceTokens) {
    if (tokens >= kLongPiece || num_queries < kFewQueries) weigh_pieces(tokens);
  }
  const auto weigh_parts = [&](int32_t parts, double over_if_long) {
    const int32_t tokens = tokens_of_part(target_, unique_tokens_, parts);
    if (tokens < kPieceTokens.front()) return;
    weigh_pieces(tokens, tokens < kLongPiece ? 1.0 : over_if_long);
  };
  weigh_parts(target_.num_sms, 1.0);
  weigh_parts(2 * target_.num_sms, kOverrated);
}

// Returns whether branches of a cut, with packs of the rest, fit the buffers and may take less than
// `least_` seconds.
bool Scheduler::make_branches(const PackTree& tree, const BranchCut& cut, const int64_t* seq_lens,
                              int32_t num_queries) {
  if (cut.queries == 0) return false;  // the packed rows of one query do not fit a branch
  brancher_.read(tree, seq_lens, num_queries);
  branches_ = brancher_.cut(target_, cut, packs_);
  if (branches_.items == 0.0 || Simulation::least_seconds(target_, branches_.tokens) > least_ ||
      !brancher_.build(target_)) {
    return false;
  }
  tiles_ = &target_;
  split_packs(*tiles_, packs_, true, branches_);
  if (!wide_items_fill()) {
    tiles_ = &without_wide_;
    split_packs(*tiles_, packs_, true, branches_);
  }
  return assign_partials(num_queries);
}

// Returns whether packs without branches fit the buffers, in pieces of `tokens` tokens or, if that
// is 0, as the cost model splits them.
bool Scheduler::make_packs(const PackTree& tree, int32_t tokens, const int64_t* seq_lens,
                           int32_t num_queries) {
  const auto split = [&](const Target& tiles) {
    tiles_ = &tiles;
    if (tokens > 0) {
      split_evenly(tiles, packs_, tokens, 1);
    } else {
      split_packs(tiles, packs_, true);
    }
  };
  drop_branches();
  packer_.choose(tree, seq_lens, num_queries, true, packs_);
  split(target_);
  if (!wide_items_fill()) split(without_wide_);
  return assign_partials(num_queries);
}

void Scheduler::swap_plans() {
  std::swap(packs_, other_.packs);
  std::swap(brancher_, other_.brancher);
  std::swap(branches_, other_.branches);
  std::swap(assigned_, other_.assigned);
  std::swap(tiles_, other_.tiles);
}

}  // namespace pat
