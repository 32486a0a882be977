// SPDX-License-Identifier: Apache-2.0
#include "plan_view.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace pat {
namespace {

template <typename T>
const T* section(const PlanHeader& header, const char* name, int32_t offset, int32_t count) {
  PAT_CHECK(count >= 0, "damaged plan: ", count, " ", name);
  const int64_t end = offset + static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T));
  // Kernels read items as 16-byte words, members and splits as 8-byte words.
  const int align = sizeof(T) == sizeof(Item) ? 16 : 8;
  PAT_CHECK(offset >= static_cast<int32_t>(sizeof(PlanHeader)) && offset % align == 0 &&
                end <= header.total_bytes,
            "damaged plan: ", count, " ", name, " at byte ", offset, " of ", header.total_bytes);
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(&header) + offset);
}

// Throws for item `index` of a damaged plan.
#define PAT_CHECK_ITEM(cond, ...) PAT_CHECK(cond, "damaged plan: item ", index, __VA_ARGS__)

void check_segment(const PlanView& plan, const Item& item, const Segment& s, int index) {
  const bool tail = is_dynamic(s) && s.num_queries == 1;
  PAT_CHECK_ITEM(s.query >= 0 && s.query < plan.header->num_queries && s.kv_start >= 0 &&
                     (s.kv_len > 0 || tail) && s.room > 0 && (tail || s.room == s.kv_len) &&
                     s.first_member >= 0 && s.num_queries > 0 &&
                     s.first_member <= item.num_queries - s.num_queries,
                 " of ", item.num_queries, " queries has a segment for ", s.first_member, " + ",
                 s.num_queries, ", tokens ", s.kv_start, " + ", s.kv_len, " of ", s.room,
                 " of query ", s.query);
  PAT_CHECK_ITEM(is_branch(item) || s.num_queries == item.num_queries, " has tokens for ",
                 s.num_queries, " of its ", item.num_queries, " queries and is no branch");
  const Member& member = plan.members[item.member_offset + s.first_member];
  PAT_CHECK_ITEM(!tail || member.query == s.query, " has the tail of query ", s.query,
                 " for query ", member.query);
}

// Checks that a branch has rows for its queries, and that its KV tiles without a mask hold tokens
// that all of them attend to.
void check_branch(const PlanView& plan, const Item& branch, int index) {
  const int64_t rows = int64_t{branch.num_queries} * group_of(*plan.header);
  PAT_CHECK(rows <= kBranchRows, "damaged plan: branch ", index, " has ", rows,
            " packed rows, at most ", kBranchRows);
  int64_t at_begin = 0;  // tokens that all queries attend to, before the first that some do not
  int64_t at_end = 0;    // and behind the last
  bool all = true;
  plan.for_each_segment(index, [&](const Segment& s) {
    const bool by_all = s.num_queries == branch.num_queries && !is_dynamic(s);
    all &= by_all;
    at_begin += all ? s.kv_len : 0;
    at_end = by_all ? at_end + s.kv_len : 0;
  });
  const int64_t there = branch.order == BranchOrder::kUnmaskedLast ? at_end : at_begin;
  PAT_CHECK(branch.unmasked_tiles >= 0 && branch.unmasked_tiles * kBranchAlign <= there,
            "damaged plan: branch ", index, " has ", branch.unmasked_tiles, " KV tiles of ",
            kBranchAlign, " tokens for all of its queries, of ", there, " tokens");
}

// Checks that a branch and the one before it begin with the tokens that they are said to.
void check_pair(const PlanView& plan, int index) {
  const Item &item = plan.items[index], &other = plan.items[index - 1];
  const int common = item.common_tiles;
  PAT_CHECK(is_branch(item) && is_branch(other) && common == other.common_tiles && common > 0 &&
                item.row_tile == other.row_tile && item.order == other.order &&
                item.order != BranchOrder::kUnmaskedLast &&
                common <= std::min(item.unmasked_tiles, other.unmasked_tiles),
            "damaged plan: items ", index - 1, " and ", index, " are paired with ",
            other.common_tiles, " and ", common,
            " common tiles, must be branches of one row tile and order that begin with as many "
            "unmasked tiles");
  int64_t left = int64_t{common} * kBranchAlign;
  const auto [first, count] = plan.item_segments[index];
  const auto [other_first, other_count] = plan.item_segments[index - 1];
  for (int32_t i = 0; i < std::min(count, other_count) && left > 0; ++i) {
    const Segment &mine = plan.segments[first + i], &theirs = plan.segments[other_first + i];
    const bool same =
        !is_dynamic(mine) && mine.kv_start == theirs.kv_start &&
        (mine.kv_len == theirs.kv_len || std::min(mine.kv_len, theirs.kv_len) >= left);
    PAT_CHECK(same, "damaged plan: items ", index - 1, " and ", index,
              " are paired and begin with tokens ", theirs.kv_start, " + ", theirs.kv_len, " and ",
              mine.kv_start, " + ", mine.kv_len, ", must be the same");
    left -= mine.kv_len;
  }
  PAT_CHECK_ITEM(left <= 0, " lacks ", left, " of the tokens in common with the one before it");
}

// Checks what an item reads and where that stands in the list.
void check_segments(const PlanView& plan, const Item& item, int index) {
  const PlanHeader& header = *plan.header;
  const auto [first, count] = plan.item_segments[index];
  PAT_CHECK_ITEM(count > 0 && count <= (is_branch(item) ? kBranchSegments : 1) && first >= 0 &&
                     first <= header.num_segments - count,
                 " has segments ", first, " + ", count, " of ", header.num_segments);
  int64_t room = 0;
  plan.for_each_segment(index, [&](const Segment& segment) {
    check_segment(plan, item, segment, index);
    room += segment.room;
  });
  const int64_t begin = is_branch(item) ? 0 : header.branch_tokens;
  const int64_t end = is_branch(item) ? header.branch_tokens : header.list_tokens;
  PAT_CHECK_ITEM(item.list_start >= begin && item.list_start + room <= end &&
                     (!is_branch(item) || item.list_start % kBranchAlign == 0),
                 " has tokens ", item.list_start, " + ", room, " of the list, must be in ", begin,
                 " to ", end);
}

// Checks the shape of an item: that it has members, and tokens in the list for them.
void check_item(const PlanView& plan, int index) {
  const PlanHeader& header = *plan.header;
  const Item& item = plan.items[index];
  PAT_CHECK_ITEM(
      item.num_queries > 0 && item.member_offset >= 0 && item.num_queries <= header.num_members &&
          item.member_offset <= header.num_members - item.num_queries,
      " has members ", item.member_offset, " + ", item.num_queries, " of ", header.num_members);
  PAT_CHECK_ITEM(
      item.order >= BranchOrder::kUnmaskedFirst && item.order <= BranchOrder::kCommonLast,
      " is of order ", static_cast<int>(item.order));
  PAT_CHECK_ITEM(item.row_tile >= 0, " has a row tile of ", item.row_tile);
  check_segments(plan, item, index);
  const int peer = plan.peer_of(index);
  if (peer >= 0 && peer < index) check_pair(plan, index);
  if (is_branch(item)) return check_branch(plan, item, index);
  const bool is_tail = is_dynamic(plan.segments[plan.item_segments[index].first_segment]);
  const bool is_single = item.kind == ItemKind::kSingle || item.kind == ItemKind::kDrafts;
  PAT_CHECK_ITEM((is_single || item.kind == ItemKind::kPack) &&
                     (item.kind == ItemKind::kDrafts) == (is_tail && header.draft_tokens > 1),
                 " is of kind ", static_cast<int>(item.kind), " with ", header.draft_tokens,
                 " draft tokens");
  if (!is_single) return;
  const Member& member = plan.members[item.member_offset];
  PAT_CHECK_ITEM(
      item.num_queries == 1 && member.query == item.query && member.partial == item.partial, " of ",
      item.num_queries, " queries is of query ", item.query, " and partial ", item.partial,
      ", its member of ", member.query, " and ", member.partial);
}

// What the items have written so far.
struct Written {
  std::vector<int32_t> splits;  // [num_queries] items that a query is a member of
  std::vector<char> partials;   // [num_partials] whether an item writes it
};

// Checks that an item's members are queries, and writes a split of each that no other has written.
void check_members(const PlanView& plan, int index, Written& written) {
  const Item& item = plan.items[index];
  for (int m = item.member_offset; m < item.member_offset + item.num_queries; ++m) {
    const auto [query, partial] = plan.members[m];
    PAT_CHECK_ITEM(query >= 0 && query < plan.header->num_queries, " has query ", query, " of ",
                   plan.header->num_queries);
    const auto [offset, splits] = plan.queries[query];
    if (splits == 1) {
      PAT_CHECK(partial == kDirect, "damaged plan: query ", query, " has one split, item ", index,
                " writes it to partial ", partial);
    } else {
      PAT_CHECK_ITEM(partial >= offset && partial - offset < splits && !written.partials[partial],
                     " writes partial ", partial, " of query ", query, ", which owns ", offset,
                     " + ", splits, ", each written once");
      written.partials[partial] = 1;
    }
    ++written.splits[query];
  }
}

#undef PAT_CHECK_ITEM

}  // namespace

PlanView view_plan(const void* plan, int64_t plan_bytes) {
  PAT_CHECK(plan && reinterpret_cast<uintptr_t>(plan) % alignof(PlanHeader) == 0, "plan pointer ",
            plan, " is null or not aligned to ", alignof(PlanHeader), " bytes");
  PAT_CHECK(plan_bytes >= static_cast<int64_t>(sizeof(PlanHeader)), "a plan of ", plan_bytes,
            " bytes is shorter than its header of ", sizeof(PlanHeader));
  const auto& header = *static_cast<const PlanHeader*>(plan);
  PAT_CHECK(header.magic == kPlanMagic, "not a plan: magic ", header.magic, ", expected ",
            kPlanMagic);
  PAT_CHECK(header.version == kPlanVersion, "plan version ", header.version,
            ", this executor is of ", kPlanVersion);
  PAT_CHECK(header.draft_tokens > 0 && header.draft_tokens <= INT16_MAX,
            "damaged plan: ", header.draft_tokens, " draft tokens a query");
  PAT_CHECK(header.num_kv_heads > 0 && header.num_q_heads > 0 &&
                header.num_q_heads % header.num_kv_heads == 0,
            "damaged plan: ", header.num_q_heads, " query heads on ", header.num_kv_heads,
            " KV heads");
  PAT_CHECK(header.total_bytes <= plan_bytes, "truncated plan: ", plan_bytes, " of ",
            header.total_bytes, " bytes");
  PAT_CHECK(header.num_partials >= 0 && header.num_partials <= header.num_members,
            "damaged plan: ", header.num_partials, " partials of ", header.num_members, " members");
  const PlanView view{
      &header,
      section<Item>(header, "items", header.items_offset, header.num_items),
      section<ItemSegments>(header, "item segments", header.item_segments_offset, header.num_items),
      section<Member>(header, "members", header.members_offset, header.num_members),
      section<QuerySplits>(header, "queries", header.queries_offset, header.num_queries),
      section<Segment>(header, "segments", header.segments_offset, header.num_segments)};
  PAT_CHECK(header.branch_tokens >= 0 && header.branch_tokens % kBranchAlign == 0 &&
                header.branch_tokens <= header.list_tokens,
            "damaged plan: a list of ", header.list_tokens, " tokens, ", header.branch_tokens,
            " of them of branches, must be a multiple of ", kBranchAlign);
  PAT_CHECK(header.num_wide_items >= 0 && header.num_heavy_items >= 0 &&
                header.num_wide_items <= header.num_items &&
                header.num_heavy_items <= header.num_items - header.num_wide_items,
            "damaged plan: ", header.num_wide_items, " wide and ", header.num_heavy_items,
            " heavy items of ", header.num_items);
  PAT_CHECK(header.joint == 0 || (header.joint == 1 && header.num_heavy_items == header.num_items),
            "damaged plan: joint is ", header.joint, " beside ", header.num_heavy_items,
            " heavy items of ", header.num_items, ", must be 0, or 1 if all are heavy");
  PAT_CHECK(header.num_paired_items >= 0 && header.num_paired_items % 2 == 0 &&
                header.num_paired_items <= (header.joint == 1 ? 0 : header.num_heavy_items),
            "damaged plan: ", header.num_paired_items, " paired items of ", header.num_heavy_items,
            " heavy ones, joint is ", header.joint, ", must be even, and 0 in a joint plan");
  for (int i = 0; header.joint == 1 && i < header.num_items; ++i) {
    const int64_t rows = int64_t{view.items[i].num_queries} * group_of(header);
    PAT_CHECK(rows <= kWideRows && (rows > kHeavyRows || is_branch(view.items[i])),
              "damaged plan: item ", i, " of a joint plan has ", rows, " packed rows, must have ",
              kHeavyRows + 1, " to ", kWideRows, ", or be a branch");
  }
  return view;
}

void check_heads(const PlanHeader& header, const char* whose, int num_q_heads, int num_kv_heads,
                 int draft_tokens) {
  PAT_CHECK(header.num_q_heads == num_q_heads && header.num_kv_heads == num_kv_heads,
            "the plan is for ", header.num_q_heads, " query and ", header.num_kv_heads,
            " KV heads, ", whose, " ", num_q_heads, " and ", num_kv_heads);
  PAT_CHECK(header.draft_tokens == draft_tokens, "the plan is for ", header.draft_tokens,
            " draft tokens a query, ", whose, " ", draft_tokens);
}

PlanReach check_parts(const PlanView& plan) {
  const PlanHeader& header = *plan.header;
  for (int q = 0; q < header.num_queries; ++q) {
    const auto [offset, splits] = plan.queries[q];
    PAT_CHECK(
        splits >= 0 && (splits <= 1 || (offset >= 0 && offset <= header.num_partials - splits)),
        "damaged plan: query ", q, " has partials ", offset, " + ", splits, " of ",
        header.num_partials);
  }
  Written written{std::vector<int32_t>(header.num_queries), std::vector<char>(header.num_partials)};
  PlanReach reach;
  for (int i = 0; i < header.num_items; ++i) {
    check_item(plan, i);
    check_members(plan, i, written);
    plan.for_each_segment(i, [&](const Segment& s) {
      const int64_t end = int64_t{s.kv_start} + (is_dynamic(s) ? 0 : s.kv_len);
      reach.last_token = std::max(reach.last_token, end);
    });
    const int64_t rows = int64_t{plan.items[i].num_queries} * group_of(header);
    reach.most_rows = std::max(reach.most_rows, rows);
  }
  for (int q = 0; q < header.num_queries; ++q) {
    PAT_CHECK(written.splits[q] == plan.queries[q].num_splits, "damaged plan: query ", q,
              " is a member of ", written.splits[q], " items and has ", plan.queries[q].num_splits,
              " splits");
  }
  return reach;
}

}  // namespace pat
