// SPDX-License-Identifier: Apache-2.0
// The ways to cut a pack tree into items. Each gives a plan; the judge says which takes the least
// time (schedule.h). To add one, add a row to kCuts, and a field to Cut if no row can say it.
#pragma once

#include <algorithm>
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
  bool ends = false;  // instead of `limit`, Ends says what is part of a branch
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

// Tokens of equal pieces of a pack, in whole tiles, of which none has more than `most`, itself
// whole tiles.
inline int32_t equal_tokens(const Target& target, const Pack& pack, int32_t most) {
  if (pack.tokens() <= most) return most;
  const int32_t pieces = (pack.tokens() + most - 1) / most;
  const int32_t tile = target.kv_tiles.front();
  return ((pack.tokens() + pieces - 1) / pieces + tile - 1) / tile * tile;
}

// As in the paper (PAT section 6): tokens of the pieces of each pack. What is longer than the mean
// of all items is cut into equal pieces no longer than that.
inline std::vector<int32_t> split_by_mean(const Target& target, const Packs& packs) {
  int64_t tokens = 0, items = 0;
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const int64_t tiles = target.num_row_tiles(pack.queries);
    tokens += tiles * pack.tokens();
    items += tiles;
  }
  const int64_t mean = std::max<int64_t>(tokens / std::max<int64_t>(items, 1), 1);
  std::vector<int32_t> pieces;
  for (const Pack& pack : packs.packs) {
    const int64_t length = std::max(pack.tokens(), 1), count = (length + mean - 1) / mean;
    pieces.push_back(static_cast<int32_t>((length + count - 1) / count));
  }
  return pieces;
}

// All items of a plan before it is emitted. Keeps its working memory from plan to plan.
struct Items {
  const Target* target = nullptr;  // with the row tiles that the items have
  Packs packs;
  Brancher brancher;
  std::vector<QuerySplits> splits;      // [queries]; the offset of one split means nothing yet
  std::vector<int32_t> member_offsets;  // [packs + 1] into members; branches follow the packs
  // Of each pack and each branch; Member::partial: of the pack's first piece, from the query's
  // first.
  std::vector<Member> members;
  int64_t num_items = 0;
  int64_t num_partials = 0;

  // Takes over packs, which it leaves whole, without branches.
  void take(const Packs& whole) {
    packs = whole;
    brancher.clear();
  }

  // Tokens of the pieces of a cut of the packs at hand, in whole KV tiles: the shortest that make
  // no more units than the cut wants. An SM that gets one piece more than others takes that much
  // longer, so these fill the SMs evenly, whatever is left for short items.
  int32_t piece_tokens(const Cut& cut, const Target& of) const {
    const auto most = static_cast<int64_t>(cut.parts * of.slots() / of.num_kv_heads);
    const int64_t tile = of.kv_tiles.back();
    int64_t few = 1, many = 0;  // tiles of a piece, of which there are too many or not
    while (has_more_units(of, few * tile, most)) few *= 2;
    while (few - many > 1) {
      const int64_t middle = (few + many) / 2;
      (has_more_units(of, middle * tile, most) ? many : few) = middle;
    }
    return static_cast<int32_t>(std::min<int64_t>(few * tile, INT32_MAX));
  }

  // Cuts pack i into pieces of tokens_of(i) tokens.
  template <typename TokensOf>
  void split(const Target& with_wide, const Target& without_wide, const TokensOf& tokens_of) {
    for (int32_t i = 0; i < count_of(packs.packs); ++i) {
      cut_pack(with_wide, packs.packs[i], tokens_of(i));
    }
    choose_row_tiles(with_wide, without_wide);
  }

  // Lists the members of every pack and numbers the partials of every query by token position, from
  // the query's first: emit.h adds where its partial slots begin, or writes kDirect. Returns
  // whether items and partials fit the target's buffers.
  bool assign(int32_t num_queries) {
    const int32_t num_packs = count_of(packs.packs);
    member_offsets.resize(num_packs + 1);
    num_items = num_partials = 0;
    int32_t num_members = 0;
    for (int32_t i = 0; i < num_packs; ++i) {
      const Pack& pack = packs.packs[i];
      member_offsets[i] = num_members;
      num_members += pack.queries;
      num_items += target->num_row_tiles(pack.queries) * pack.pieces;
    }
    member_offsets[num_packs] = num_members;
    members.resize(num_members + brancher.members().size());
    for (const Branch& branch : brancher.branches()) num_items += branch.num_queries > 0;
    splits.resize(num_queries);
    for (int32_t query = 0; query < num_queries; ++query) number_partials(query);
    // number_partials() used each pack's offset as a cursor. It now stands at the pack's end, which
    // is where the next pack starts: shift them back.
    for (int32_t i = num_packs; i > 0; --i) member_offsets[i] = member_offsets[i - 1];
    member_offsets[0] = 0;
    for (const int32_t query : brancher.members()) {
      members[num_members++] = {query, splits[query].num_splits - 1};
    }
    return num_items <= target->max_items && num_partials <= target->max_partials;
  }

 private:
  // Sets Pack::pieces and Pack::chunk: pieces of `tokens` tokens, or longer ones if these were too
  // many. A tail's last piece holds all of the query's draft tokens, so a shorter one is joined to
  // the piece before it.
  static void cut_pack(const Target& target, Pack& pack, int32_t tokens) {
    const int64_t all = std::max(pack.tokens(), 1);
    const int64_t least = (all + kMostPieces - 1) / kMostPieces;
    pack.chunk = static_cast<int32_t>(std::clamp<int64_t>(tokens, least, all));
    pack.pieces = static_cast<int32_t>((all + pack.chunk - 1) / pack.chunk);
    const auto last = [&] { return all - int64_t{pack.pieces - 1} * pack.chunk; };
    while (pack.pieces > 1 && last() < target.draft_tokens) --pack.pieces;
  }

  // A wide work unit takes all of an SM, which otherwise runs two smaller ones side by side:
  // without one for four fifths of the SMs the plan has none.
  void choose_row_tiles(const Target& with_wide, const Target& without_wide) {
    target = &with_wide;
    if (with_wide.row_tiles.size() == without_wide.row_tiles.size()) return;
    const int64_t most = with_wide.max_tile_queries();
    int64_t wide = 0;
    for (const Pack& pack : packs.packs) {
      const bool last = pack.queries % most * with_wide.group() > kWideRows;
      wide += (pack.queries / most + last) * pack.pieces;
    }
    if (wide > 0 && !with_wide.fills_sms(wide * with_wide.num_kv_heads)) target = &without_wide;
  }

  // Whether pieces of so many tokens make more than `most` units of one KV head. Units of less than
  // half of that are short: they fill what the others leave.
  bool has_more_units(const Target& of, int64_t tokens, int64_t most) const {
    int64_t units = 0;
    for (const Pack& pack : packs.packs) {
      const int64_t length = pack.tokens();
      if (2 * length <= tokens || pack.queries == 0) continue;
      const int32_t slots = of.slots_of(of.row_tile_for(pack.queries));
      units += of.num_row_tiles(pack.queries) * slots * ((length + tokens - 1) / tokens);
      if (units > most) return true;
    }
    return false;
  }

  // Enters a query into its packs, from the last back to the first, and gives it its partials. A
  // branch is the last of its splits.
  void number_partials(int32_t query) {
    const Pack& tail = packs.tail(query);
    const int32_t last = tail.queries > 0 ? packs.num_nodes + query : tail.above;
    const bool in_branch = brancher.branch_of(query) != kNoNode;
    int32_t partial = 0;
    for (int32_t i = last; i != kNoNode; i = packs.packs[i].above) partial += packs.packs[i].pieces;
    const int32_t total = partial + in_branch;
    splits[query] = {static_cast<int32_t>(num_partials), total};
    if (total > 1) num_partials += total;
    for (int32_t i = last; i != kNoNode; i = packs.packs[i].above) {
      partial -= packs.packs[i].pieces;
      members[member_offsets[i]++] = {query, partial};
    }
  }
};

}  // namespace pat
