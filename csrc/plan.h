// SPDX-License-Identifier: Apache-2.0
// The only definition of a plan: what the scheduler writes, the CPU executor and the CUDA kernels
// read. Plain structs with fixed sizes, laid out in one buffer so that a plan reaches a GPU with
// one copy:
//   PlanHeader | Item[num_items] | Member[num_members] | QuerySplits[num_queries] |
//   Segment[num_segments]
//
// A plan holds no slot ids. An item names a row of the batch and a range of token positions; the
// executor looks the slots up in that row. It depends on lengths only through each query's last
// tokens, whose number is kDynamic: the plan stays valid while the tails grow.
//
// A branch is an item of several such ranges, its segments, each for some of its queries: a part of
// the pack tree with all that grows from it, done at once, so that none of it needs a partial.
#pragma once

#include <cstdint>

namespace pat {

inline constexpr uint32_t kPlanMagic = 0x50415431;  // "PAT1"
inline constexpr uint32_t kPlanVersion = 4;

// Item::kv_len of a private tail: the item covers [kv_start, seq_lens[row]), read at run time.
inline constexpr int32_t kDynamic = -1;
// Item::kv_len of a branch.
inline constexpr int32_t kBranch = -2;
// Member::partial of a query with a single split: the item writes the final output itself.
inline constexpr int32_t kDirect = -1;

struct PlanHeader {
  uint32_t magic;
  uint32_t version;
  int32_t num_queries;       // rows of the batch that the plan covers
  int32_t num_items;         // live items: wide, heavy, then light ones, each heaviest first
  int32_t num_members;       // sum of Item::num_queries
  int32_t num_partials;      // partial slots in use; slot p holds [num_q_heads, head_dim] + LSE
  int32_t num_shared_items;  // items that more than one query shares
  int32_t items_offset;      // byte offsets from the header
  int32_t members_offset;
  int32_t queries_offset;
  int32_t total_bytes;
  int32_t max_queries;   // capacities the schedule was made for: a plan that would
  int32_t max_items;     // exceed one is made without splits, then without packs,
  int32_t max_partials;  // so that it always fits (see schedule.h)
  int32_t num_q_heads;   // the target's heads: an executor refuses a plan of other heads
  int32_t num_kv_heads;
  int32_t num_wide_items;   // the first items, all those of row tiles beyond 64
  int32_t num_heavy_items;  // those after them, all those of row tiles beyond 32
  int32_t num_segments;
  int32_t segments_offset;
  int32_t branch_tokens;  // length of the snapshot's list of the branches' tokens
  int32_t reserved[3];
};
static_assert(sizeof(PlanHeader) == 96);

// Packed rows beyond which an item is wide: two halves of an SM share its K/V tiles.
inline constexpr int32_t kWideRows = 64;
// Packed rows beyond which an item, if not wide, is heavy: it asks more of the matrix units than of
// memory. The others are light.
inline constexpr int32_t kHeavyRows = 32;
// Packed rows of a branch, at most, which is a heavy item however few it has; and its segments.
inline constexpr int32_t kBranchRows = 64;
static_assert(kBranchRows > kHeavyRows && kBranchRows <= kWideRows);
inline constexpr int32_t kBranchSegments = 256;
// The snapshot's list begins a branch at a multiple of so many tokens.
inline constexpr int32_t kBranchAlign = 64;

// One forward work item: `num_queries` queries attend to the tokens [kv_start, kv_start + kv_len)
// of batch row `row`. The executor runs it once per KV head, with num_queries * (num_q_heads /
// num_kv_heads) packed rows, which fit `row_tile`.
struct Item {
  int32_t member_offset;  // first of its members
  int32_t num_queries;    // 1 if kv_len == kDynamic
  int32_t row;            // batch row (query index) whose slots the item reads; of a branch the
                          // first of its segments
  int32_t kv_start;       // token position; of a branch that in the snapshot's list
  int32_t kv_len;         // tokens, > 0, or kDynamic, or kBranch
  int16_t row_tile;       // packed rows of the tile
  int16_t kv_tile;        // tokens of the tile, which executors know from kv_len; of a branch see
                          // seen_by_all()
  // Of an item of one query, which then is `row`, so that a kernel need not look its member up, its
  // Member::partial; of a branch how many segments it has.
  int32_t partial;
  // Tokens in this step: kv_len, or what kDynamic or the segments come to. Written by the snapshot,
  // into the device's copy of the plan.
  int32_t tokens;
};
static_assert(sizeof(Item) == 32);

// Of the list's tokens of a branch so many blocks of kBranchAlign, the first ones, are for all of
// its queries; if negative, the last ones, so that not all branches ask for tokens that are in the
// cache, and then for tokens that are not, at the same time.
constexpr int32_t seen_by_all(const Item& branch) { return branch.kv_tile; }

// A query of an item and where the item's result for it goes.
struct Member {
  int32_t query;    // batch row
  int32_t partial;  // partial slot, or kDirect
};
static_assert(sizeof(Member) == 8);

// The partial slots of a query are consecutive and ordered by token position; the merge reads
// [partial_offset, partial_offset + num_splits). num_splits == 1 means written directly, no slot.
struct QuerySplits {
  int32_t partial_offset;
  int32_t num_splits;
};
static_assert(sizeof(QuerySplits) == 8);

// Consecutive tokens of a branch and the consecutive members of the branch that attend to them.
struct Segment {
  int32_t row;       // batch row whose slots it reads
  int32_t kv_start;  // token position
  int32_t kv_len;    // tokens, > 0, or kDynamic: then one member, whose query is `row`
  int32_t room;      // tokens that it has in the snapshot's list: kv_len, or what a tail may reach
  int32_t first;     // member, counted from the branch's first
  int32_t num_queries;
};
static_assert(sizeof(Segment) == 24);

// Bytes of a plan of so many items, members, queries and segments.
constexpr int64_t plan_bytes(int64_t items, int64_t members, int64_t queries, int64_t segments) {
  return static_cast<int64_t>(sizeof(PlanHeader)) + items * static_cast<int64_t>(sizeof(Item)) +
         members * static_cast<int64_t>(sizeof(Member)) +
         queries * static_cast<int64_t>(sizeof(QuerySplits)) +
         segments * static_cast<int64_t>(sizeof(Segment));
}

}  // namespace pat
