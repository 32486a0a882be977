// SPDX-License-Identifier: Apache-2.0
#include "cost_model.h"

#include <algorithm>
#include <cmath>

#include "../count_of.h"
#include "../merge_rule.h"
#include "../plan.h"
#include "../plan_view.h"
#include "emit.h"
#include "packer.h"

namespace pat {
namespace {

// How much longer an item takes if another one runs on the same SM, as a share of its time beyond
// kStart overheads: the two share what an SM can read, but each begins as fast as alone. Fitted to
// 403 batches on an H200 (docs/lessons.md). Where queries share more than a
// few of the tokens it does not hold: an SM's second item then often reads what the L2 has.
constexpr double kBesideAnother = 0.8;
constexpr double kStart = 1.25;
constexpr double kFewShared = 0.1;  // of all tokens; verify steps were not timed with it

// Seconds of the long items wave by wave. A wave is as many items as there are slots; the last one,
// which has fewer, takes no less than its longest item. Light items wait for memory most of the
// time, and the fewer of them read at once, the less of its speed they use: so the last wave takes
// the smooth maximum. Not with heavy items, where more plans were slower by that, and not with fp8,
// where it gained nothing (docs/lessons.md).
double waves_seconds(const Target& target, const ItemLoad& load, double slot_token_s) {
  if (load.long_slots == 0.0) return 0.0;
  const double slots = load.long_slots * target.num_kv_heads;
  const double full_waves = std::floor(slots / target.slots());
  const double rest = slots - full_waves * target.slots();
  const double bytes_s = load.long_tokens / load.long_slots * slot_token_s;
  const double alone_s = load.long_seconds / load.long_slots;
  double seconds = full_waves * std::max(alone_s, target.slots() * bytes_s);
  double longest = load.longest;
  // Here the items of one query are wide, so each has its SM for itself.
  const bool wide = target.group() > kWideRows;
  const double few = target.draft_tokens > 1 ? 0.0 : kFewShared * load.tokens;
  const bool shared = load.shared_tokens > few;
  if (rest > target.num_sms && !shared && !wide) {
    longest += kBesideAnother * std::max(0.0, longest - kStart * target.item_overhead_s);
  }
  if (rest == 0.0) return seconds;
  const double rest_s = rest * bytes_s;
  const bool smooth = !load.heavy && target.kv_bytes == 2;
  return seconds + (smooth ? smooth_max(longest, rest_s) : std::max(longest, rest_s));
}

// Seconds of all SMs that partials of one KV head take on all of them, written and read.
double partial_seconds(const Target& target, double partials) {
  return target.merge_factor * target.num_kv_heads * partials * target.partial_cost_bytes() /
         target.bytes_per_s;
}

// Of few queries nearly every item is the first one of its half. The snapshot writes first units
// down (cuda/first_units.cu), so such an item takes less time before its first tokens. Chosen by
// batches of one and two queries on an H200, and timed with up to seven
// (docs/lessons.md). Not with fp8 or other head dims: there as many plans
// were slower as faster.
constexpr double kOfOverhead = 0.5;

}  // namespace

double overhead_in_batch(const Target& target, double overhead_s, int32_t num_queries) {
  const bool few = num_queries < kFewQueries && target.items_per_sm == 2 &&
                   target.head_dim == 128 && target.kv_bytes == 2;
  return few ? kOfOverhead * overhead_s : overhead_s;
}

double pack_seconds(const Target& target, const Pack& pack) {
  return item_seconds(target, target.row_tile_for(pack.queries), pack.tokens());
}

double pieces_within(const Target& target, double seconds, double limit) {
  const double overhead = target.item_overhead_s;
  return std::ceil((seconds - overhead) / std::max(limit - overhead, 0.25 * overhead));
}

double pack_slots(const Target& target, const Pack& pack) {
  const int32_t most = target.max_tile_queries();
  const int32_t rest = pack.queries % most;
  const double full = pack.queries / most * target.slots_of(target.row_tiles.back());
  return rest == 0 ? full : full + target.slots_of(target.row_tile_for(rest));
}

double makespan_seconds(const Target& target, const ItemLoad& load) {
  const double heads = target.num_kv_heads;
  const double token_s = target.token_bytes() / target.bytes_per_s;
  double bytes_s = load.tokens * heads * token_s;
  // While all slots are busy, each reads at its share of the memory's speed. A long item may still
  // be at it when the others have ended: how long was fitted.
  if (load.slots * heads > target.slots()) {
    bytes_s += 0.2 * load.longest_tokens * token_s * target.slots();
  }
  const double slots_s = load.seconds * heads / target.slots();
  return smooth_max(bytes_s, std::max(slots_s, waves_seconds(target, load, token_s)));
}

int32_t merge_rounds(const Target& target, int64_t queries, int32_t most_splits) {
  const int64_t rows = queries * target.draft_tokens * target.num_q_heads;
  const int32_t at_once = kMergeRules[merge_rule(rows, target.num_sms)].splits_at_once();
  return (most_splits + at_once - 1) / at_once;
}

double merge_seconds(const Target& target, const ItemLoad& load, int64_t queries) {
  const double bytes_s = partial_seconds(target, load.partials);
  if (load.most_splits <= 1) return bytes_s;
  return bytes_s + merge_rounds(target, queries, load.most_splits) * target.merge_round_s;
}

PlanTerms packs_terms(const Target& target, const Packs& packs, const BranchLoad& branches,
                      int64_t unique_tokens) {
  PlanTerms terms;
  terms.branches = static_cast<int64_t>(branches.items);
  terms.longest_branch_tokens = branches.longest_tokens;
  terms.partials = branches.partials;
  terms.items = terms.branches;
  int64_t read = branches.tokens;
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const int64_t tiles = target.num_row_tiles(pack.queries);
    const int64_t tokens = tiles * pack.tokens();
    read += tokens;
    if (target.row_tile_for(pack.queries) > kWideRows) terms.wide_tokens += tokens;
    terms.items += tiles * pack.pieces;
    // A tail that is its query's only item writes the output itself.
    const bool alone = packs.is_only_pack(i) && pack.pieces == 1;
    if (!alone) terms.partials += int64_t{pack.queries} * pack.pieces;
  }
  terms.set_tokens(read, unique_tokens);
  return terms;
}

PlanTerms plan_terms(const Plan& plan, const int64_t* seq_lens, int64_t unique_tokens) {
  const PlanView view = view_plan(plan.blob.data(), static_cast<int64_t>(plan.blob.size()));
  PlanTerms terms;
  terms.items = view.header->num_items;
  terms.partials = view.header->num_partials;
  int64_t read = 0;
  for (int32_t i = 0; i < view.header->num_items; ++i) {
    const Item& item = view.items[i];
    const int64_t tokens = view.item_tokens(i, seq_lens);
    if (is_branch(item)) {
      ++terms.branches;
      terms.longest_branch_tokens = std::max(terms.longest_branch_tokens, tokens);
    } else if (item.row_tile > kWideRows) {
      terms.wide_tokens += tokens;
    }
    read += tokens;
  }
  terms.set_tokens(read, unique_tokens);
  return terms;
}

// What the longest branch takes if both halves of its SM work on it, as a share of what one half
// takes: chosen by the same batches as kBesideAnother.
constexpr double kJointShare = 0.6;

double plan_seconds(const Target& target, const PlanTerms& terms) {
  const double heads = target.num_kv_heads;
  const double token_s = target.token_bytes() / target.bytes_per_s;
  const auto unique = static_cast<double>(terms.unique_tokens);
  const double all =
      heads * ((unique + target.reread_factor * static_cast<double>(terms.reread_tokens) +
                target.wide_factor * static_cast<double>(terms.wide_tokens)) *
                   token_s +
               static_cast<double>(terms.branches) * target.branch_overhead_s / target.num_sms);
  // A branch may be the last to run.
  // Heavy packs are not counted: only what the longest branch takes depends on it.
  const bool joint = target.runs_jointly(terms.items, terms.branches);
  const double longest = (joint ? kJointShare : 1.0) *
                         static_cast<double>(terms.longest_branch_tokens) * token_s *
                         target.num_sms;
  // Each branch of a joint plan has an SM to itself, so the others do not slow the longest one.
  const double work_s = joint ? std::max(all, longest) : smooth_max(all, longest);
  return work_s + partial_seconds(target, static_cast<double>(terms.partials));
}

double plan_seconds(const Target& target, const Packs& packs, const BranchLoad& branches,
                    int64_t unique_tokens) {
  return plan_seconds(target, packs_terms(target, packs, branches, unique_tokens));
}

}  // namespace pat
