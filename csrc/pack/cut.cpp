// SPDX-License-Identifier: Apache-2.0
#include "cut.h"

#include <algorithm>

namespace pat {

// A tail's last piece holds all of the query's draft tokens, so a shorter one is joined to the
// piece before it.
void cut_pack(const Target& target, Pack& pack, int32_t tokens) {
  const int64_t all = std::max(pack.tokens(), 1);
  const int64_t least = (all + kMostPieces - 1) / kMostPieces;
  pack.chunk = static_cast<int32_t>(std::clamp<int64_t>(tokens, least, all));
  pack.pieces = static_cast<int32_t>((all + pack.chunk - 1) / pack.chunk);
  const auto last = [&] { return all - int64_t{pack.pieces - 1} * pack.chunk; };
  while (pack.pieces > 1 && last() < target.draft_tokens) --pack.pieces;
}

int32_t equal_tokens(const Target& target, const Pack& pack, int32_t most) {
  if (pack.tokens() <= most) return most;
  const int32_t pieces = (pack.tokens() + most - 1) / most;
  const int32_t tile = target.kv_tiles.front();
  return ((pack.tokens() + pieces - 1) / pieces + tile - 1) / tile * tile;
}

void Items::take(const Packs& packs) {
  packs_ = packs;
  brancher_.clear();
}

int64_t Items::branch(const TreeOrder& order, const Target& target, const Cut& cut,
                      const std::vector<uint8_t>* taken) {
  return brancher_.cut(order, cut.limit, cut.branch_rows / target.group(), packs_, taken);
}

// The shortest pieces that make no more units than the cut wants. An SM that gets one piece more
// than others takes that much longer, so these fill the SMs evenly, whatever is left for short
// items.
int32_t Items::piece_tokens(const Cut& cut, const Target& target) const {
  const auto most = static_cast<int64_t>(cut.parts * target.slots() / target.num_kv_heads);
  const int64_t tile = target.kv_tiles.back();
  int64_t few = 1, many = 0;  // tiles of a piece, of which there are too many or not
  while (has_more_units(target, few * tile, most)) few *= 2;
  while (few - many > 1) {
    const int64_t middle = (few + many) / 2;
    (has_more_units(target, middle * tile, most) ? many : few) = middle;
  }
  return static_cast<int32_t>(std::min<int64_t>(few * tile, INT32_MAX));
}

// Whether pieces of so many tokens make more than `most` units of one KV head. Units of less than
// half of that are short: they fill what the others leave.
bool Items::has_more_units(const Target& target, int64_t tokens, int64_t most) const {
  int64_t units = 0;
  for (const Pack& pack : packs_.packs) {
    const int64_t length = pack.tokens();
    if (2 * length <= tokens || pack.queries == 0) continue;
    const int32_t slots = target.slots_of(target.row_tile_for(pack.queries));
    units += target.num_row_tiles(pack.queries) * slots * ((length + tokens - 1) / tokens);
    if (units > most) return true;
  }
  return false;
}

// A wide work unit takes all of an SM, which otherwise runs two smaller ones side by side: without
// one for four fifths of the SMs the plan has none.
void Items::choose_row_tiles(const Target& target, const Target& without_wide) {
  target_ = &target;
  if (target.row_tiles.size() == without_wide.row_tiles.size()) return;
  const int64_t wide = wide_units(target);
  if (wide > 0 && !target.fills_sms(wide)) target_ = &without_wide;
}

int64_t Items::wide_units(const Target& target) const {
  const int64_t most = target.max_tile_queries();
  int64_t wide = 0;
  for (const Pack& pack : packs_.packs) {
    const bool last = pack.queries % most * target.group() > kWideRows;
    wide += (pack.queries / most + last) * pack.pieces;
  }
  return wide * target.num_kv_heads;
}

// Lists the members of every pack and numbers the partials of every query by token position, from
// the query's first: emit.cpp adds where its partial slots begin, or writes kDirect.
bool Items::assign(int32_t num_queries) {
  Assignment& out = assigned_;
  const int32_t num_packs = count_of(packs_.packs);
  out.member_offsets.resize(num_packs + 1);
  out.num_items = out.num_partials = 0;
  int32_t num_members = 0;
  for (int32_t i = 0; i < num_packs; ++i) {
    const Pack& pack = packs_.packs[i];
    out.member_offsets[i] = num_members;
    num_members += pack.queries;
    out.num_items += target_->num_row_tiles(pack.queries) * pack.pieces;
  }
  out.member_offsets[num_packs] = num_members;
  out.members.resize(num_members + brancher_.members().size());
  for (const Branch& branch : brancher_.branches()) out.num_items += branch.num_queries > 0;
  out.splits.resize(num_queries);
  for (int32_t query = 0; query < num_queries; ++query) number_partials(query);
  // number_partials() used each pack's offset as a cursor. It now stands at the pack's end, which
  // is where the next pack starts: shift them back.
  for (int32_t i = num_packs; i > 0; --i) out.member_offsets[i] = out.member_offsets[i - 1];
  out.member_offsets[0] = 0;
  for (const int32_t query : brancher_.members()) {
    out.members[num_members++] = {query, out.splits[query].num_splits - 1};
  }
  return out.num_items <= target_->max_items && out.num_partials <= target_->max_partials;
}

// Enters a query into its packs, from the last back to the first, and gives it its partials. A
// branch is the last of its splits.
void Items::number_partials(int32_t query) {
  const std::vector<Pack>& packs = packs_.packs;
  const int32_t tail = packs_.num_nodes + query;
  const int32_t last = packs[tail].queries > 0 ? tail : packs[tail].above;
  const bool in_branch = brancher_.branch_of(query) != kNoNode;
  int32_t partial = 0;
  for (int32_t i = last; i != kNoNode; i = packs[i].above) partial += packs[i].pieces;
  const int32_t total = partial + in_branch;
  assigned_.splits[query] = {static_cast<int32_t>(assigned_.num_partials), total};
  if (total > 1) assigned_.num_partials += total;
  for (int32_t i = last; i != kNoNode; i = packs[i].above) {
    partial -= packs[i].pieces;
    assigned_.members[assigned_.member_offsets[i]++] = {query, partial};
  }
}

}  // namespace pat
