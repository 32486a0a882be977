// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "../check.h"

namespace pat {
namespace {

// Different tokens of a batch: more than any GPU holds, and so few that their sums with what is
// added to them, such as headroom, fit 32 bits.
constexpr int64_t kMostTokens = int64_t{1} << 30;

std::string unfit(const Items& items) {
  std::ostringstream text;
  text << items.assigned.num_items << " items (of " << items.target->max_items << ") and "
       << items.assigned.num_partials << " partials (of " << items.target->max_partials
       << ") do not fit";
  return text.str();
}

}  // namespace

Scheduler::Scheduler(const Target& target)
    : target_((target.validate(), target)),
      without_wide_(target_.without_wide()),
      judge_(target_) {}

void Scheduler::set_costs(const Costs& costs) {
  target_.costs = costs;
  judge_ = Judge(target_);
}

Plan Scheduler::schedule(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) {
  const Batch batch = batch_of(tree, seq_lens, num_queries);
  least_s_ = Judge::kNever;
  packer_.choose(without_wide_, tree, seq_lens, num_queries,
                 target_.by_paper ? Packer::Rule::kPaper : Packer::Rule::kBytes, packs_);
  std::string degraded;
  if (!(target_.by_paper ? make_by_paper(batch) : make_least(batch))) {
    degraded = make_simpler(batch);
  }
  Plan plan = emit(batch);
  plan.degraded = std::move(degraded);
  return plan;
}

Plan Scheduler::schedule(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                         const uint8_t* takes_over, const int32_t* piece_tokens) {
  const Batch batch = batch_of(tree, seq_lens, num_queries);
  packer_.choose(without_wide_, tree, seq_lens, num_queries, Packer::Rule::kGiven, packs_,
                 takes_over);
  least_s_ = Judge::kNever;
  least_.take(packs_);
  least_.split(target_, without_wide_, [&](int32_t i) { return piece_tokens[i]; });
  PAT_CHECK(least_.assign(num_queries), unfit(least_), ": give longer pieces or fewer packs");
  return emit(batch);
}

Batch Scheduler::batch_of(const PackTree& tree, const int64_t* seq_lens,
                          int32_t num_queries) const {
  PAT_CHECK(num_queries <= target_.max_queries, "a batch of ", num_queries,
            " queries does not fit the plan's ", target_.max_queries,
            " rows (Target.max_queries): raise it or decode fewer requests at once");
  Batch batch{tree, seq_lens, num_queries, 0, 0};
  const auto add = [&](int64_t tokens) {
    batch.unique_tokens += tokens;
    batch.longest = std::max(batch.longest, tokens);
  };
  for (const PackNode& node : tree.nodes) add(node.end - node.start);
  for (int32_t query = 0; query < num_queries; ++query) {
    add(seq_lens[query] - (tree.query_node[query] == kNoNode ? 0 : tree.query_prefix[query]));
  }
  PAT_CHECK(batch.unique_tokens <= kMostTokens, "a batch reads ", batch.unique_tokens,
            " different tokens, a plan can have ", kMostTokens, ": decode fewer requests at once");
  return batch;
}

// Leaves in least_ what the paper cuts. Returns whether that fits the buffers.
bool Scheduler::make_by_paper(const Batch& batch) {
  least_.take(packs_);
  const auto split_for = [&](const Target& tiles) {  // the mean depends on the row tiles
    const std::vector<int32_t> pieces = split_by_mean(tiles, packs_);
    least_.split(tiles, without_wide_, [&](int32_t i) { return pieces[i]; });
  };
  split_for(target_);
  if (least_.target == &without_wide_) split_for(without_wide_);
  return fits(least_, batch.num_queries);
}

// Leaves in least_ what the judge says takes the least time. Returns false if no cut fits the
// buffers.
bool Scheduler::make_least(const Batch& batch) {
  ordered_ = whole_ = false;
  if (target_.cuts == 0) return take_whole(batch);
  for (size_t i = 0; i < kCuts.size(); ++i) {
    if (!has_cut(i) || !make(batch, kCuts[i])) continue;
    const double seconds = judge_.seconds(other_, batch.unique_tokens, least_s_);
    if (seconds >= least_s_) continue;
    least_s_ = seconds;
    std::swap(least_, other_);
  }
  return least_s_ < Judge::kNever;
}

// Leaves the packs whole in least_. Returns whether they fit the buffers.
bool Scheduler::take_whole(const Batch& batch) {
  least_.take(packs_);
  least_.split(target_, without_wide_, [](int32_t) { return INT32_MAX; });
  return fits(least_, batch.num_queries);
}

bool Scheduler::fits(Items& items, int32_t num_queries) {
  if (items.assign(num_queries)) return true;
  unfit_ = unfit(items);
  return false;
}

// Cuts into other_. Returns false for a cut that gives no branches where it should, that cannot
// take the least time, or that does not fit the buffers.
bool Scheduler::make(const Batch& batch, const Cut& cut) {
  const bool branches = cut.branch_rows > 0 && make_branches(batch, cut);
  if (!branches) {
    // A cut without the branches that it should have is only made where no other is asked for.
    if (cut.branch_rows > 0 && (target_.cuts & kPieceCuts) != 0) return false;
    other_.take(packs_);
  }
  // Where all packs stay whole, so they do with longer pieces.
  const bool ends = branches && cut.ends;
  const int32_t tokens = ends ? 0 : other_.piece_tokens(cut, target_);
  if (!branches) {
    const bool whole = tokens >= batch.longest;
    if (whole && whole_) return false;
    whole_ |= whole;
  }
  other_.split(target_, without_wide_, [&](int32_t i) {
    return equal_tokens(target_, other_.packs.packs[i], ends ? ends_.piece_tokens(i) : tokens);
  });
  return fits(other_, batch.num_queries);
}

// Makes the branches of a cut in other_. Returns false if there are none, if they cannot take the
// least time, or if they do not fit the buffers.
bool Scheduler::make_branches(const Batch& batch, const Cut& cut) {
  if (batch.tree.nodes.empty() || cut.branch_rows < target_.group()) return false;
  if (cut.ends && !cut_ends(batch, cut)) return false;
  if (!cut.ends && !std::exchange(ordered_, true)) {
    order_.read(batch.tree, batch.seq_lens, batch.num_queries);
  }
  const int64_t branch_tokens = other_.brancher.cut(cut.ends ? end_order_ : order_, cut.limit,
                                                    cut.branch_rows / target_.group(), other_.packs,
                                                    cut.ends ? &ends_.taken() : nullptr);
  return branch_tokens > 0 && judge_.least_seconds(branch_tokens) < least_s_ &&
         other_.brancher.build(target_);
}

// Cuts the tree for branches at the ends of its nodes. Returns false if there are none, or where
// row tiles of fewer rows take less time, so that tails had better be items of their own.
bool Scheduler::cut_ends(const Batch& batch, const Cut& cut) {
  if (target_.row_tiles.size() > 1) return false;
  other_.take(ends_.list(target_, batch.tree, batch.seq_lens, batch.num_queries,
                         cut.branch_rows / target_.group()));
  if (!ends_.cut(other_.piece_tokens(cut, target_))) return false;
  end_order_.read(ends_.tree(), batch.seq_lens, batch.num_queries);
  return true;
}

// Where no cut fits the buffers: packs that are not split, else every query by itself. Returns why.
std::string Scheduler::make_simpler(const Batch& batch) {
  std::string why = "without splits: " + unfit_;
  if (!take_whole(batch)) {
    why = "without packs: " + unfit_;
    packer_.choose(without_wide_, batch.tree, batch.seq_lens, batch.num_queries,
                   Packer::Rule::kNone, packs_);
    take_whole(batch);
  }
  return why;
}

Plan Scheduler::emit(const Batch& batch) {
  if (least_s_ == Judge::kNever) {  // no cut was chosen, so nobody has judged this plan
    least_s_ = judge_.seconds(least_, batch.unique_tokens, Judge::kNever);
  }
  Plan plan = emitter_.emit(least_);
  plan.seconds = least_s_;
  return plan;
}

}  // namespace pat
