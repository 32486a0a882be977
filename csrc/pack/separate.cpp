// SPDX-License-Identifier: Apache-2.0
#include "separate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../count_of.h"
#include "../plan.h"
#include "cost_model.h"

namespace pat {
namespace {

// Fitted to 2,877 plans of 614 batches on an H200 (docs/lessons.md), 10 % rms:
// shares and multiples that do not depend on the rates of a GPU. Other models of a plan's time keep
// factors of their own: what counts here is how plans of few items differ. kOfQueries was chosen,
// and the reads of the L2 were added, by the measured times of 547 batches (series 12).

// Of the time that bytes take at the measured bandwidth, what counts: waves overlap.
constexpr double kFirstRead = 0.77;
// In overheads of an item: what an item takes of its SM, what a wave of items waits before its
// first token, and what a plan takes longer that has shared items, or items of more than
// kHeavyRows.
constexpr double kOfItem = 2.0;
constexpr double kOfWave = 1.2;
constexpr double kOfShared = 1.0;
constexpr double kOfHeavy = 1.5;
// What a plan with shared items takes longer still if one of them has kManyQueries queries or more.
// With fewer queries it is less in proportion.
constexpr double kOfQueries = 2.5;
constexpr double kManyQueries = 16.0;
// What a narrow unit takes of an item's overhead: four of them share half an SM.
constexpr double kOfNarrow = 0.1;

// Packs of one KV head as they are split. Seconds are of an item's work, without its overhead.
struct Load {
  double items = 0.0;
  double overheads = 0.0;
  double longest_s = 0.0;
  double longest_tokens = 0.0;
  double tokens = 0.0;
  double partials = 0.0;
  int32_t most_splits = 1;   // of a query
  int32_t most_queries = 1;  // of an item
  bool heavy = false;
  // Of items that work more than half as long as the longest.
  double long_items = 0.0;
  double long_s = 0.0;
  double long_tokens = 0.0;
};

double work_seconds(const Target& target, const Pack& pack) {
  const double tokens = static_cast<double>(pack.tokens()) / pack.pieces;
  return item_seconds(target, target.row_tile_for(pack.queries), tokens) - target.item_overhead_s;
}

int32_t splits_above(const Packs& packs, int32_t index) {
  int32_t splits = 0;
  for (int32_t i = index; i != kNoNode; i = packs.packs[i].above) splits += packs.packs[i].pieces;
  return splits;
}

void add(const Target& target, const Packs& packs, int32_t index, Load& load) {
  const Pack& pack = packs.packs[index];
  const auto tiles = static_cast<double>(target.num_row_tiles(pack.queries));
  const double items = tiles * pack.pieces;
  const bool narrow = is_narrow(target, pack.queries, pack.chunk);
  load.items += items;
  load.overheads += items * (narrow ? kOfNarrow : 1.0);
  load.longest_s = std::max(load.longest_s, work_seconds(target, pack));
  load.longest_tokens = std::max(load.longest_tokens, static_cast<double>(pack.chunk));
  load.tokens += tiles * pack.tokens();
  if (pack.pieces > 1 || !packs.is_only_pack(index)) {
    load.partials += static_cast<double>(int64_t{pack.queries} * pack.pieces);
  }
  load.most_splits = std::max(load.most_splits, splits_above(packs, index));
  if (!narrow) load.most_queries = std::max(load.most_queries, pack.queries);
  load.heavy |= target.row_tile_for(pack.queries) > kHeavyRows;
}

Load load_of(const Target& target, const Packs& packs) {
  Load load;
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    if (packs.packs[i].queries > 0) add(target, packs, i, load);
  }
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const double seconds = work_seconds(target, pack);
    if (seconds <= 0.5 * load.longest_s) continue;
    const auto tiles = static_cast<double>(target.num_row_tiles(pack.queries));
    load.long_items += tiles * pack.pieces;
    load.long_s += tiles * pack.pieces * seconds;
    load.long_tokens += tiles * pack.tokens();
  }
  return load;
}

// Seconds of the long items wave by wave. A wave is as many items as there are slots, the last one
// fewer. In each, an SM reads no faster than one item alone could, and all of them together no
// faster than the memory, where a token that several items read comes once.
double waves_seconds(const Target& target, const Load& load, double sm_token_s, double token_s) {
  const double items = load.long_items * target.num_kv_heads;
  const double full_waves = std::floor(items / target.slots());
  const double rest = items - full_waves * target.slots();
  const double start_s = kOfWave * target.item_overhead_s;
  const double shared_s = target.items_per_sm * sm_token_s;
  const double tokens = load.long_tokens / load.long_items;
  const double full_s = std::max(shared_s, target.slots() * token_s);
  double seconds =
      full_waves * (start_s + std::max(load.long_s / load.long_items, tokens * full_s));
  if (rest > 0.0) {
    const double rest_s = std::max(rest > target.num_sms ? shared_s : 0.0, rest * token_s);
    seconds += start_s + std::max(load.longest_s, load.longest_tokens * rest_s);
  }
  return seconds;
}

// Seconds of a plan, forward and merge, without the launch.
double seconds_of(const Target& target, const Packs& packs, int64_t unique_tokens) {
  const Load load = load_of(target, packs);
  const double heads = target.num_kv_heads;
  const auto unique = static_cast<double>(unique_tokens);
  const double read_s = kFirstRead * target.token_bytes() / target.bytes_per_s;
  const double sm_token_s =
      target.token_bytes() * target.num_sms / (target.bytes_per_s * target.sm_speedup);
  const double overheads_s = kOfItem * load.overheads * target.item_overhead_s / target.num_sms;
  // The L2 gives what was read before, but no SM reads faster than an item alone.
  const double tokens_s = std::max(unique * read_s, load.tokens * sm_token_s / target.num_sms);
  const double all_s = heads * (tokens_s + overheads_s);
  const double waves_s =
      waves_seconds(target, load, sm_token_s, read_s * std::min(unique / load.tokens, 1.0));
  // Not std::hypot: its symbol is of glibc 2.35, and wheels run from 2.34 on.
  double seconds = std::sqrt(all_s * all_s + waves_s * waves_s);
  // While all slots are busy, the longest item reads at its share of the memory's speed; what it
  // has left when the others have ended, alone.
  if (load.items * heads > target.slots()) {
    const double left = load.longest_tokens - seconds / (read_s * target.slots());
    seconds += std::max(left, 0.0) * sm_token_s;
  }
  const ItemLoad merged{.partials = load.partials, .most_splits = load.most_splits};
  double starts = load.heavy ? kOfHeavy : 0.0;
  if (load.most_queries > 1) {
    starts += kOfShared + kOfQueries * std::min(load.most_queries / kManyQueries, 1.0);
  }
  return seconds + starts * target.item_overhead_s +
         merge_seconds(target, merged, count_of(packs.packs) - packs.num_nodes);
}

}  // namespace

bool shares_little(const Target& target, const int64_t* seq_lens, int32_t num_queries,
                   int64_t unique_tokens) {
  if (num_queries > kMostSeparate || target.draft_tokens > 1 || !target.has_default_rules()) {
    return false;
  }
  const int64_t all_tokens = std::accumulate(seq_lens, seq_lens + num_queries, int64_t{0});
  return static_cast<double>(all_tokens) <= kMostReads * static_cast<double>(unique_tokens);
}

bool may_separate(const Target& target, const Packs& packs) {
  bool shared = false;
  for (const Pack& pack : packs.packs) {
    shared |= pack.queries > 1;
    if (pack.queries > 0 && target.row_tile_for(pack.queries) > kWideRows) return false;
  }
  return shared;
}

bool is_faster(const Target& target, const Packs& alone, const Packs& packs,
               int64_t unique_tokens) {
  return seconds_of(target, alone, unique_tokens) < seconds_of(target, packs, unique_tokens);
}

}  // namespace pat
