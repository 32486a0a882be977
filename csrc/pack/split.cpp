// SPDX-License-Identifier: Apache-2.0
#include "split.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../count_of.h"

namespace pat {
namespace {

constexpr int32_t kMaxPieces = 512;
// Tokens of a piece, at least: a KV tile of the CUDA kernels, below which an item takes no less
// time.
constexpr int32_t kMinChunk = 64;
// The limits that are compared: an item's seconds beside its overhead, as multiples of what a slot
// has to do if all work is spread evenly, from kMostShare down to kLeastShare in factors of kStep.
constexpr double kMostShare = 6.0;
constexpr double kLeastShare = 1.0 / 3.0;
constexpr double kStep = 0.78;
// A plan that is modelled to take more than so many times as long as another is clearly slower: the
// model is off by less.
constexpr double kClearly = 1.1;

// Sums with lengths or options near 2**31 would not fit 32 bits.
int32_t divide_up(int32_t value, int32_t by) {
  return static_cast<int32_t>((int64_t{value} + by - 1) / by);
}
int32_t round_up(int32_t value, int32_t multiple) {
  const int64_t rounded = int64_t{divide_up(value, multiple)} * multiple;
  return static_cast<int32_t>(std::min<int64_t>(rounded, INT32_MAX));
}

// Sets how many pieces chunks of so many tokens make. A tail's last piece holds all of the query's
// draft tokens, so a shorter one is joined to the piece before it.
void set_pieces(const Target& target, Pack& pack, int32_t chunk) {
  const int32_t tokens = pack.tokens();
  pack.chunk = chunk;
  pack.pieces = divide_up(tokens, chunk);
  while (pack.pieces > 1 && tokens - (pack.pieces - 1) * chunk < target.draft_tokens) --pack.pieces;
}

// Cuts a pack into at most `pieces` equal chunks, in multiples of the shortest KV tile.
void cut(const Target& target, Pack& pack, int32_t pieces) {
  const int32_t tokens = pack.tokens();
  pieces = std::clamp(pieces, 1, std::max(1, std::min(kMaxPieces, tokens / kMinChunk)));
  set_pieces(target, pack, round_up(divide_up(tokens, pieces), target.kv_tiles.front()));
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
    const int32_t pieces = std::min(divide_up(pack.tokens(), mean), kMaxPieces);
    set_pieces(target, pack, divide_up(pack.tokens(), pieces));
  }
}

// Cuts a pack into pieces of `tokens` tokens, or longer ones if these were more than kMaxPieces.
void cut_evenly(const Target& target, Pack& pack, int32_t tokens) {
  const int32_t least = divide_up(pack.tokens(), kMaxPieces);
  set_pieces(target, pack, std::max({tokens, least, 1}));
}

// FastTree's rule: pieces of `split_tokens` tokens, and of an eighth of that in a phase whose items
// would leave the GPU idle. Its phases are packs of more than 16 queries and the others, which it
// launches one after the other. It asks for 132 items of the first and 528 of the second on 132
// SMs (FastTree-Artifact, kernel_bench).
void split_by_phases(const Target& target, Packs& packs) {
  const auto is_large = [](const Pack& pack) { return pack.queries > 16; };
  for (const bool large : {true, false}) {
    int64_t items = 0;
    for (const Pack& pack : packs.packs) {
      if (pack.queries == 0 || is_large(pack) != large) continue;
      items += target.num_row_tiles(pack.queries) * target.num_kv_heads *
               divide_up(pack.tokens(), target.split_tokens);
    }
    const bool few = items < int64_t{target.num_sms} * (large ? 1 : 4);
    for (Pack& pack : packs.packs) {
      if (pack.queries == 0 || is_large(pack) != large) continue;
      cut_evenly(target, pack, few ? target.split_tokens / 8 : target.split_tokens);
    }
  }
}

// Pieces of a pack that takes `seconds`, so that none takes longer than `limit`.
int32_t pieces_for(const Target& target, const Pack& pack, double seconds, double limit) {
  if (seconds <= limit) return 1;
  const double most = std::max(1, pack.tokens() / kMinChunk);
  return static_cast<int32_t>(std::min(pieces_within(target, seconds, limit), most));
}

// What a pack asks for if it is not split. Splitting asks for it with every limit.
struct WholePack {
  double seconds;  // of a row tile
  double items;    // row tiles
  double slots;    // of all row tiles
  bool heavy;      // whether a row tile is a heavy or a wide one
};

std::vector<WholePack> whole_packs(const Target& target, const Packs& packs) {
  std::vector<WholePack> whole;
  whole.reserve(packs.packs.size());
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) {
      whole.push_back({});
    } else {
      whole.push_back({pack_seconds(target, pack),
                       static_cast<double>(target.num_row_tiles(pack.queries)),
                       pack_slots(target, pack), target.row_tile_for(pack.queries) > kHeavyRows});
    }
  }
  return whole;
}

// Items of the branches, and of the packs split so that no item takes longer than `limit`.
ItemLoad load_if_split(const Target& target, const Packs& packs,
                       const std::vector<WholePack>& whole, const BranchLoad& branches,
                       double limit) {
  ItemLoad load{.seconds = branches.seconds,
                .longest = branches.longest,
                .items = branches.items,
                .slots = branches.items,
                .tokens = static_cast<double>(branches.tokens),
                .partials = static_cast<double>(branches.partials),
                .longest_tokens = static_cast<double>(branches.longest_tokens),
                .shared_tokens = static_cast<double>(branches.tokens),
                .heavy = branches.items > 0.0};
  const auto add_long = [&](double seconds, double slots, double tokens) {
    if (seconds <= 0.5 * limit) return;
    load.long_seconds += seconds * slots;
    load.long_slots += slots;
    load.long_tokens += tokens;
  };
  if (branches.items > 0.0) add_long(branches.seconds / branches.items, load.slots, load.tokens);
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const int32_t pieces = pieces_for(target, pack, whole[i].seconds, limit);
    const double seconds = piece_seconds(target, whole[i].seconds, pieces);
    const double slots = whole[i].slots * pieces;
    const double tokens = whole[i].items * pack.tokens();
    load.seconds += seconds * slots;
    load.longest = std::max(load.longest, seconds);
    load.items += whole[i].items * pieces;
    load.slots += slots;
    load.tokens += tokens;
    add_long(seconds, slots, tokens);
    if (pieces > 1 || !packs.is_only_pack(i)) {
      load.partials += static_cast<double>(int64_t{pack.queries} * pieces);
    }
    load.most_splits = std::max(load.most_splits, pieces);
    if (pack.queries > 1) load.shared_tokens += tokens;
    load.heavy |= whole[i].heavy;
    const double row_tile_slots = whole[i].slots / whole[i].items;
    load.longest_tokens = std::max(load.longest_tokens, pack.tokens() / (pieces * row_tile_slots));
  }
  return load;
}

// Chooses the longest time that an item may take: for about a dozen limits, models how long the SMs
// and the merge need, and keeps the best of those whose items and partials fit the buffers. Returns
// whether that is clearly slower than the best of all.
bool split_by_cost(const Target& target, Packs& packs, const BranchLoad& branches) {
  const std::vector<WholePack> whole = whole_packs(target, packs);
  const int32_t queries = count_of(packs.packs) - packs.num_nodes;
  const auto seconds_of = [&](const ItemLoad& load) {
    return makespan_seconds(target, load) + merge_seconds(target, load, queries);
  };
  double longest = 0.0;
  for (const WholePack& pack : whole) longest = std::max(longest, pack.seconds);
  if (longest == 0.0) return false;
  double best_limit = longest;
  const ItemLoad unsplit = load_if_split(target, packs, whole, branches, longest);
  double best = seconds_of(unsplit);
  double best_of_all = best;
  const double work_s = unsplit.seconds - unsplit.slots * target.item_overhead_s;
  const double share = work_s * target.num_kv_heads / target.slots();  // of a slot
  // Looks at items of `part` seconds beside their overhead. Returns whether they are taken.
  const auto look_at = [&](double part) {
    const double limit = target.item_overhead_s + part;
    if (limit >= longest) return false;
    const ItemLoad load = load_if_split(target, packs, whole, branches, limit);
    const double seconds = seconds_of(load);
    best_of_all = std::min(best_of_all, seconds);
    const bool fits = load.items <= target.max_items && load.partials <= target.max_partials;
    if (!fits || seconds >= best) return false;
    best = seconds;
    best_limit = limit;
    return true;
  };
  for (double part = kMostShare * share; part > kLeastShare * share; part *= kStep) look_at(part);
  // Where none of these fits, the finest that does.
  if (best_limit == longest && best > kClearly * best_of_all) {
    double part = kMostShare * share / kStep;
    while (part < longest && !look_at(part)) part /= kStep;
  }
  for (int32_t i = 0; i < count_of(packs.packs); ++i) {
    Pack& pack = packs.packs[i];
    if (pack.queries > 0) cut(target, pack, pieces_for(target, pack, whole[i].seconds, best_limit));
  }
  return best > kClearly * best_of_all;
}

}  // namespace

void split_evenly(const Target& target, Packs& packs, int32_t tokens, int32_t least_queries) {
  for (Pack& pack : packs.packs) {
    if (pack.queries >= least_queries) cut_evenly(target, pack, tokens);
  }
}

bool split_packs(const Target& target, Packs& packs, bool enabled, const BranchLoad& branches) {
  for (Pack& pack : packs.packs) {
    pack.pieces = 1;
    pack.chunk = std::max(pack.tokens(), 1);
  }
  if (!enabled) return false;
  switch (target.split) {
    case Split::kCost:
      return split_by_cost(target, packs, branches);
    case Split::kMean:
      split_by_mean(target, packs);
      break;
    case Split::kFixed:
      split_evenly(target, packs, target.split_tokens, 1);
      break;
    case Split::kChunks:
      split_evenly(target, packs, target.split_tokens, 2);
      break;
    case Split::kPhases:
      split_by_phases(target, packs);
      break;
    case Split::kNone:
      break;
  }
  return false;
}

}  // namespace pat
