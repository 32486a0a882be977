// SPDX-License-Identifier: Apache-2.0
#include "simulation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "../count_of.h"
#include "cost_model.h"

namespace pat {

// Microseconds of an item before its first KV tile and for each, where memory does not hold it up.
struct Simulation::Kind {
  enum Rank { kWide, kHeavy, kLight } rank;  // in the order in which they run
  double start_us, tile_us;
  size_t index;  // in `all`

  static const Kind narrow, single, light, heavy, branch, paired, wide;
  static const std::array<const Kind*, 7> all;
};
constexpr Simulation::Kind Simulation::Kind::narrow{kLight, 0.19, 0.19, 0};
constexpr Simulation::Kind Simulation::Kind::single{kLight, 0.75, 0.61, 1};  // of one query
constexpr Simulation::Kind Simulation::Kind::light{kLight, 1.02, 0.45, 2};
constexpr Simulation::Kind Simulation::Kind::heavy{kHeavy, 1.39, 0.71, 3};
constexpr Simulation::Kind Simulation::Kind::branch{kHeavy, 0.95, 0.62, 4};
constexpr Simulation::Kind Simulation::Kind::paired{kHeavy, 0.68, 0.55, 5};  // of two branches
constexpr Simulation::Kind Simulation::Kind::wide{kWide, 1.13, 0.69, 6};
constexpr std::array<const Simulation::Kind*, 7> Simulation::Kind::all = {
    &narrow, &single, &light, &heavy, &branch, &paired, &wide};

namespace {

// Fitted to the plans of 938 batches on an H200 and 457 on an H100, head dim 128 and bf16, that
// take no more than 1.35 of the default's time (docs/experiments/simulation.md, series 26): within
// a batch the times of plans are 3.7 and 3.1 % off, rms. They are times of an SM, so that GPUs with
// the same SMs have them as well, whatever their memory is. The fit compares plans of one batch, so
// that kLaunchUs has what they share.
constexpr double kLaunchUs = 9.3;
constexpr double kMergeUs = 0.15;  // of a merge that has anything to do
constexpr double kRoundUs = 0.54;  // of each of its rounds: see merge_rounds()
// Bytes a second: of partials, written and read, and of tokens that were read before, which come
// from the L2.
constexpr double kPartialRate = 4.5e12;
constexpr double kRereadRate = 21.5e12;
// What a branch takes longer: before its first tile for each segment, and for each masked tile, as
// a part of that tile's time.
constexpr double kSegmentUs = 0.15;
constexpr double kOfMasked = 0.16;
// The halves of an SM share its matrix units: beside another heavy item, a tile takes so much more.
constexpr double kBesideHeavy = 0.43;
// Both halves work on an item of a joint plan, which takes little less of the simulated time, as
// it is memory that such plans wait for.
constexpr double kJoint = 0.81;
// Items that end within this time end together: a simulation takes fewer steps.
constexpr double kStepUs = 0.25;

// Packed rows of a query, of the plans that it was fitted to at least. With 1 it promised 0.87 to
// 0.90 for five of the paper's trees, which took 1.00 to 1.07 of the time (an H200, f93d3f9).
constexpr int32_t kLeastGroup = 4;

constexpr int32_t kTileTokens = 64;

constexpr double kNever = std::numeric_limits<double>::infinity();

double tiles_of(int64_t tokens) {
  return static_cast<double>(std::max<int64_t>((tokens + kTileTokens - 1) / kTileTokens, 1));
}

double merge_us_of(const Target& target, const Assignment& assigned) {
  if (assigned.num_partials == 0) return 0.0;
  int32_t most_splits = 0;
  for (const QuerySplits& query : assigned.splits) {
    most_splits = std::max(most_splits, query.num_splits);
  }
  const double bytes = static_cast<double>(assigned.num_partials) * target.num_kv_heads *
                       target.partial_cost_bytes();
  const int32_t rounds = merge_rounds(target, count_of(assigned.splits), most_splits);
  return kMergeUs + kRoundUs * rounds + 1e6 * bytes / kPartialRate;
}

}  // namespace

bool Simulation::knows(const Target& target) {
  return target.items_per_sm == 2 && target.head_dim == 128 && target.kv_bytes == 2 &&
         target.draft_tokens == 1 && target.group() >= kLeastGroup;
}

void Simulation::add_pack(const Target& target, const Pack& pack) {
  const auto kind_of = [&](int32_t queries) {
    const int32_t row_tile = target.row_tile_for(queries);
    if (row_tile > kWideRows) return &Kind::wide;
    if (row_tile > kHeavyRows) return &Kind::heavy;
    return queries > 1 ? &Kind::light : &Kind::single;
  };
  const int32_t most = target.max_tile_queries();
  for (int32_t left = pack.queries; left > 0; left -= most) {
    const int32_t queries = std::min(left, most);
    for (int32_t piece = 0; piece < pack.pieces; ++piece) {
      const int32_t tokens = std::min(pack.chunk, pack.tokens() - piece * pack.chunk);
      const Kind* kind = is_narrow(target, queries, tokens) ? &Kind::narrow : kind_of(queries);
      items_.push_back({kind, kind->start_us, tiles_of(tokens)});
      read_tokens_ += tokens;
    }
  }
}

void Simulation::list_items(const Target& target, const Packs& packs, const Brancher& brancher) {
  items_.clear();
  read_tokens_ = 0;
  for (const Branch& branch : brancher.branches()) {
    if (branch.num_queries == 0) continue;
    const double tiles = tiles_of(branch.tokens);
    const double masked = std::max(tiles - branch.unmasked / kTileTokens, 0.0);
    const Kind& kind = branch.peer == kNoNode ? Kind::branch : Kind::paired;
    items_.push_back(
        {&kind, kind.start_us + kSegmentUs * branch.num_segments, tiles + kOfMasked * masked});
    read_tokens_ += branch.tokens;
  }
  for (const Pack& pack : packs.packs) add_pack(target, pack);
  std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return a.kind->rank != b.kind->rank ? a.kind->rank < b.kind->rank : a.tiles > b.tiles;
  });
}

// Gives items to free slots.
void Simulation::begin(double share) {
  const auto start = [&](size_t item, bool light) {
    const Item& next = items_[item];
    running_.push_back({next.kind, next.start_us, share * next.tiles, light});
  };
  for (; next_wide_ < end_wide_ && free_heavy_ > 0 && free_light_ > 0; --free_heavy_) {
    start(next_wide_++, false);
    --free_light_;
  }
  if (next_wide_ < end_wide_) return;
  const auto fill = [&](int32_t& free, bool light) {
    while (free > 0) {
      const bool any_light = next_light_ < items_.size(), any_heavy = next_heavy_ < end_heavy_;
      if (!any_light && !any_heavy) return;
      start(light ? (any_light ? next_light_++ : next_heavy_++)
                  : (any_heavy ? next_heavy_++ : next_light_++),
            light);
      --free;
    }
  };
  fill(free_heavy_, false);
  fill(free_light_, true);
}

// Goes on until the next item ends or begins with its tiles. `tile_us`: of a tile of each KV head
// if nothing else is read. Returns the microseconds that takes.
double Simulation::step(double tile_us) {
  struct OfKind {
    int32_t items = 0;                 // past their start
    double least_tiles = kNever;       // of the one that is nearest to its end
    double tile_us = 0.0, done = 0.0;  // a tile's time at present, tiles in this step
  };
  std::array<OfKind, Kind::all.size()> kinds;
  int32_t reading = 0, heavy = 0;
  double took = kNever;
  for (const Running& each : running_) {
    if (each.start_us > 0.0) {
      took = std::min(took, each.start_us);
      continue;
    }
    OfKind& kind = kinds[each.kind->index];
    ++kind.items;
    kind.least_tiles = std::min(kind.least_tiles, each.tiles);
    ++reading;
    heavy += each.kind->rank == Kind::kHeavy;
  }
  const double memory_us = tile_us * std::max(reading, 1);
  // Share of the SMs of which both halves run heavy items.
  const double both = std::clamp((heavy - sms_) / sms_, 0.0, 1.0);
  const double beside = 1.0 + kBesideHeavy * both;
  for (const Kind* kind : Kind::all) {
    OfKind& of = kinds[kind->index];
    if (of.items == 0) continue;
    const double factor = kind->rank == Kind::kHeavy ? beside : 1.0;
    of.tile_us = smooth_max(factor * kind->tile_us, memory_us);
    took = std::min(took, of.least_tiles * of.tile_us);
  }
  took = std::max(took, kStepUs);
  for (OfKind& of : kinds) {
    if (of.items == 0) continue;
    of.done = took / of.tile_us;
    left_tiles_ -= of.items * of.done;
  }
  for (size_t i = 0; i < running_.size();) {
    Running& each = running_[i];
    if (each.start_us > 0.0) {
      each.start_us -= took;
      ++i;
      continue;
    }
    each.tiles -= kinds[each.kind->index].done;
    if (each.tiles > 1e-6) {
      ++i;
      continue;
    }
    const bool wide = each.kind->rank == Kind::kWide;
    free_light_ += wide || each.light;
    free_heavy_ += wide || !each.light;
    each = running_.back();
    running_.pop_back();
  }
  return took;
}

double Simulation::least_seconds(const Target& target, int64_t branch_tokens) {
  const double tiles = static_cast<double>(branch_tokens) / kTileTokens * target.num_kv_heads;
  return 1e-6 * (kLaunchUs + tiles * Kind::branch.tile_us / target.slots());
}

double Simulation::seconds(const Target& target, const Packs& packs, const Brancher& brancher,
                           const Assignment& assigned, int64_t unique_tokens, double limit) {
  list_items(target, packs, brancher);
  const auto first_of = [&](Kind::Rank rank) {
    const auto before = [](const Item& item, Kind::Rank r) { return item.kind->rank < r; };
    return std::lower_bound(items_.begin(), items_.end(), rank, before) - items_.begin();
  };
  next_wide_ = 0;
  end_wide_ = next_heavy_ = first_of(Kind::kHeavy);
  end_heavy_ = next_light_ = first_of(Kind::kLight);
  const int32_t num_items = count_of(items_);
  const bool joint = target.runs_jointly(num_items, static_cast<int64_t>(end_heavy_ - end_wide_));
  sms_ = static_cast<double>(target.num_sms) / target.num_kv_heads;
  const auto halves = static_cast<int32_t>(std::lround(target.slots() / target.num_kv_heads));
  free_heavy_ = std::max(1, halves / 2);
  free_light_ = std::max(1, halves - free_heavy_);

  const auto unique = static_cast<double>(unique_tokens);
  const double reread = std::max(static_cast<double>(read_tokens_) - unique, 0.0);
  const double byte_us =
      1e6 * (unique / target.bytes_per_s + reread / kRereadRate) / std::max(unique + reread, 1.0);
  const double tile_us = kTileTokens * target.token_bytes() * target.num_kv_heads * byte_us;
  const double share = joint ? kJoint : 1.0;
  double busy_us = 0.0;  // of all slots, if memory holds nothing up
  left_tiles_ = 0.0;
  for (const Item& item : items_) {
    left_tiles_ += share * item.tiles;
    busy_us += item.start_us + share * item.tiles * item.kind->tile_us;
  }
  const double merge_us = merge_us_of(target, assigned);
  const double limit_us = 1e6 * limit - merge_us;
  double us = kLaunchUs;
  if (us + busy_us / (free_heavy_ + free_light_) > limit_us) return kNever;
  running_.clear();
  for (begin(share); !running_.empty(); begin(share)) {
    us += step(tile_us);
    // All tiles that are left need their bytes, one after the other.
    if (us + left_tiles_ * tile_us > limit_us) return kNever;
  }
  return 1e-6 * (us + merge_us);
}

}  // namespace pat
