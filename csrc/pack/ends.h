// SPDX-License-Identifier: Apache-2.0
// Ends: where each row tile takes as long as any other, the tails of a node's queries cost less as
// one branch than as an item each. A branch with all of a long node would take longer than other
// items, so it gets the node's last tokens alone: as many as make it as long as the node's pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "packs.h"
#include "target.h"
#include "tree.h"

namespace pat {

class Ends {
 public:
  // Lists what branches of `most` queries would have to read, as packs: nodes together with the
  // tails below them. The tree must live until cut().
  const Packs& list(const Target& target, const PackTree& tree, const int64_t* seq_lens,
                    int32_t num_queries, int32_t most);
  // Cuts the nodes for branches and pieces of about `tokens` tokens. Returns whether there are
  // branches.
  bool cut(int32_t tokens);

  const PackTree& tree() const { return cut_; }  // with the nodes that were cut as two each
  // [nodes of tree()] whether a node and the tails below it are for branches.
  const std::vector<uint8_t>& taken() const { return taken_; }
  // Tokens of the pieces of a node of tree(), or of a tail behind these, at most.
  int32_t piece_tokens(int32_t pack) const { return pieces_[pack]; }

 private:
  struct Tails {
    int32_t queries = 0;   // that end at a node
    int64_t tokens = 0;    // of their tails; then of those of one branch
    int64_t branches = 0;  // for each row tile
  };
  struct Pieces {
    int64_t tokens = 0;  // of all
    int64_t each = 0;
  };
  Pieces pieces_of(int32_t node, int64_t tokens) const;
  void add(PackNode node, int32_t end, int64_t piece_tokens);

  const PackTree* tree_ = nullptr;
  std::vector<Tails> tails_;     // [nodes], none where queries end further below, too
  std::vector<int32_t> mapped_;  // [nodes] to those of cut_
  Packs packs_;
  PackTree cut_;
  std::vector<uint8_t> taken_;
  std::vector<int32_t> pieces_;  // [nodes of cut_ + queries]
};

}  // namespace pat
