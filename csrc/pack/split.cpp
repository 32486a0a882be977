// SPDX-License-Identifier: Apache-2.0
#include "split.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../count_of.h"

namespace pat {
namespace {

constexpr int32_t kMaxPieces = 512;
// A piece shorter than this costs more in partials and start-up than its parallelism gives back.
constexpr int32_t kMinChunk = 128;

int32_t round_up(int32_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Cuts a pack into at most `pieces` equal chunks of whole KV tiles.
void cut(const Target& target, Pack& pack, int32_t pieces) {
  const int32_t tokens = pack.tokens();
  pieces = std::clamp(pieces, 1, std::max(1, std::min(kMaxPieces, tokens / kMinChunk)));
  pack.chunk = round_up((tokens + pieces - 1) / pieces, target.kv_tiles.front());
  pack.pieces = (tokens + pack.chunk - 1) / pack.chunk;
}

// PAT section 6, to the letter: an item longer than the mean of all items is cut into equal parts
// no longer than the mean. No part is too short for it; only kMaxPieces limits their number.
void split_by_mean(const Target& target, Packs& packs) {
  int64_t tokens = 0;
  int64_t items = 0;
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const int64_t tiles = target.num_row_tiles(pack.queries);
    tokens += tiles * pack.tokens();
    items += tiles;
  }
  const auto mean =
      static_cast<int32_t>(std::max<int64_t>(tokens / std::max<int64_t>(items, 1), 1));
  for (Pack& pack : packs.packs) {
    if (pack.queries == 0 || pack.tokens() <= mean) continue;
    const int32_t pieces = std::min((pack.tokens() + mean - 1) / mean, kMaxPieces);
    pack.chunk = (pack.tokens() + pieces - 1) / pieces;
    pack.pieces = (pack.tokens() + pack.chunk - 1) / pack.chunk;
  }
}

// Pieces of a pack that takes `seconds`, so that none takes longer than `limit`.
int32_t pieces_for(const Target& target, const Pack& pack, double seconds, double limit) {
  if (seconds <= limit) return 1;
  const double most = std::max(1, pack.tokens() / kMinChunk);
  return static_cast<int32_t>(std::min(pieces_within(target, seconds, limit), most));
}

// Seconds of each pack, not split. Splitting asks for them with every limit.
std::vector<double> seconds_of(const Target& target, const Packs& packs) {
  std::vector<double> seconds;
  seconds.reserve(packs.packs.size());
  for (const Pack& pack : packs.packs) {
    seconds.push_back(pack.queries > 0 ? pack_seconds(target, pack) : 0.0);
  }
  return seconds;
}

// Items of the packs, none of them split, and of the branches. `longest`: of the packs alone.
ItemLoad load_of(const Target& target, const Packs& packs, const std::vector<double>& seconds,
                 const BranchLoad& branches) {
  ItemLoad load{branches.seconds, 0.0, branches.items};
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    if (packs.packs[i].queries == 0) continue;
    const auto tiles = static_cast<double>(target.num_row_tiles(packs.packs[i].queries));
    load.seconds += tiles * seconds[i];
    load.items += tiles;
    load.longest = std::max(load.longest, seconds[i]);
  }
  return load;
}

// The same with packs split so that no item takes longer than `limit`, partials included.
// `whole`: what load_of() gave.
ItemLoad load_if_split(const Target& target, const Packs& packs, const std::vector<double>& seconds,
                       const BranchLoad& branches, const ItemLoad& whole, double limit) {
  ItemLoad load{whole.seconds, branches.longest, whole.items};
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const int32_t pieces = pieces_for(target, pack, seconds[i], limit);
    load.longest = std::max(load.longest, piece_seconds(target, seconds[i], pieces));
    if (pieces == 1) continue;
    load.seconds += (pieces - 1) * further_piece_seconds(target, pack);
    load.items += static_cast<double>((pieces - 1) * target.num_row_tiles(pack.queries));
  }
  return load;
}

// Chooses the longest time an item may take: for a handful of limits, models how long all SMs need
// with the partials that the splits add, and keeps the best.
void split_by_cost(const Target& target, Packs& packs, const BranchLoad& branches) {
  const std::vector<double> seconds = seconds_of(target, packs);
  const ItemLoad whole = load_of(target, packs, seconds, branches);
  if (whole.longest == 0.0) return;
  double best_limit = whole.longest;
  double best = makespan_seconds(
      target, {whole.seconds, std::max(whole.longest, branches.longest), whole.items});
  const double ideal = whole.seconds * target.num_kv_heads / target.num_sms;
  for (double limit = 2.0 * ideal; limit > ideal / 8.0; limit *= 0.7) {
    if (limit >= whole.longest) continue;
    const double modelled =
        makespan_seconds(target, load_if_split(target, packs, seconds, branches, whole, limit));
    if (modelled < best) {
      best = modelled;
      best_limit = limit;
    }
  }
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    Pack& pack = packs.packs[i];
    if (pack.queries > 0) cut(target, pack, pieces_for(target, pack, seconds[i], best_limit));
  }
}

}  // namespace

void split_packs(const Target& target, Packs& packs, bool enabled, const BranchLoad& branches) {
  for (Pack& pack : packs.packs) {
    pack.pieces = 1;
    pack.chunk = std::max(pack.tokens(), 1);
  }
  if (!enabled) return;
  if (target.split == Split::kMean) {
    split_by_mean(target, packs);
  } else {
    split_by_cost(target, packs, branches);
  }
}

}  // namespace pat
