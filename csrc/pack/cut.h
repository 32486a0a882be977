// SPDX-License-Identifier: Apache-2.0
// The ways to cut a pack tree into items. Each gives a plan; the judge says which takes the least
// time (schedule.cpp). A way more is a row of kCuts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../plan.h"
#include "branch.h"
#include "packs.h"
#include "target.h"
#include "tree.h"

namespace pat {

// Packs are cut along their tokens into pieces, branches are parts of the tree that are read whole.
struct Cut {
  const char* name;
  // Pieces are as short as they can be while long items make at most so many work units for each
  // half of an SM.
  double parts;
  // Packed rows of a branch, at most; 0: no branches. Nodes and tails of more than `limit` tokens
  // are no part of a branch.
  int32_t branch_rows;
  int32_t limit;
  bool ends = false;  // instead of `limit`, ends.h says what is part of a branch
};

// The judge gives up a plan that takes longer than one before it, so those that are often the
// fastest come first.
inline constexpr std::array kCuts = {
    Cut{"branches", 1.0, kBranchRows, INT32_MAX},
    Cut{"half_branches", 1.0, kBranchRows / 2, INT32_MAX},
    Cut{"short_branches", 0.5, kBranchRows / 2, 128},
    Cut{"half_parts", 1.0, 0, 0},
    Cut{"sm_parts", 0.5, 0, 0},
    Cut{"quarter_parts", 2.0, 0, 0},
    Cut{"end_branches", 1.0, kBranchRows, 0, true},
    Cut{"half_end_branches", 1.0, kBranchRows / 2, 0, true},
};

// Bits of the cuts without branches, as in Target::cuts.
inline constexpr uint32_t kPieceCuts = [] {
  uint32_t bits = 0;
  for (size_t i = 0; i < kCuts.size(); ++i) bits |= uint32_t{kCuts[i].branch_rows == 0} << i;
  return bits;
}();

// A batch to be cut.
struct Batch {
  const PackTree& tree;
  const int64_t* seq_lens;  // [num_queries]
  int32_t num_queries;
  int64_t unique_tokens;  // those of each node once
  int64_t longest;        // tokens of its longest node or tail
};

// Which queries each pack and each branch has, and which partials they write.
struct Assignment {
  std::vector<QuerySplits> splits;      // [queries]; the offset of one split means nothing yet
  std::vector<int32_t> member_offsets;  // [packs + 1] into members; branches follow the packs
  std::vector<Member>
      members;  // Member::partial: of the pack's first piece, from the query's first
  int64_t num_items = 0;
  int64_t num_partials = 0;
};

// Sets Pack::pieces and Pack::chunk: pieces of `tokens` tokens, or longer ones if these were too
// many.
void cut_pack(const Target& target, Pack& pack, int32_t tokens);

// Tokens of equal pieces of a pack, in whole tiles, of which none has more than `most`, itself
// whole tiles.
int32_t equal_tokens(const Target& target, const Pack& pack, int32_t most);

// All items of a plan before it is emitted. Keeps its working memory from plan to plan.
struct Items {
  const Target* target = nullptr;  // with the row tiles that the items have
  Packs packs;
  Brancher brancher;
  Assignment assigned;

  // Takes over packs, which it leaves whole, without branches.
  void take(const Packs& whole);
  // Tokens of the pieces of a cut of the packs at hand, in whole KV tiles.
  int32_t piece_tokens(const Cut& cut, const Target& of) const;
  // Cuts pack i into pieces of tokens_of(i) tokens.
  template <typename TokensOf>
  void split(const Target& with_wide, const Target& without_wide, const TokensOf& tokens_of) {
    for (int32_t i = 0; i < count_of(packs.packs); ++i) {
      cut_pack(with_wide, packs.packs[i], tokens_of(i));
    }
    choose_row_tiles(with_wide, without_wide);
  }
  // Numbers the partials. Returns whether items and partials fit the target's buffers.
  bool assign(int32_t num_queries);

 private:
  void choose_row_tiles(const Target& with_wide, const Target& without_wide);
  bool has_more_units(const Target& of, int64_t tokens, int64_t most) const;
  void number_partials(int32_t query);
};

}  // namespace pat
