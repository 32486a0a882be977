// SPDX-License-Identifier: Apache-2.0
// Judge: how long a plan takes. Simulates when the halves of a GPU's SMs run its work units, as the
// kernels do: a sum of bytes and the longest item do not tell how items of many lengths follow one
// another on the halves, and how fast each reads while others do.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../merge_rule.h"
#include "cut.h"
#include "target.h"

namespace pat {

// Judges plans for one target, with or without its row tile of wide items. Keeps its working memory
// between calls.
class Judge {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // What items cost on the target. On a Hopper, what was measured there; elsewhere the overhead of
  // an item and, for each tile, the K/V as fast as an SM alone can read and multiply them.
  explicit Judge(const Target& target)
      : num_sms_(target.num_sms),
        num_kv_heads_(target.num_kv_heads),
        halves_(target.items_per_sm),
        costs_(target.costs) {
    const auto by_rates = [&](int32_t row_tile) {
      const double memory_s = target.token_bytes() / (target.bytes_per_s * target.sm_speedup);
      const double arithmetic_s =
          2.0 * row_tile * (target.head_dim + target.v_head_dim) / target.flops_per_s;
      return ItemCost{1e6 * target.item_overhead_s,
                      1e6 * kTileTokens * target.num_sms * (memory_s + arithmetic_s)};
    };
    if (!target.hopper) {
      const int32_t light = std::min(kHeavyRows, target.row_tiles.back());
      const int32_t heavy = target.row_tile_for((kHeavyRows + target.group()) / target.group());
      const ItemCost heavy_cost = by_rates(heavy), widest = by_rates(target.row_tiles.back());
      by_kind_ = {by_rates(light), heavy_cost, heavy_cost, heavy_cost, widest, heavy_cost};
      return;
    }
    if (target.head_dim > 512) {
      by_kind_.fill(costs_.long_key);
      return;
    }
    by_kind_ = {costs_.light,  costs_.heavy, costs_.branch,
                costs_.branch, costs_.heavy, costs_.joint};
    const double factor = (target.head_dim <= 64    ? costs_.head_dim_64
                           : target.head_dim <= 128 ? 1.0
                                                    : costs_.head_dim_256) *
                          (target.kv_bytes == 1 ? costs_.fp8 : 1.0);
    for (ItemCost& cost : by_kind_) cost.tile_us *= factor;
  }

  // Seconds until the merge of a plan is done, the launch included, or infinity if these are
  // `limit` or more. The partials of `plan` are numbered.
  double seconds(const Items& plan, int64_t unique_tokens, double limit) {
    const Target& target = *plan.target;
    list_items(plan);
    const auto unique = static_cast<double>(unique_tokens);
    const double reread = std::max(static_cast<double>(read_tokens_) - unique, 0.0);
    const double reread_s = target.hopper ? reread / costs_.reread_rate
                                          : target.reread_weight * reread / target.bytes_per_s;
    const double byte_us =
        1e6 * (unique / target.bytes_per_s + reread_s) / std::max(unique + reread, 1.0);
    const double tile_us = kTileTokens * target.token_bytes() * byte_us;
    const double fixed_us = costs_.launch_us + merge_us(plan);
    const double limit_us = 1e6 * limit - fixed_us;
    const double least = least_us(tile_us);
    if (least >= limit_us) return kNever;
    return 1e-6 * (fixed_us + run(tile_us, least * (1.0 + costs_.beside) / kSteps, limit_us));
  }

  // Seconds that branches of so many tokens take at least.
  double least_seconds(int64_t branch_tokens) const {
    const double tiles = static_cast<double>(branch_tokens) / kTileTokens * num_kv_heads_;
    const double us = std::min(by_kind_[kBranch].tile_us, 2.0 * by_kind_[kJoint].tile_us);
    return 1e-6 * (costs_.launch_us + tiles * us / (num_sms_ * halves_));
  }

 private:
  // Of items, as the kernels run them. kJoint: any item of a joint plan.
  enum Kind { kLight, kHeavy, kBranch, kPaired, kWide, kJoint, kNumKinds };
  struct Item {
    Kind kind;
    uint32_t order;   // in which the items run, the smallest first
    double start_us;  // before its first KV tile
    double tiles;

    bool takes_as_long_as(const Item& other) const {
      return kind == other.kind && start_us == other.start_us && tiles == other.tiles;
    }
  };
  // kHelping: with the item of the other half.
  enum class Doing { kNothing, kItem, kHelping, kEnded };
  struct Half {
    Doing doing = Doing::kNothing;
    Kind kind = kLight;
    double start_us = 0.0;  // left of what comes before the first tile
    double tiles = 0.0;     // left
    double left_us = 0.0;   // of the step
    bool reads = false;     // in this step
  };
  // SMs that do the same.
  struct Sms {
    int32_t count;
    int32_t next_of_both;         // work unit that both halves run next, if below both_
    std::array<int32_t, 2> next;  // item that each half runs then, or kNoItem
    std::array<Half, 2> halves;
  };
  // The heavy or the light work units.
  struct List {
    int32_t first, end;
    int32_t next;  // the first one that is still free
  };

  static constexpr int32_t kNoItem = -1;
  static constexpr int32_t kTileTokens = 64;
  static constexpr uint32_t kLongest = 1U << 30;  // tokens
  // By Kind: wide items and those of joint plans run first, then pairs, heavy items and light ones,
  // each the longest first.
  static constexpr std::array<uint32_t, kNumKinds> kRanks = {3, 2, 2, 1, 0, 0};

  // The larger of two times, and up to a fifth more where they are near each other: memory that is
  // almost busy slows the SMs, and SMs that are almost busy leave the memory gaps.
  static double smooth_max(double a, double b) {
    const double a2 = a * a, b2 = b * b;
    return std::sqrt(std::sqrt(a2 * a2 + b2 * b2));
  }

  static double tiles_of(int64_t tokens) {
    return static_cast<double>(std::max<int64_t>((tokens + kTileTokens - 1) / kTileTokens, 1));
  }

  void add(Kind kind, int32_t tokens) {
    const uint32_t order =
        kRanks[kind] * kLongest + (kLongest - 1 - std::min<uint32_t>(tokens, kLongest - 1));
    items_.push_back({kind, order, by_kind_[kind].start_us, tiles_of(tokens)});
    read_tokens_ += tokens;
  }

  void add_pack(const Target& target, const Pack& pack) {
    const int32_t most = target.max_tile_queries();
    for (int32_t left = pack.queries; left > 0; left -= most) {
      const int32_t row_tile = target.row_tile_for(std::min(left, most));
      const Kind kind = row_tile > kWideRows ? kWide : row_tile > kHeavyRows ? kHeavy : kLight;
      for (int32_t piece = 0; piece < pack.pieces; ++piece) {
        add(kind, std::min(pack.chunk, pack.tokens() - piece * pack.chunk));
      }
    }
  }

  void list_items(const Items& plan) {
    const Target& target = *plan.target;
    items_.clear();
    read_tokens_ = 0;
    for (const Branch& branch : plan.brancher.branches()) {
      if (branch.num_queries == 0) continue;
      add(branch.peer == kNoNode ? kBranch : kPaired, branch.tokens);
    }
    for (const Pack& pack : plan.packs.packs) add_pack(target, pack);
    const auto is_heavy = [](const Item& item) {
      return item.kind == kHeavy || item.kind == kBranch;
    };
    if (!target.runs_jointly(count_of(items_), std::ranges::count_if(items_, is_heavy))) return;
    for (Item& item : items_) {
      item.start_us += by_kind_[kJoint].start_us - by_kind_[item.kind].start_us;
      item.kind = kJoint;
      item.order %= kLongest;
    }
  }

  double merge_us(const Items& plan) const {
    const Target& target = *plan.target;
    if (plan.num_partials == 0) return 0.0;
    int32_t most_splits = 0;
    for (const QuerySplits& query : plan.splits) {
      most_splits = std::max(most_splits, query.num_splits);
    }
    const int64_t rows = int64_t{count_of(plan.splits)} * target.draft_tokens * target.num_q_heads;
    const int32_t at_once = kMergeRules[merge_rule(rows, target.num_sms)].splits_at_once();
    const int32_t rounds = (most_splits + at_once - 1) / at_once;
    const double bytes =
        static_cast<double>(plan.num_partials) * target.num_kv_heads * target.partial_cost_bytes();
    const double rate = target.hopper ? costs_.partial_rate : target.bytes_per_s;
    return costs_.round_us * rounds + costs_.split_us * most_splits + 1e6 * bytes / rate;
  }

  // Puts the items into the order in which they run, and says which halves run them.
  void number_units() {
    std::ranges::sort(items_, {}, &Item::order);
    const auto units_below = [&](uint32_t rank) {
      const auto at = std::ranges::lower_bound(items_, rank * kLongest, {}, &Item::order);
      return static_cast<int32_t>(at - items_.begin()) * num_kv_heads_;
    };
    wide_ = units_below(1);
    const int32_t heavy = units_below(2), light = units_below(3);
    const int32_t end = count_of(items_) * num_kv_heads_;
    if (halves_ == 1) {  // one list of all
      wide_ = both_ = 0;
      lists_ = {{{0, end, num_sms_}, {end, end, end}}};
      return;
    }
    both_ = wide_ + (heavy - wide_) / 2;
    // Halves that find no unit in their list begin with the other one.
    const int32_t of_heavy = num_sms_ + std::max(num_sms_ - (end - light), 0);
    const int32_t of_light = num_sms_ + std::max(num_sms_ - (light - heavy), 0);
    lists_ = {{{heavy, light, heavy + of_heavy}, {light, end, light + of_light}}};
  }

  // The item of the lists that a half runs first, or kNoItem. SMs take the first units of a list in
  // turn, from the one that comes after the last one with a unit before.
  int32_t first_item(int32_t sm, int32_t half) const {
    const List& own = lists_[half];
    const List& other = lists_[1 - half];
    const int32_t before = own.first - (both_ - wide_);  // two units of a pair have one SM
    const int32_t turn = (sm + num_sms_ - before % num_sms_) % num_sms_;
    if (own.first + turn < own.end) return (own.first + turn) / num_kv_heads_;
    const int32_t unit = other.first + num_sms_ + turn - (own.end - own.first);
    return unit < other.end ? unit / num_kv_heads_ : kNoItem;
  }

  // Of a pair, its first item.
  int32_t item_of_both(int32_t unit) const {
    if (unit < wide_) return unit / num_kv_heads_;
    return wide_ / num_kv_heads_ + 2 * ((unit - wide_) / num_kv_heads_);
  }

  bool run_alike(int32_t item, int32_t other) const {
    if (item == kNoItem || other == kNoItem) return item == other;
    return items_[item].takes_as_long_as(items_[other]);
  }

  // Whether an SM that has been given nothing yet will take as long as some others.
  bool run_alike(const Sms& sms, int32_t sm, const std::array<int32_t, 2>& next) const {
    if (!run_alike(sms.next[0], next[0]) || !run_alike(sms.next[1], next[1])) return false;
    for (int32_t a = sms.next_of_both, b = sm; a < both_ || b < both_;
         a += num_sms_, b += num_sms_) {
      if (a >= both_ || b >= both_ || (a < wide_) != (b < wide_)) return false;
      const int32_t item = item_of_both(a), other = item_of_both(b);
      if (!run_alike(item, other) || (a >= wide_ && !run_alike(item + 1, other + 1))) return false;
    }
    return true;
  }

  void group_sms() {
    sms_.clear();
    for (int32_t sm = 0; sm < num_sms_; ++sm) {
      const std::array<int32_t, 2> next = {first_item(sm, 0),
                                           halves_ == 2 ? first_item(sm, 1) : kNoItem};
      if (!sms_.empty() && run_alike(sms_.back(), sm, next)) {
        ++sms_.back().count;
      } else {
        sms_.push_back({1, sm, next, {}});
      }
    }
  }

  void begin(Half& half, int32_t item) const {
    const Item& of = items_[item];
    half.doing = Doing::kItem;
    half.kind = of.kind;
    half.start_us = of.start_us;
    half.tiles = of.tiles;
  }

  // Gives work to halves of some SMs that do nothing. If a list has less than these SMs could take,
  // the others of them become SMs of their own behind all others.
  void give(size_t index) {
    {
      Sms& sms = sms_[index];
      auto& [first, second] = sms.halves;
      if (sms.next_of_both < both_) {
        if (first.doing != Doing::kNothing || second.doing != Doing::kNothing) return;
        const int32_t item = item_of_both(sms.next_of_both);
        first.left_us = second.left_us = std::min(first.left_us, second.left_us);
        begin(first, item);
        if (sms.next_of_both < wide_) {
          second.doing = Doing::kHelping;
        } else {
          begin(second, item + 1);
        }
        sms.next_of_both += num_sms_;
        return;
      }
    }
    for (int32_t half = 0; half < halves_; ++half) {
      Sms& sms = sms_[index];
      if (sms.halves[half].doing != Doing::kNothing) continue;
      if (sms.next[half] != kNoItem) {
        begin(sms.halves[half], sms.next[half]);
        sms.next[half] = kNoItem;
        continue;
      }
      List& list = lists_[lists_[half].next < lists_[half].end ? half : 1 - half];
      if (list.next >= list.end) {
        sms.halves[half].doing = Doing::kEnded;
        continue;
      }
      const int32_t item = list.next / num_kv_heads_;
      const int32_t left = std::min(list.end, (item + 1) * num_kv_heads_) - list.next;
      const int32_t count = std::min(left, sms.count);
      list.next += count;
      Sms others = sms;
      others.count -= count;
      sms.count = count;
      begin(sms.halves[half], item);
      if (others.count > 0) sms_.push_back(others);
    }
  }

  // Says how long a tile takes in a step: a half that reads shares the memory with all others that
  // do. `tile_us`: of a tile if nothing else is read. Returns how many halves have an item.
  double begin_step(double step_us, double tile_us) {
    double busy = 0.0, reading = 0.0;
    for (Sms& sms : sms_) {
      for (Half& half : sms.halves) {
        half.left_us = step_us;
        half.reads = half.doing == Doing::kItem && half.start_us < 0.5 * step_us;
        if (half.doing != Doing::kItem) continue;
        busy += sms.count;
        reading += sms.count * std::max(1.0 - half.start_us / step_us, 0.0);
      }
    }
    const double memory_us = tile_us * std::max(reading, 1.0);
    for (size_t kind = 0; kind < kNumKinds; ++kind) {
      const double alone_us = by_kind_[kind].tile_us;
      // The branches of a pair load the tiles that they have in common for each other.
      const double beside = kind == kPaired ? 0.0 : costs_.beside;
      tile_us_[kind] = {smooth_max(alone_us, memory_us),
                        smooth_max((1.0 + beside) * alone_us, memory_us)};
    }
    return busy;
  }

  // Goes on until the step or an item ends. Returns whether an item did: left_us then has what is
  // left of the step.
  bool advance(Sms& sms) {
    bool ended = false;
    for (int32_t i = 0; i < 2; ++i) {
      Half& half = sms.halves[i];
      Half& other = sms.halves[1 - i];
      if (half.doing != Doing::kItem || half.left_us <= 0.0) continue;
      const double start_us = std::min(half.start_us, half.left_us);
      half.start_us -= start_us;
      half.left_us -= start_us;
      const double tile_us = tile_us_[half.kind][other.reads];
      const double tiles = std::min(half.tiles, half.left_us / tile_us);
      left_tiles_ -= sms.count * tiles;
      half.tiles -= tiles;
      half.left_us -= tiles * tile_us;
      if (half.tiles > 0.0) {
        half.left_us = 0.0;
        continue;
      }
      ended = true;
      half.doing = Doing::kNothing;
      if (other.doing == Doing::kHelping) {
        other.doing = Doing::kNothing;
        other.left_us = half.left_us;
      }
    }
    return ended;
  }

  // Microseconds that the items take at least: all SMs together, the memory, and the longest.
  double least_us(double tile_us) const {
    double halves_us = 0.0, tiles = 0.0, longest_us = 0.0;
    for (const Item& item : items_) {
      const double us = item.start_us + item.tiles * by_kind_[item.kind].tile_us;
      halves_us += halves_ == 2 && (item.kind == kWide || item.kind == kJoint) ? 2.0 * us : us;
      longest_us = std::max(longest_us, us);
      tiles += item.tiles;
    }
    return std::max({halves_us * num_kv_heads_ / (halves_ * num_sms_),
                     tiles * num_kv_heads_ * tile_us, longest_us});
  }

  // Returns the microseconds until all work units have ended, or infinity if these are more than
  // `limit_us`.
  double run(double tile_us, double step_us, double limit_us) {
    number_units();
    group_sms();
    left_tiles_ = 0.0;
    for (const Item& item : items_) left_tiles_ += item.tiles * num_kv_heads_;
    for (size_t i = 0; i < sms_.size(); ++i) give(i);
    double ended_us = 0.0;
    for (double now_us = 0.0; begin_step(step_us, tile_us) > 0.0; now_us += step_us) {
      const size_t as_before = sms_.size();
      for (size_t i = 0; i < sms_.size(); ++i) {
        if (i >= as_before) give(i);
        while (advance(sms_[i])) {
          for (const Half& half : sms_[i].halves) {
            if (half.doing == Doing::kNothing) {
              ended_us = std::max(ended_us, now_us + step_us - half.left_us);
            }
          }
          give(i);
        }
      }
      // All tiles that are left need their bytes, one after the other.
      if (now_us + left_tiles_ * tile_us > limit_us) return kNever;
    }
    return ended_us > limit_us ? kNever : ended_us;
  }

  int32_t num_sms_, num_kv_heads_, halves_;
  Costs costs_;
  std::array<ItemCost, kNumKinds> by_kind_;  // the same, by kind
  std::vector<Item> items_;  // wide ones, pairs, heavy ones, light ones, each the longest first
  int64_t read_tokens_ = 0;  // of a KV head
  // Work units have the numbers of cuda/forward/scheduler.cuh. Both halves of an SM run those below
  // wide_, and one branch each of the pairs, which have a number each, up to both_. Then half 0
  // begins with the heavy ones, half 1 with the light ones.
  int32_t wide_ = 0, both_ = 0;
  std::array<List, 2> lists_{};
  std::vector<Sms> sms_;
  double left_tiles_ = 0.0;  // of all work units that have not ended
  // By kind, in the present step: a tile's time, if the other half of the SM does not read and if
  // it does.
  std::array<std::array<double, 2>, kNumKinds> tile_us_{};
};

}  // namespace pat
