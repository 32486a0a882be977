// SPDX-License-Identifier: Apache-2.0
#include "drift.h"

#include <algorithm>
#include <vector>

#include "../count_of.h"
#include "../plan_view.h"
#include "cost_model.h"

namespace pat {
namespace {

struct Growing {
  int64_t tokens;  // of a branch
  int64_t tails;   // that it reads
};

// A plan whose sequences grow alike.
class Growth {
 public:
  Growth(const Target& target, const Plan& plan, const int64_t* seq_lens, int64_t unique_tokens)
      : target_(target),
        queries_(count_of(plan.max_seq_lens)),
        made_(plan_terms(plan, seq_lens, unique_tokens)) {
    const PlanView view = view_plan(plan.blob.data(), static_cast<int64_t>(plan.blob.size()));
    for (int32_t i = 0; i < view.header->num_items; ++i) {
      if (!is_branch(view.items[i])) continue;
      Growing branch{.tokens = view.item_tokens(i, seq_lens), .tails = 0};
      view.for_each_segment(i, [&](const Segment& s) { branch.tails += is_dynamic(s); });
      branches_.push_back(branch);
    }
    seconds_ = plan_seconds(target_, made_);
    even_ = even_seconds(made_);
  }

  // Whether the plan has drifted when every sequence has `tokens` more.
  bool drifted(int64_t tokens) const {
    PlanTerms terms = made_;
    terms.unique_tokens += tokens * queries_;
    for (const Growing& branch : branches_) {
      terms.longest_branch_tokens =
          std::max(terms.longest_branch_tokens, branch.tokens + tokens * branch.tails);
    }
    const double fair = seconds_ + even_seconds(terms) - even_;
    return plan_seconds(target_, terms) > kMostDrift * fair;
  }

 private:
  // As if no branch held up the others.
  double even_seconds(PlanTerms terms) const {
    terms.longest_branch_tokens = 0;
    return plan_seconds(target_, terms);
  }

  const Target& target_;
  int64_t queries_;
  PlanTerms made_;
  double seconds_;
  double even_;
  std::vector<Growing> branches_;
};

}  // namespace

void limit_drift(const Target& target, const int64_t* seq_lens, int64_t unique_tokens, Plan& plan) {
  if (plan.header().branch_tokens == 0 || target.draft_tokens > 1) return;
  std::vector<int64_t>& most = plan.max_seq_lens;
  int64_t good = kLeastGrowth;
  int64_t bad = most.front() - seq_lens[0];  // the plan ends there anyway
  for (int32_t query = 0; query < count_of(most); ++query) {
    bad = std::min(bad, most[query] - seq_lens[query]);
  }
  const Growth growth(target, plan, seq_lens, unique_tokens);
  if (bad <= good || !growth.drifted(bad)) return;
  // The modelled time is convex in the tokens added and the fair one is a line above it at 0, so
  // that a plan that has drifted stays so.
  while (bad - good > 1) {
    const int64_t middle = (good + bad) / 2;
    (growth.drifted(middle) ? bad : good) = middle;
  }
  for (int32_t query = 0; query < count_of(most); ++query) {
    most[query] = std::min(most[query], seq_lens[query] + good);
  }
}

}  // namespace pat
