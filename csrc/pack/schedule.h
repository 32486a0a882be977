// SPDX-License-Identifier: Apache-2.0
// Pack tree -> plan. Runs the stages in their order: packer (which queries share an item), branch
// (which parts of the tree become one item), split (where long items are cut), separate (whether a
// small batch shares nothing), alternatives (other plans that are simulated to be faster),
// then assigns the partials, emits the plan, and limits for how long it holds (drift).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "branch.h"
#include "emit.h"
#include "packer.h"
#include "simulation.h"
#include "target.h"
#include "tree.h"

namespace pat {

// Makes plans. Keeps its working memory between calls; not thread-safe.
class Scheduler {
 public:
  // Throws std::invalid_argument for a target that makes no sense.
  explicit Scheduler(const Target& target);
  // Time linear in queries x tree depth (but for sorting the shared nodes). Deterministic: equal
  // input gives an equal plan. `seq_lens`: [num_queries] tokens. Throws std::invalid_argument for a
  // batch beyond max_queries or of more than 2**30 different tokens.
  Plan schedule(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);

 private:
  std::string fit(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  bool assign_partials(int32_t num_queries);
  void number_partials(int32_t query);
  int64_t wide_units() const;
  bool wide_items_fill() const;
  void choose_branches(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  bool drop_branches();
  void count_tokens(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  // In alternatives.cpp:
  BranchCut fastest_cut(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  bool separate(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  double choose_by_simulation(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                              bool separated);
  double simulated(double limit);
  template <typename Make>
  void weigh(const Make& make, double over = 1.0);
  void weigh_branches(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);
  void weigh_packs(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                   bool has_packs);
  bool make_branches(const PackTree& tree, const BranchCut& cut, const int64_t* seq_lens,
                     int32_t num_queries);
  bool make_packs(const PackTree& tree, int32_t tokens, const int64_t* seq_lens,
                  int32_t num_queries);
  void swap_plans();

  Target target_;
  // The target without the row tile of wide items, which take a whole SM. Packs are always chosen
  // with it. So is all of a plan whose wide work units are fewer than four fifths of the SMs.
  Target without_wide_;
  const double item_overhead_s_;   // as given; both targets have that of the batch at hand
  const Target* tiles_ = nullptr;  // of the two, the one whose row tiles the plan at hand has
  Packer packer_;
  Brancher brancher_;
  Packs packs_;
  Packs other_packs_;          // of a plan that may replace the one at hand
  PackTree rooted_;            // the tree at hand below a root of no tokens, for groups
  BranchLoad branches_;        // of the plan at hand; zero if it has none
  std::optional<bool> split_;  // what split_packs() said, if packs_ are split for target_ already
  int64_t unique_tokens_ = 0;  // of the batch at hand, those of each node once
  int64_t longest_ = 0;        // tokens of its longest node or tail
  Assignment assigned_;
  // The plan beside the one at hand, while two are compared.
  struct Other {
    Packs packs;
    Brancher brancher;
    BranchLoad branches;
    Assignment assigned;
    const Target* tiles = nullptr;
  };
  Other other_;
  double least_ = 0.0;  // simulated seconds below which another plan is taken
  const bool simulates_;
  Simulation simulation_;
  Emitter emitter_;
};

}  // namespace pat
