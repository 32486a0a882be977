// SPDX-License-Identifier: Apache-2.0
// Packs: which queries share an item. Like the paper's TreeHeuristic (PAT section 5.1) it goes down
// the tree and decides for each child whether it takes the tokens above it over; what pays is
// compared in bytes instead of by equations 1 and 2, which paper.h has.
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

// What stands below each node, as packs: its child nodes, the largest first, then the tails of the
// queries that end there; and which of them take its tokens over.
struct Below {
  std::vector<int32_t> first;       // [nodes] or kNoNode
  std::vector<int32_t> next;        // [nodes + queries] the sibling behind a pack, or kNoNode
  std::vector<uint8_t> takes_over;  // [nodes + queries]

  template <typename Visit>
  void for_each(int32_t node, const Visit& visit) const {
    for (int32_t i = first[node]; i != kNoNode; i = next[i]) visit(i);
  }
};

// Decides which nodes and tails take over the tokens of the packs above them. Keeps its working
// memory between calls.
class Packer {
 public:
  // What says which children of a node take its tokens over.
  enum class Rule {
    kBytes,  // the bytes that each way reads and writes
    kPaper,  // equations 1 and 2
    kNone,   // no tree: every query by itself
    kGiven,  // `given`
  };
  // Writes the packs of a batch, each in one piece. `given`: [nodes + queries], with kGiven.
  void choose(const Target& target, const PackTree& tree, const int64_t* seq_lens,
              int32_t num_queries, Rule rule, Packs& out, const uint8_t* given = nullptr);

 private:
  Below below_;
};

}  // namespace pat
