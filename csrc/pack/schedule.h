// SPDX-License-Identifier: Apache-2.0
// Paths -> plan: the nodes that queries share (tree), which queries share an item (packs), the ways
// to cut (cut, branch), how long each takes (judge), and the bytes of the one that takes the least
// (emit).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../check.h"
#include "branch.h"
#include "cut.h"
#include "emit.h"
#include "judge.h"
#include "packs.h"
#include "target.h"
#include "tree.h"

namespace pat {

// Makes plans. Keeps its working memory between calls; not thread-safe.
class Scheduler {
 public:
  // Throws std::invalid_argument for a target that makes no sense.
  explicit Scheduler(const Target& target)
      : target_((target.validate(), target)),
        without_wide_(target_.without_wide()),
        judge_(target_) {}

  // Time linear in queries x tree depth (but for sorting the shared nodes). Deterministic: equal
  // input gives an equal plan. `seq_lens`: tokens of each query. Throws std::invalid_argument for
  // paths that are no tree (TreeBuilder), for a batch beyond max_queries or of more than 2**30
  // different tokens.
  Plan schedule(const Paths& paths, const int64_t* seq_lens) {
    const Batch batch = batch_of(paths, seq_lens);
    least_s_ = Judge::kNever;
    packer_.choose(without_wide_, batch.tree, seq_lens, batch.num_queries,
                   target_.by_paper ? Packer::Rule::kPaper : Packer::Rule::kBytes, packs_);
    std::string degraded;
    if (!(target_.by_paper ? make_by_paper(batch) : make_least(batch))) {
      degraded = make_simpler(batch);
    }
    Plan plan = emit(batch);
    plan.degraded = std::move(degraded);
    return plan;
  }

  // An explicit plan, without branches. `takes_over`, [nodes + queries]: whether a node or a tail
  // takes over the tokens above it; `piece_tokens`, likewise: of its pieces. Throws as schedule()
  // does, and for a plan that does not fit the buffers.
  Plan schedule(const Paths& paths, const int64_t* seq_lens, const std::vector<uint8_t>& takes_over,
                const std::vector<int32_t>& piece_tokens) {
    const Batch batch = batch_of(paths, seq_lens);
    const size_t packs = batch.tree.nodes.size() + batch.tree.query_node.size();
    PAT_CHECK(takes_over.size() == packs && piece_tokens.size() == packs, takes_over.size(),
              " and ", piece_tokens.size(), " values for ", packs, " nodes and queries");
    packer_.choose(without_wide_, batch.tree, seq_lens, batch.num_queries, Packer::Rule::kGiven,
                   packs_, takes_over.data());
    least_s_ = Judge::kNever;
    least_.take(packs_);
    least_.split(target_, without_wide_, [&](int32_t i) { return piece_tokens[i]; });
    PAT_CHECK(fits(least_, batch.num_queries), unfit_, ": give longer pieces or fewer packs");
    return emit(batch);
  }

  // Of the last batch, or null if that had no tree.
  const PackTree* tree() const { return tree_; }

  // What the judge charges.
  const Costs& costs() const { return target_.costs; }
  void set_costs(const Costs& costs) {
    target_.costs = costs;
    judge_ = Judge(target_);
  }

 private:
  // A batch to be cut.
  struct Batch {
    const PackTree& tree;
    const int64_t* seq_lens;  // [num_queries]
    int32_t num_queries;
    int64_t unique_tokens;  // those of each node once
    int64_t longest;        // tokens of its longest node or tail
  };

  // Different tokens of a batch: more than any GPU holds, and so few that their sums with what is
  // added to them, such as headroom, fit 32 bits.
  static constexpr int64_t kMostTokens = int64_t{1} << 30;

  Batch batch_of(const Paths& paths, const int64_t* seq_lens) {
    tree_ = nullptr;  // if the batch is refused
    tree_ = &builder_.build(paths, seq_lens, target_.draft_tokens);
    const PackTree& tree = *tree_;
    const auto num_queries = static_cast<int32_t>(paths.num_queries());
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
              " different tokens, a plan can have ", kMostTokens,
              ": decode fewer requests at once");
    return batch;
  }

  // Leaves in least_ what the paper cuts. Returns whether that fits the buffers.
  bool make_by_paper(const Batch& batch) {
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
  bool make_least(const Batch& batch) {
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

  bool has_cut(size_t index) const { return target_.cuts >> index & 1; }
  // Cuts into other_. Returns false for a cut that gives no branches where it should, that cannot
  // take the least time, or that does not fit the buffers.
  bool make(const Batch& batch, const Cut& cut) {
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
  bool make_branches(const Batch& batch, const Cut& cut) {
    const int32_t queries = cut.branch_rows / target_.group();  // of a branch, at most
    if (batch.tree.nodes.empty() || queries < 1) return false;
    if (cut.ends && !cut_ends(batch, cut, queries)) return false;
    if (!cut.ends && !std::exchange(ordered_, true)) {
      order_.read(batch.tree, batch.seq_lens, batch.num_queries);
    }
    const int64_t branch_tokens =
        other_.brancher.cut(cut.ends ? end_order_ : order_, cut.limit, queries, other_.packs,
                            cut.ends ? &ends_.taken() : nullptr);
    return branch_tokens > 0 && judge_.least_seconds(branch_tokens) < least_s_ &&
           other_.brancher.build(target_);
  }

  // Cuts the tree for branches of at most so many queries at the ends of its nodes. Returns false
  // if there are none, or where row tiles of fewer rows take less time, so that tails had better be
  // items of their own.
  bool cut_ends(const Batch& batch, const Cut& cut, int32_t queries) {
    if (target_.row_tiles.size() > 1) return false;
    other_.take(ends_.list(target_, batch.tree, batch.seq_lens, batch.num_queries, queries));
    if (!ends_.cut(other_.piece_tokens(cut, target_))) return false;
    end_order_.read(ends_.tree(), batch.seq_lens, batch.num_queries);
    return true;
  }

  // Leaves the packs whole in least_. Returns whether they fit the buffers.
  bool take_whole(const Batch& batch) {
    least_.take(packs_);
    least_.split(target_, without_wide_, [](int32_t) { return INT32_MAX; });
    return fits(least_, batch.num_queries);
  }

  // Numbers the partials. Returns whether the items fit the buffers, else leaves in unfit_ what
  // they need.
  bool fits(Items& items, int32_t num_queries) {
    if (items.assign(num_queries)) return true;
    std::ostringstream text;
    text << items.num_items << " items (of " << items.target->max_items << ") and "
         << items.num_partials << " partials (of " << items.target->max_partials << ") do not fit";
    unfit_ = text.str();
    return false;
  }

  // Where no cut fits the buffers: packs that are not split, else every query by itself. Returns
  // why.
  std::string make_simpler(const Batch& batch) {
    std::string why = "without splits: " + unfit_;
    if (!take_whole(batch)) {
      why = "without packs: " + unfit_;
      packer_.choose(without_wide_, batch.tree, batch.seq_lens, batch.num_queries,
                     Packer::Rule::kNone, packs_);
      take_whole(batch);
    }
    return why;
  }

  Plan emit(const Batch& batch) {
    if (least_s_ == Judge::kNever) {  // no cut was chosen, so nobody has judged this plan
      least_s_ = judge_.seconds(least_, batch.unique_tokens, Judge::kNever);
    }
    Plan plan = emitter_.emit(least_);
    plan.seconds = least_s_;
    return plan;
  }

  Target target_;
  Target without_wide_;  // the same without the row tile of wide items, for which packs are chosen
  TreeBuilder builder_;
  const PackTree* tree_ = nullptr;
  Packer packer_;
  Packs packs_;  // of the batch at hand, not cut
  TreeOrder order_;
  bool ordered_ = false;  // whether order_ is of the batch at hand
  bool whole_ = false;    // whether packs without branches that stay whole were judged
  Items least_, other_;   // the plan that takes the least time so far, and the one to be judged
  std::string unfit_;     // what the last items that did not fit the buffers needed
  double least_s_ = 0.0;  // that the judge expects of least_; Judge::kNever if it was not asked
  Ends ends_;
  TreeOrder end_order_;  // of the tree of ends_
  Judge judge_;
  Emitter emitter_;
};

}  // namespace pat
