// SPDX-License-Identifier: Apache-2.0
#include "cost_model.h"

#include <algorithm>
#include <cmath>

#include "../count_of.h"
#include "../plan.h"
#include "packer.h"

namespace pat {
namespace {

// Factors of plan_seconds(): with them it is within 8 % of plans of the paper's trees as measured
// on an H200 (docs/experiments/splits.md).
constexpr double kReread = 0.5;           // a token read again, of a first read
constexpr double kWideToken = 0.3;        // a wide item's token, beside its read: arithmetic
constexpr double kMerged = 1.45;          // a partial's bytes, of their time in memory
constexpr double kItemOfBranches = 12.0;  // an item's overhead, of that of a branch on its SM

}  // namespace

double pack_seconds(const Target& target, const Pack& pack) {
  return item_seconds(target, target.row_tile_for(pack.queries), pack.tokens());
}

double pieces_within(const Target& target, double seconds, double limit) {
  const double overhead = target.item_overhead_s;
  return std::ceil((seconds - overhead) / std::max(limit - overhead, 0.25 * overhead));
}

double further_piece_seconds(const Target& target, const Pack& pack) {
  const double partial_s = target.partial_cost_bytes() / (target.bytes_per_s / target.num_sms);
  const auto tiles = static_cast<double>(target.num_row_tiles(pack.queries));
  return tiles * target.item_overhead_s + pack.queries * partial_s;
}

double makespan_seconds(const Target& target, const ItemLoad& load) {
  const double heads = target.num_kv_heads;
  const double idle_end = load.items * heads > target.num_sms ? 0.5 * load.longest : 0.0;
  return std::max(load.longest, load.seconds * heads / target.num_sms + idle_end);
}

double plan_seconds(const Target& target, const Packs& packs, const BranchLoad& branches,
                    int64_t unique_tokens) {
  auto read = static_cast<double>(branches.tokens);
  double wide = 0.0;
  int64_t partials = branches.partials;
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const double tokens = static_cast<double>(target.num_row_tiles(pack.queries)) * pack.tokens();
    read += tokens;
    if (target.row_tile_for(pack.queries) > kWideRows) wide += tokens;
    // A tail that is its query's only item writes the output itself.
    const bool alone = i >= packs.num_nodes && pack.above == kNoNode && pack.pieces == 1;
    if (!alone) partials += int64_t{pack.queries} * pack.pieces;
  }
  const double heads = target.num_kv_heads;
  const double token_s = target.token_bytes() / target.bytes_per_s;
  const double branch_s = target.item_overhead_s / kItemOfBranches;
  const auto unique = static_cast<double>(unique_tokens);
  const double all =
      heads * ((unique + kReread * std::max(read - unique, 0.0) + kWideToken * wide) * token_s +
               branches.items * branch_s / target.num_sms);
  // A branch may be the last to run.
  const double longest = static_cast<double>(branches.longest_tokens) * token_s * target.num_sms;
  return std::max(all, longest) + kMerged * heads * static_cast<double>(partials) *
                                      target.partial_cost_bytes() / target.bytes_per_s;
}

}  // namespace pat
