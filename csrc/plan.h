// SPDX-License-Identifier: Apache-2.0
// The only definition of a plan: what the scheduler writes and what the CPU executor and the CUDA
// kernels read. A plan is one buffer of plain structs, so that it reaches a GPU with one copy:
//   PlanHeader | Item[num_items] | ItemSegments[num_items] | Member[num_members] |
//   QuerySplits[num_queries] | Segment[num_segments]
//
// A plan holds no slots. Its segments say which tokens of which queries the items read, and where
// the slots of these tokens stand in the list. On a GPU the snapshot fills the list, and the
// forward reads nothing but the list; the CPU executor looks the slots up itself. Of each query's
// last tokens, its tail, a plan says where they begin and not how many they are (kDynamic), so that
// it holds while the sequences grow.
//
// In a step of speculative decoding that verifies draft tokens, a query has several tokens: the
// last draft_tokens of its sequence. They are the last tokens of its tail, all in one item. A draft
// token attends to the tokens before the draft ones, and of these to itself and those before it, or
// to those that the executors' draft masks have, where they are a tree.
//
// Words:
//   query       a request of this step; its number is its place in the batch
//   draft_token one of a query's tokens that attend in this step: a decode step has one a query
//   table_row   row of SGLang's req_to_token: the slots of one request
//   slot        where the K and V of one token lie in the pool
//   group       packed rows of a query: the query heads that share a KV head, num_q_heads /
//               num_kv_heads, for each of its draft tokens
//   node        tokens of the radix tree that the same queries share
//   tail        the tokens of a query behind its last shared node: they grow at every step
//   pack        a node or tail with the queries that read it together, maybe with nodes above it
//   piece       part of a pack that was split along its tokens
//   branch      part of the pack tree that one item reads whole, with masks (see Segment)
//   segment     consecutive tokens that an item reads, and the queries that attend to them
//   item        what an executor runs at once per KV head: one row tile of a piece, or a branch
//   member      a query of an item
//   work_unit   an item for one KV head
//   packed_row  one query head of one draft token of one member: the rows of Q that an item
//               multiplies with K, by member, draft token, head
//   row_mask    which packed rows of a branch attend to a token
//   row tile    packed rows that an executor holds at once; an item fits one
//   KV tile     tokens that an executor holds at once
//   wide, heavy, light   items by packed rows, see kWideRows; a plan has them in this order
//   half        what runs work units on an SM of a GPU: an SM has two, each with memory of its own
//   paired      two branches that begin with the same tokens: the halves of an SM run one each, at
//               the same time, and load every second KV tile of these tokens for both
//   joint       a plan of which every work unit is run by both halves of an SM, see PlanHeader
//   list        the slots of all tokens that the items read, in the order in which they read them:
//               the branches' first, then the other items'
//   room        tokens that a segment has in the list: a tail has more than it needs yet
//   split       one of the items that a query is spread over: QuerySplits::num_splits
//   partial     a split's output and log-sum-exp before the merge, in a numbered partial slot
//   num_sms     SMs of a GPU that run items; on a CPU num_threads
#pragma once

#include <cstdint>

namespace pat {

inline constexpr uint32_t kPlanMagic = 0x50415431;  // "PAT1"
inline constexpr uint32_t kPlanVersion = 10;

// Segment::kv_len of a tail: it covers [kv_start, seq_lens[query]), and seq_lens is read at run
// time.
inline constexpr int32_t kDynamic = -1;
// Member::partial of a query with a single split: the item writes the final output itself.
inline constexpr int32_t kDirect = -1;

struct PlanHeader {
  uint32_t magic;
  uint32_t version;
  int32_t num_queries;       // of the batch
  int32_t num_items;         // wide, paired, other heavy, light ones, each by modelled time
  int32_t num_members;       // sum of Item::num_queries
  int32_t num_segments;      // those of the branches, then those of the other items
  int32_t num_partials;      // partial slots in use; slot p holds [draft_tokens, num_q_heads,
                             // head_dim] + LSE
  int32_t num_shared_items;  // items with tokens that several queries share
  int32_t items_offset;      // byte offsets from the header
  int32_t item_segments_offset;
  int32_t members_offset;
  int32_t queries_offset;
  int32_t segments_offset;
  int32_t total_bytes;
  int32_t num_q_heads;  // the target's heads: an executor refuses a plan of other heads
  int32_t num_kv_heads;
  int32_t num_wide_items;   // the first items, all those of row tiles beyond kWideRows
  int32_t num_heavy_items;  // those after them, all those of row tiles beyond kHeavyRows
  int32_t branch_tokens;    // length of the list's first part, the branches'
  int32_t list_tokens;      // length of the list
  int32_t* list;            // null; a GPU's copy has the list's address in device memory
  int32_t draft_tokens;     // of a query, 1 in a decode step
  int32_t joint;            // 0 or 1: all items are heavy and so few that each work unit has an SM
                            // for itself, whose halves take every second KV tile each
  // 0; in a GPU's copy 1 once the snapshot has written down the first work unit of every half.
  int32_t first_units;
  // The first heavy items, two by two paired branches: an even number. 0 in a joint plan.
  int32_t num_paired_items;
  int32_t unused[2];
};
static_assert(sizeof(PlanHeader) == 112 && sizeof(PlanHeader) % 16 == 0);

// Items of more packed rows are wide: both halves of an SM work on one and share its K/V tiles.
inline constexpr int32_t kWideRows = 64;
// Items of more packed rows, if not wide, are heavy: they ask more of the matrix units than of
// memory. The others are light.
inline constexpr int32_t kHeavyRows = 16;
// Packed rows of a branch, at most. A branch is a heavy item however few rows it has.
inline constexpr int32_t kBranchRows = 64;
static_assert(kBranchRows > kHeavyRows && kBranchRows <= kWideRows);
inline constexpr int32_t kBranchSegments = 256;  // of one branch, at most
// A branch begins in the list at a multiple of so many tokens: a KV tile of its executors.
inline constexpr int32_t kBranchAlign = 64;

enum class ItemKind : int8_t {
  kSingle = 0,  // one query, which attends to all tokens
  kPack = 1,    // several queries, which all attend to all tokens
  kBranch = 2,  // queries that attend to some segments each
  kDrafts = 3,  // the end of one query's tail, with its draft tokens, each of which attends to the
                // tokens up to itself; with one draft token it is a kSingle
};

// Where in a branch the tokens stand that all of its queries attend to, which need no masks, and
// which of its tiles executors run last. Branches take turns, so that they do not all read shared
// tokens from the cache, and then private ones from memory, at the same time.
enum class BranchOrder : int8_t {
  kUnmaskedFirst = 0,  // at the beginning
  kUnmaskedLast = 1,   // at the end; not of paired branches
  kCommonLast = 2,     // at the beginning; executors run the tiles that a pair has in common behind
                       // the others, where both branches have others
};

// What an executor runs at once per KV head: num_queries * group packed rows, which fit `row_tile`,
// attend to the tokens that the list has from list_start on. Row tiles of one piece have the same
// list_start. The kernels load an item as two words of 16 bytes.
struct Item {
  int32_t member_offset;  // first of its members
  int32_t num_queries;
  int32_t list_start;  // of a branch a multiple of kBranchAlign
  int32_t tokens;      // 0; the snapshot writes a GPU's copy: tokens of the item in this step
  int32_t query;       // kSingle, kDrafts: its member, which no kernel need look up; else -1
  int32_t partial;     // kSingle, kDrafts: likewise, kDirect included; else 0
  int16_t row_tile;    // packed rows
  // KV tiles of kBranchAlign tokens, 0 of an item that is no branch:
  int16_t unmasked_tiles;  // which all of its queries attend to, at the end that `order` says
  int16_t common_tiles;    // with which both of a pair begin, all unmasked; 0 of other branches
  ItemKind kind;
  BranchOrder order;
};
static_assert(sizeof(Item) == 32);

constexpr bool is_branch(const Item& item) { return item.kind == ItemKind::kBranch; }

// What the item of the same number reads, for the snapshot and the CPU executor.
struct ItemSegments {
  int32_t first_segment;
  int32_t num_segments;  // 1 unless the item is a branch
};
static_assert(sizeof(ItemSegments) == 8);

// A query of an item and where the item's result for it goes.
struct Member {
  int32_t query;
  int32_t partial;  // partial slot, or kDirect
};
static_assert(sizeof(Member) == 8);

// The partial slots of a query are consecutive and ordered by token position, a branch last; the
// merge reads [partial_offset, partial_offset + num_splits). A query with one split has no slot:
// its item writes the output.
struct QuerySplits {
  int32_t partial_offset;
  int32_t num_splits;
};
static_assert(sizeof(QuerySplits) == 8);

// Consecutive tokens that an item reads and the consecutive members of the item that attend to
// them: all members, unless the item is a branch. The list has the segments of an item one behind
// the other. Behind a tail that is shorter than its room a branch has its next segment at once, so
// that its tokens stand without gaps.
struct Segment {
  int32_t query;         // whose slots it reads
  int32_t kv_start;      // token position
  int32_t kv_len;        // tokens, > 0, or kDynamic: then one member, whose query is `query`
  int32_t room;          // kv_len, or what a tail may reach
  int32_t first_member;  // counted from the item's first
  int32_t num_queries;
};
static_assert(sizeof(Segment) == 24);

constexpr bool is_dynamic(const Segment& segment) { return segment.kv_len == kDynamic; }

// Packed rows of a query and KV head.
constexpr int32_t group_of(const PlanHeader& header) {
  return header.draft_tokens * (header.num_q_heads / header.num_kv_heads);
}

// Bytes of a plan of so many items, members, queries and segments.
constexpr int64_t plan_bytes(int64_t items, int64_t members, int64_t queries, int64_t segments) {
  return static_cast<int64_t>(sizeof(PlanHeader)) +
         items * static_cast<int64_t>(sizeof(Item) + sizeof(ItemSegments)) +
         members * static_cast<int64_t>(sizeof(Member)) +
         queries * static_cast<int64_t>(sizeof(QuerySplits)) +
         segments * static_cast<int64_t>(sizeof(Segment));
}

// The size of a container as a plan counts: queries, nodes, items and members of one batch fit 32
// bits.
template <typename Container>
constexpr int32_t count_of(const Container& container) {
  return static_cast<int32_t>(container.size());
}

}  // namespace pat
