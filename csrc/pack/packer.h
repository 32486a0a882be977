// SPDX-License-Identifier: Apache-2.0
// Packer: which queries share an item (PAT section 5.1: TreeHeuristic, with a choice of
// six rules for what pays).
#pragma once

#include <cstdint>
#include <vector>

#include "target.h"
#include "tree.h"

namespace pat {

// A pack: consecutive tokens of one query's sequence that a set of queries attends to.
struct Pack {
  int32_t start;    // token position
  int32_t end;      // scheduled end; a tail really ends at its sequence length
  int32_t queries;  // members, without those that took its tokens over; 0: it gets no item
  int32_t above;    // pack that holds the tokens before `start`, or kNoNode
  int32_t pieces;   // into which its tokens are cut
  int32_t chunk;    // tokens of each piece but the last

  int32_t tokens() const { return end - start; }
};

// Packs of a batch: one per tree node, then one per query (its private tail).
struct Packs {
  std::vector<Pack> packs;  // [num_nodes + num_queries]
  int32_t num_nodes = 0;

  const Pack& tail(int32_t query) const { return packs[num_nodes + query]; }
  // Whether pack `index` is a tail and all that its query reads: unless it is split, its item
  // writes the output itself.
  bool is_only_pack(int32_t index) const {
    return index >= num_nodes && packs[index].above == kNoNode;
  }
};

// Decides which nodes and tails take over the tokens of the packs above them. Keeps its working
// memory between calls, and a reference to its target.
class Packer {
 public:
  explicit Packer(const Target& target) : target_(target) {}
  // Writes the packs of a batch, each in one piece. `use_tree` false ignores sharing.
  void choose(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries, bool use_tree,
              Packs& out);

 private:
  void list_children(const PackTree& tree, int32_t num_queries, const Packs& packs);
  void decide_below(const PackTree& tree, int32_t node, Packs& out);
  void take_over_all(int32_t node, const Packs& packs);
  void decide_by_paper(const PackTree& tree, int32_t node, const Packs& packs);
  void decide_by_padding(const PackTree& tree, int32_t node, const Packs& packs);
  template <typename TakesOver>
  void decide_one_by_one(const PackTree& tree, int32_t node, const Packs& packs,
                         TakesOver takes_over);
  void decide_by_bytes(const PackTree& tree, int32_t node, const Packs& packs);
  void take_over_longest_tails(int32_t node, int32_t count, const Packs& packs);
  int32_t tails_of(int32_t node) const { return tail_offsets_[node + 1] - tail_offsets_[node]; }

  const Target& target_;
  std::vector<int32_t> child_offsets_, children_;  // nodes by parent, CSR
  std::vector<int32_t> tail_offsets_, tails_;      // queries with a private tail by node, CSR
  std::vector<uint8_t> takes_over_;                // [nodes + queries]
};

}  // namespace pat
