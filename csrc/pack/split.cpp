// SPDX-License-Identifier: Apache-2.0
// Long-KV split (PAT section 6) and the cost model behind it.
#include <algorithm>
#include <cmath>

#include "schedule.h"

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

void split_by_mean(const Target& target, Packs& packs) {
  double tokens = 0.0;
  double items = 0.0;
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const auto tiles = static_cast<double>(num_row_tiles(target, pack.queries));
    tokens += tiles * pack.tokens();
    items += tiles;
  }
  const double mean = tokens / std::max(items, 1.0);
  for (Pack& pack : packs.packs) {
    if (pack.queries > 0) cut(target, pack, static_cast<int32_t>(std::ceil(pack.tokens() / mean)));
  }
}

// How long all units need for items that take `sum` together for a KV head: their mean load plus
// half of the longest item, which on average ends half over.
double makespan(const Target& target, double sum, double longest, double items) {
  const double heads = target.num_kv_heads;
  const double idle_end = items * heads > target.units ? 0.5 * longest : 0.0;
  return std::max(longest, sum * heads / target.units + idle_end);
}

// Chooses the longest time an item may take: for a handful of limits, models how long all units
// need with the partials that the splits add, and keeps the best.
void split_by_cost(const Target& target, Packs& packs, const Load& branches) {
  const double units = target.units;
  const double heads = target.num_kv_heads;
  const double partial_s = target.partial_cost_bytes() /
                           (target.bytes_per_s / units);  // of one query, KV head and piece
  double total = branches.seconds;
  double longest = 0.0;
  double items = branches.items;
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const auto tiles = static_cast<double>(num_row_tiles(target, pack.queries));
    const double seconds = item_seconds(target, row_tile_for(target, pack.queries), pack.tokens());
    total += tiles * seconds;
    items += tiles;
    longest = std::max(longest, seconds);
  }
  if (longest == 0.0) return;
  const auto pieces_for = [&](const Pack& pack, double seconds, double limit) {
    const double work = seconds - target.item_overhead_s;
    const double room = std::max(limit - target.item_overhead_s, 0.25 * target.item_overhead_s);
    return static_cast<int32_t>(
        std::min<double>(std::ceil(work / room), std::max(1, pack.tokens() / kMinChunk)));
  };

  double best_limit = longest;
  double best = makespan(target, total, std::max(longest, branches.longest), items);
  const double ideal = total * heads / units;
  for (double limit = 2.0 * ideal; limit > ideal / 8.0; limit *= 0.7) {
    if (limit >= longest) continue;
    double sum = total;
    double count = items;
    double longest_piece = branches.longest;
    for (const Pack& pack : packs.packs) {
      if (pack.queries == 0) continue;
      const double seconds =
          item_seconds(target, row_tile_for(target, pack.queries), pack.tokens());
      const int32_t pieces = seconds > limit ? pieces_for(pack, seconds, limit) : 1;
      const double piece_s = target.item_overhead_s + (seconds - target.item_overhead_s) / pieces;
      longest_piece = std::max(longest_piece, piece_s);
      if (pieces == 1) continue;
      const auto tiles = static_cast<double>(num_row_tiles(target, pack.queries));
      sum += (pieces - 1) * (tiles * target.item_overhead_s + pack.queries * partial_s);
      count += (pieces - 1) * tiles;
    }
    const double seconds = makespan(target, sum, longest_piece, count);
    if (seconds < best) {
      best = seconds;
      best_limit = limit;
    }
  }
  for (Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const double seconds = item_seconds(target, row_tile_for(target, pack.queries), pack.tokens());
    cut(target, pack, seconds > best_limit ? pieces_for(pack, seconds, best_limit) : 1);
  }
}

}  // namespace

int64_t num_row_tiles(const Target& target, int64_t queries) {
  const int64_t most = target.max_tile_queries();
  return (queries + most - 1) / most;
}

int32_t row_tile_for(const Target& target, int32_t queries) {
  const int64_t rows = int64_t{queries} * target.group();
  for (const int32_t tile : target.row_tiles) {
    if (tile >= rows) return tile;
  }
  return target.row_tiles.back();
}

int32_t kv_tile_for(const Target& target, int32_t tokens) {
  for (const int32_t tile : target.kv_tiles) {
    if (tile >= tokens) return tile;
  }
  return target.kv_tiles.back();
}

double item_seconds(const Target& target, int32_t row_tile, double tokens) {
  const double memory_s = target.token_bytes() / target.bytes_per_s;
  const double arithmetic_s = 4.0 * row_tile * target.head_dim / target.flops_per_s;
  return target.item_overhead_s + tokens * target.units * std::max(memory_s, arithmetic_s);
}

// Terms and factors are those that fit plans of the paper's trees on an H200 within 8 %
// (csrc/NOTES.md).
double modelled_seconds(const Target& target, const Packs& packs, const Load& branches,
                        int64_t unique_tokens) {
  constexpr double kReread = 0.5;   // tokens read again, of a first read
  constexpr double kWide = 0.3;     // tokens of wide items, which ask for arithmetic, beside
  constexpr double kMerged = 1.45;  // bytes of partials
  const double overhead_s = target.item_overhead_s / 12.0;  // of a branch, on its unit
  auto read = static_cast<double>(branches.tokens);
  double wide = 0.0;
  int64_t partials = branches.partials;
  for (size_t i = 0; i < packs.packs.size(); ++i) {
    const Pack& pack = packs.packs[i];
    if (pack.queries == 0) continue;
    const double tokens = static_cast<double>(num_row_tiles(target, pack.queries)) * pack.tokens();
    read += tokens;
    if (row_tile_for(target, pack.queries) > kWideRows) wide += tokens;
    // A tail alone in its row writes the output itself.
    const bool alone = i >= packs.num_nodes && pack.above == kNoNode && pack.pieces == 1;
    if (!alone) partials += int64_t{pack.queries} * pack.pieces;
  }
  const double heads = target.num_kv_heads;
  const double token_s = target.token_bytes() / target.bytes_per_s;
  const auto unique = static_cast<double>(unique_tokens);
  const double all =
      heads * ((unique + kReread * std::max(read - unique, 0.0) + kWide * wide) * token_s +
               branches.items * overhead_s / target.units);
  // A branch may be the last to run.
  const double longest = static_cast<double>(branches.longest_tokens) * token_s * target.units;
  return std::max(all, longest) + kMerged * heads * static_cast<double>(partials) *
                                      target.partial_cost_bytes() / target.bytes_per_s;
}

void split_packs(const Target& target, Packs& packs, bool enabled, const Load& branches) {
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
