// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "../check.h"
#include "../count_of.h"
#include "drift.h"
#include "groups.h"
#include "split.h"

namespace pat {
namespace {

// Different tokens of a batch: more than any GPU holds, and so few that their sums with what is
// added to them, such as headroom, fit 32 bits.
constexpr int64_t kMostTokens = int64_t{1} << 30;

}  // namespace

Scheduler::Scheduler(const Target& target)
    : target_(target),
      without_wide_(target.without_wide()),
      item_overhead_s_(target.item_overhead_s),
      packer_(without_wide_),
      simulates_(target.has_default_rules() && Simulation::knows(target)) {
  target_.validate();
}

Plan Scheduler::schedule(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  PAT_CHECK(num_queries <= target_.max_queries, "a batch of ", num_queries,
            " queries does not fit the plan's ", target_.max_queries,
            " rows (Target.max_queries): raise it or decode fewer requests at once");
  target_.item_overhead_s = without_wide_.item_overhead_s =
      overhead_in_batch(target_, item_overhead_s_, num_queries);
  count_tokens(tree, seq_lens, num_queries);
  PAT_CHECK(unique_tokens_ <= kMostTokens, "a batch reads ", unique_tokens_,
            " different tokens, a plan can have ", kMostTokens, ": decode fewer requests at once");
  packer_.choose(tree, seq_lens, num_queries, true, packs_);
  drop_branches();
  split_.reset();
  const bool groups = target_.branching == Branching::kGroups;
  if (groups || (target_.branching != Branching::kNever && !tree.nodes.empty())) {
    choose_branches(tree, seq_lens, num_queries);
  }
  tiles_ = &target_;
  std::string degraded = fit(tree, seq_lens, num_queries);
  if (!wide_items_fill()) {
    tiles_ = &without_wide_;
    split_.reset();
    degraded = fit(tree, seq_lens, num_queries);
  }
  double simulated_factor = 1.0;
  if (degraded.empty()) {
    const bool separated = separate(tree, seq_lens, num_queries);
    simulated_factor = choose_by_simulation(tree, seq_lens, num_queries, separated);
  }
  Plan plan = emitter_.emit({*tiles_, packs_, brancher_, assigned_, seq_lens, num_queries});
  plan.degraded = std::move(degraded);
  plan.simulated_factor = simulated_factor;
  limit_drift(*tiles_, seq_lens, unique_tokens_, plan);
  return plan;
}

// Wide work units of the packs at hand.
int64_t Scheduler::wide_units() const {
  if (without_wide_.row_tiles.size() == target_.row_tiles.size()) return 0;
  const int64_t tile = target_.max_tile_queries();
  int64_t wide = 0;
  for (const Pack& pack : packs_.packs) {
    const bool last = pack.queries % tile * target_.group() > kWideRows;
    wide += (pack.queries / tile + last) * pack.pieces;
  }
  return wide * target_.num_kv_heads;
}

// Whether there are wide work units for four fifths of the SMs, or none. Each takes all of an SM,
// which otherwise runs two smaller ones side by side. (Measured: with half of the SMs one
// of the paper's trees is 9 % slower, the others within 2 %; with all SMs the mean is the same.)
bool Scheduler::wide_items_fill() const {
  const int64_t wide = wide_units();
  return wide == 0 || target_.fills_sms(wide);
}

// Takes the way to branch that is modelled to be the fastest, if it is faster than none.
void Scheduler::choose_branches(const PackTree& tree, const int64_t* seq_lens,
                                int32_t num_queries) {
  BranchCut cut;
  if (target_.branching == Branching::kGroups) {
    put_below_root(tree, num_queries, rooted_);
    brancher_.read(rooted_, seq_lens, num_queries);
    cut = cut_of_groups(target_, target_.split_tokens);
  } else {
    brancher_.read(tree, seq_lens, num_queries);
    cut = fastest_cut(tree, seq_lens, num_queries);
  }
  if (cut.queries == 0) return;
  branches_ = brancher_.cut(target_, cut, other_packs_);
  if (brancher_.build(target_)) {
    std::swap(packs_, other_packs_);
    split_.reset();
  } else {
    drop_branches();
  }
}

void Scheduler::count_tokens(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  unique_tokens_ = longest_ = 0;
  const auto add = [&](int64_t tokens) {
    unique_tokens_ += tokens;
    longest_ = std::max(longest_, tokens);
  };
  for (const PackNode& node : tree.nodes) add(node.end - node.start);
  for (int32_t query = 0; query < num_queries; ++query) {
    add(seq_lens[query] - (tree.query_node[query] == kNoNode ? 0 : tree.query_prefix[query]));
  }
}

// Returns whether there were any.
bool Scheduler::drop_branches() {
  const bool any = branches_.items > 0.0;
  brancher_.clear();
  branches_ = {};
  return any;
}

// Cuts the packs so that their items fit the buffers: what is too large is split less, then made
// without branches, then without splits, then without packs. Returns why, or "" if nothing was
// given up but branches, or splits that are not worth much. Also numbers the partials.
std::string Scheduler::fit(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  std::ostringstream why;
  for (const auto& [use_tree, split] : {std::pair{true, true}, {true, false}, {false, false}}) {
    if (!use_tree) packer_.choose(tree, seq_lens, num_queries, false, packs_);
    bool held_back = split && split_ ? *split_ : split_packs(*tiles_, packs_, split, branches_);
    bool fits = assign_partials(num_queries);
    if (!fits && drop_branches()) {
      packer_.choose(tree, seq_lens, num_queries, true, packs_);
      held_back = split_packs(*tiles_, packs_, split);
      fits = assign_partials(num_queries);
    }
    if (fits) {
      if (held_back) {
        why << "with fewer splits: more than " << target_.max_items << " items or "
            << target_.max_partials << " partials would be faster";
      }
      break;
    }
    why.str("");
    why << (split ? "without splits: " : "without packs: ") << assigned_.num_items << " items (of "
        << target_.max_items << ") and " << assigned_.num_partials << " partials (of "
        << target_.max_partials << ") do not fit";
  }
  return why.str();
}

// Lists the members of every pack and numbers the partials of every query by token position, from
// the query's first: emit.cpp adds where its partial slots begin, or writes kDirect.
// Returns false if items or partials exceed the capacities.
bool Scheduler::assign_partials(int32_t num_queries) {
  Assignment& out = assigned_;
  const int32_t num_packs = count_of(packs_.packs);
  out.member_offsets.resize(num_packs + 1);
  out.num_items = out.num_partials = 0;
  int32_t num_members = 0;
  for (int32_t i = 0; i < num_packs; ++i) {
    const Pack& pack = packs_.packs[i];
    out.member_offsets[i] = num_members;
    num_members += pack.queries;
    out.num_items += tiles_->num_row_tiles(pack.queries) * pack.pieces;
  }
  out.member_offsets[num_packs] = num_members;
  out.members.resize(num_members + brancher_.members().size());
  for (const Branch& branch : brancher_.branches()) out.num_items += branch.num_queries > 0;
  out.splits.resize(num_queries);
  for (int32_t query = 0; query < num_queries; ++query) number_partials(query);
  // number_partials() used each pack's offset as a cursor. It now stands at the pack's end, which
  // is where the next pack starts: shift them back.
  for (int32_t i = num_packs; i > 0; --i) out.member_offsets[i] = out.member_offsets[i - 1];
  out.member_offsets[0] = 0;
  for (const int32_t query : brancher_.members()) {
    out.members[num_members++] = {query, out.splits[query].num_splits - 1};
  }
  return out.num_items <= target_.max_items && out.num_partials <= target_.max_partials;
}

// Enters a query into its packs, from the last back to the first, and gives it its partials. A
// branch is the last of its splits.
void Scheduler::number_partials(int32_t query) {
  const std::vector<Pack>& packs = packs_.packs;
  const int32_t tail = packs_.num_nodes + query;
  const int32_t last = packs[tail].queries > 0 ? tail : packs[tail].above;
  const bool in_branch = brancher_.branch_of(query) != kNoNode;
  int32_t partial = 0;
  for (int32_t i = last; i != kNoNode; i = packs[i].above) partial += packs[i].pieces;
  const int32_t total = partial + in_branch;
  assigned_.splits[query] = {static_cast<int32_t>(assigned_.num_partials), total};
  if (total > 1) assigned_.num_partials += total;
  for (int32_t i = last; i != kNoNode; i = packs[i].above) {
    partial -= packs[i].pieces;
    assigned_.members[assigned_.member_offsets[i]++] = {query, partial};
  }
}

}  // namespace pat
