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
  double waves_s = 0.0;
  if (load.long_slots > 0.0) {
    const double slots = load.long_slots * heads;
    const double full_waves = std::floor(slots / target.slots());
    const double rest = slots - full_waves * target.slots();
    const double slot_bytes_s = load.long_tokens / load.long_slots * token_s;
    waves_s = full_waves * std::max(load.long_seconds / load.long_slots,
                                    target.slots() * slot_bytes_s);
    if (rest > 0.0) waves_s += std::max(load.longest, rest * slot_bytes_s);
  }
  return std::max({waves_s, load.tokens * heads * token_s, load.seconds * heads / target.slots()});
}

double merge_seconds(const Target& target, const ItemLoad& load, int64_t queries) {
  const double bytes = load.partials * target.num_kv_heads * target.partial_cost_bytes();
  const double bytes_s = target.merge_factor * bytes / target.bytes_per_s;
  if (load.most_splits <= 1) return bytes_s;
  const int32_t at_once =
      merge_rule(queries * target.num_q_heads, target.num_sms).splits_at_once();
  const int32_t rounds = (load.most_splits + at_once - 1) / at_once;
  return bytes_s + rounds * target.merge_round_s;
}

PlanTerms packs_terms(const Target& target, const Packs& packs, const BranchLoad& branches,
                      int64_t unique_tokens) {
  PlanTerms terms;
  terms.branches = static_cast<int64_t>(branches.items);
  terms.longest_branch_tokens = branches.longest_tokens;
  terms.partials = branches.partials;
  terms.items = terms.branches;
  terms.longest_item_tokens = branches.longest_tokens;
  int64_t read = branches.tokens;
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const int64_t tiles = target.num_row_tiles(pack.queries);
    const int64_t tokens = tiles * pack.tokens();
    read += tokens;
    if (target.row_tile_for(pack.queries) > kWideRows) terms.wide_tokens += tokens;
    terms.items += tiles * pack.pieces;
    terms.longest_item_tokens = std::max<int64_t>(terms.longest_item_tokens, pack.chunk);
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
    int64_t tokens = 0;
    view.for_each_segment(i, [&](const Segment& s) {
      tokens += is_dynamic(s) ? seq_lens[s.query] - s.kv_start : s.kv_len;
    });
    if (is_branch(item)) {
      ++terms.branches;
      terms.longest_branch_tokens = std::max(terms.longest_branch_tokens, tokens);
    } else if (item.row_tile > kWideRows) {
      terms.wide_tokens += tokens;
    }
    read += tokens;
    terms.longest_item_tokens = std::max(terms.longest_item_tokens, tokens);
  }
  terms.set_tokens(read, unique_tokens);
  return terms;
}

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
  const double longest =
      static_cast<double>(terms.longest_branch_tokens) * token_s * target.num_sms;
  return std::max(all, longest) + target.merge_factor * heads *
                                      static_cast<double>(terms.partials) *
                                      target.partial_cost_bytes() / target.bytes_per_s;
}

double plan_seconds(const Target& target, const Packs& packs, const BranchLoad& branches,
                    int64_t unique_tokens) {
  return plan_seconds(target, packs_terms(target, packs, branches, unique_tokens));
}

}  // namespace pat
