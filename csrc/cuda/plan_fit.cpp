// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan_fit.h"

#include "check.h"
#include "plan.h"

namespace pat {
namespace {

// Beyond this many packed rows the kernels' division by the GQA ratio is not exact.
constexpr int64_t kMaxItemRows = 4096;

template <typename T>
const T* section(const PlanHeader& header, const char* name, int32_t offset, int32_t count) {
  const int64_t end = offset + static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T));
  // Kernels read items as 16-byte words.
  const int align = sizeof(T) == sizeof(Item) ? 16 : 8;
  PAT_CHECK(count >= 0 && offset >= static_cast<int32_t>(sizeof(PlanHeader)) &&
                offset % align == 0 && end <= header.total_bytes,
            "damaged plan: ", count, " ", name, " at byte ", offset, " of ", header.total_bytes);
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(&header) + offset);
}

void check_header(const PlanHeader& h, int64_t plan_bytes, const PlanRoom& room) {
  PAT_CHECK(h.magic == kPlanMagic && h.version == kPlanVersion, "not a plan of version ",
            kPlanVersion, ": magic ", h.magic, ", version ", h.version);
  PAT_CHECK(h.total_bytes <= plan_bytes, "truncated plan: ", plan_bytes, " of ", h.total_bytes,
            " bytes");
  PAT_CHECK(h.num_q_heads == room.num_q_heads && h.num_kv_heads == room.num_kv_heads,
            "the plan is for ", h.num_q_heads, " query and ", h.num_kv_heads,
            " KV heads, the workspace for ", room.num_q_heads, " and ", room.num_kv_heads,
            ": plan for the workspace's target");
  const bool fits = plan_bytes <= room.bytes && h.num_queries <= room.max_queries &&
                    h.num_partials <= room.max_partials;
  PAT_CHECK(fits, "a plan of ", plan_bytes, " bytes, ", h.num_queries, " queries and ",
            h.num_partials, " partials does not fit a workspace for ", room.bytes, " bytes, ",
            room.max_queries, " queries and ", room.max_partials,
            " partials: make the workspace for a target of larger max_queries, max_items and "
            "max_partials");
  PAT_CHECK(h.num_queries >= 0 && h.num_partials >= 0, "damaged plan: ", h.num_queries,
            " queries, ", h.num_partials, " partials");
}

void check_item(const PlanHeader& h, const Item& item, int index, const PlanRoom& room) {
  PAT_CHECK(item.num_queries > 0 && item.member_offset >= 0 &&
                item.member_offset <= h.num_members - item.num_queries && item.row >= 0 &&
                item.row < h.num_queries && item.row_tile >= 0,
            "damaged plan: item ", index, " of row ", item.row, " has members ", item.member_offset,
            " + ", item.num_queries, " of ", h.num_members);
  const bool dynamic = item.kv_len == kDynamic && item.num_queries == 1;
  PAT_CHECK(item.kv_start >= 0 && (item.kv_len > 0 || dynamic), "damaged plan: item ", index,
            " of ", item.num_queries, " queries reads tokens ", item.kv_start, " + ", item.kv_len);
  const int64_t end = static_cast<int64_t>(item.kv_start) + (dynamic ? 0 : item.kv_len);
  PAT_CHECK(end <= room.max_context, "item ", index, " reads up to token ", end,
            ", the workspace holds contexts of ", room.max_context,
            " tokens: make it for a larger max_context");
  const int64_t rows = static_cast<int64_t>(item.num_queries) * (h.num_q_heads / h.num_kv_heads);
  PAT_CHECK(rows <= kMaxItemRows, "item ", index, " has ", rows, " packed rows, at most ",
            kMaxItemRows, " fit: give the target smaller row_tiles");
}

}  // namespace

void check_plan_fits(const void* plan, int64_t plan_bytes, const PlanRoom& room) {
  PAT_CHECK(plan && reinterpret_cast<uintptr_t>(plan) % alignof(PlanHeader) == 0, "plan pointer ",
            plan, " is null or not aligned to ", alignof(PlanHeader), " bytes");
  PAT_CHECK(plan_bytes >= static_cast<int64_t>(sizeof(PlanHeader)), "a plan of ", plan_bytes,
            " bytes is shorter than its header of ", sizeof(PlanHeader));
  const auto& h = *static_cast<const PlanHeader*>(plan);
  check_header(h, plan_bytes, room);
  const auto* items = section<Item>(h, "items", h.items_offset, h.num_items);
  const auto* members = section<Member>(h, "members", h.members_offset, h.num_members);
  const auto* queries = section<QuerySplits>(h, "queries", h.queries_offset, h.num_queries);
  for (int i = 0; i < h.num_items; ++i) check_item(h, items[i], i, room);
  for (int i = 0; i < h.num_members; ++i) {
    const auto [query, partial] = members[i];
    PAT_CHECK(query >= 0 && query < h.num_queries && partial >= kDirect && partial < h.num_partials,
              "damaged plan: member ", i, " is query ", query, " of ", h.num_queries,
              " with partial ", partial, " of ", h.num_partials);
  }
  for (int i = 0; i < h.num_queries; ++i) {
    const auto [offset, splits] = queries[i];
    PAT_CHECK(splits >= 0 && (splits <= 1 || (offset >= 0 && offset <= h.num_partials - splits)),
              "damaged plan: query ", i, " has partials ", offset, " + ", splits, " of ",
              h.num_partials);
  }
}

}  // namespace pat
