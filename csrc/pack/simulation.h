// SPDX-License-Identifier: Apache-2.0
// Simulates when the halves of a Hopper's SMs run the items of a plan, to tell which of two plans
// is faster. The cost model counts bytes and the longest item; what it cannot see is how items of
// many lengths follow one another on the halves, and how fast each reads while others do.
#pragma once

#include <cstdint>
#include <vector>

#include "branch.h"
#include "emit.h"
#include "packer.h"
#include "target.h"

namespace pat {

// Keeps its working memory between calls.
class Simulation {
 public:
  // Whether plans for the target are like those that the simulation was fitted to.
  static bool knows(const Target& target);
  // Seconds until the merge of a plan is done, the launch included, or infinity if these are more
  // than `limit`. `target` has the row tiles of the plan's items; the packs are split; `assigned`
  // numbers their partials.
  double seconds(const Target& target, const Packs& packs, const Brancher& brancher,
                 const Assignment& assigned, int64_t unique_tokens, double limit);
  // Seconds that branches of so many tokens take at least.
  static double least_seconds(const Target& target, int64_t branch_tokens);

 private:
  struct Kind;  // of items, see simulation.cpp
  struct Item {
    const Kind* kind;
    double start_us;  // before the first tile
    double tiles;     // KV tiles, masked ones as more
  };
  struct Running {
    const Kind* kind;
    double start_us;  // left of what comes before the first tile
    double tiles;     // left
    bool light;       // which of the two slots it has; a wide item has both
  };

  void list_items(const Target& target, const Packs& packs, const Brancher& brancher);
  void add_pack(const Target& target, const Pack& pack);
  void begin(double share);
  double step(double tile_us);

  std::vector<Item> items_;  // of one KV head: wide, heavy, then light ones, each the longest first
  std::vector<Running> running_;
  int64_t read_tokens_ = 0;
  double left_tiles_ = 0.0;  // of all items that have not ended
  // SMs of one KV head. Of the two halves of each, one takes heavy items first, the other light
  // ones.
  double sms_ = 0.0;
  int32_t free_heavy_ = 0, free_light_ = 0;
  size_t next_wide_ = 0, next_heavy_ = 0, next_light_ = 0;
  size_t end_wide_ = 0, end_heavy_ = 0;
};

}  // namespace pat
