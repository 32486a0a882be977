// SPDX-License-Identifier: Apache-2.0
// Pack tree -> plan: which queries share an item (packs), the ways to cut (cut), how long each
// takes (judge), and the bytes of the one that takes the least (emit).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cut.h"
#include "emit.h"
#include "judge.h"
#include "packs.h"
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
  // An explicit plan, without branches. `takes_over`, [nodes + queries]: whether a node or a tail
  // takes over the tokens above it; `piece_tokens`, likewise: of its pieces. Throws as schedule()
  // does, and for a plan that does not fit the buffers.
  Plan schedule(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                const uint8_t* takes_over, const int32_t* piece_tokens);

  // What the judge charges.
  const Costs& costs() const { return target_.costs; }
  void set_costs(const Costs& costs);

 private:
  Batch batch_of(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries) const;
  bool make_by_paper(const Batch& batch);
  bool make_least(const Batch& batch);
  bool has_cut(size_t index) const { return target_.cuts >> index & 1; }
  bool make(const Batch& batch, const Cut& cut);
  bool make_branches(const Batch& batch, const Cut& cut);
  bool cut_ends(const Batch& batch, const Cut& cut);
  bool take_whole(const Batch& batch);
  bool fits(Items& items, int32_t num_queries);
  std::string make_simpler(const Batch& batch);
  Plan emit(const Batch& batch);

  Target target_;
  Target without_wide_;  // the same without the row tile of wide items, for which packs are chosen
  Packer packer_;
  Packs packs_;  // of the batch at hand, not cut
  TreeOrder order_;
  bool ordered_ = false;  // whether order_ is of the batch at hand
  bool whole_ = false;    // whether packs without branches that stay whole were judged
  Items least_, other_;   // the plan that takes the least time so far, and the one to be judged
  std::string unfit_;     // what the last items that did not fit the buffers needed
  double least_s_ = 0.0;  // that the judge expects of least_; Judge::kNever if it was not asked
  Ends ends_;
  TreeOrder end_order_;  // of the tree of ends_
  Judge judge_;
  Emitter emitter_;
};

}  // namespace pat
