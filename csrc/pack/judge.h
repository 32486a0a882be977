// SPDX-License-Identifier: Apache-2.0
// Judge: how long a plan takes. Simulates when the halves of a GPU's SMs run its work units, as the
// kernels do: a sum of bytes and the longest item do not tell how items of many lengths follow one
// another on the halves, and how fast each reads while others do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "costs.h"
#include "cut.h"
#include "target.h"

namespace pat {

// Judges plans for one target, with or without its row tile of wide items. Keeps its working memory
// between calls.
class Judge {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  explicit Judge(const Target& target);

  // Seconds until the merge of a plan is done, the launch included, or infinity if these are
  // `limit` or more. The partials of `plan` are numbered.
  double seconds(const Items& plan, int64_t unique_tokens, double limit);
  // Seconds that branches of so many tokens take at least.
  double least_seconds(int64_t branch_tokens) const;

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
    int32_t next;  // the first one that no half has been given
  };

  void add(Kind kind, int32_t tokens);
  void add_pack(const Target& target, const Pack& pack);
  void list_items(const Items& plan);
  double merge_us(const Items& plan) const;
  void number_units();
  int32_t first_item(int32_t sm, int32_t half) const;
  int32_t item_of_both(int32_t unit) const;
  bool run_alike(int32_t item, int32_t other) const;
  bool run_alike(const Sms& sms, int32_t sm, const std::array<int32_t, 2>& next) const;
  void group_sms();
  void begin(Half& half, int32_t item) const;
  void give(size_t index);
  double begin_step(double step_us, double tile_us);
  bool advance(Sms& sms);
  double least_us(double tile_us) const;
  double run(double tile_us, double step_us, double limit_us);

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
