// SPDX-License-Identifier: Apache-2.0
#include "check.h"
#include "cuda/decode.h"
#include "plan_view.h"

namespace pat {
namespace {

// Beyond this many packed rows the kernels' division by the rows of a query is not exact.
constexpr int64_t max_item_rows(int64_t group) { return 65536 / group; }

void check_header(const PlanHeader& h, int64_t plan_bytes, const PlanRoom& room) {
  PAT_CHECK(h.num_q_heads == room.num_q_heads && h.num_kv_heads == room.num_kv_heads,
            "the plan is for ", h.num_q_heads, " query and ", h.num_kv_heads,
            " KV heads, the workspace for ", room.num_q_heads, " and ", room.num_kv_heads,
            ": plan for the workspace's target");
  PAT_CHECK(h.draft_tokens == room.draft_tokens, "the plan is for ", h.draft_tokens,
            " draft tokens a query, the workspace for ", room.draft_tokens,
            ": plan for the workspace's target");
  const bool fits = plan_bytes <= room.bytes && h.num_queries <= room.max_queries &&
                    h.num_partials <= room.max_partials &&
                    h.branch_tokens <= room.max_branch_tokens &&
                    h.list_tokens <= room.max_list_tokens;
  PAT_CHECK(fits, "a plan of ", plan_bytes, " bytes, ", h.num_queries, " queries, ", h.num_partials,
            " partials and ", h.list_tokens, " tokens, ", h.branch_tokens,
            " of them of branches, does not fit a workspace for ", room.bytes, " bytes, ",
            room.max_queries, " queries, ", room.max_partials, " partials and ",
            room.max_list_tokens, " tokens, ", room.max_branch_tokens,
            " of them of branches: make the workspace for a target of larger max_queries, "
            "max_items, max_partials, max_segments and max_branch_tokens");
}

void check_context(int64_t end, const PlanRoom& room) {
  PAT_CHECK(end <= room.max_context, "an item reads up to token ", end,
            ", the workspace is for contexts of ", room.max_context,
            " tokens: make it for a larger max_context");
}

void check_rows(int64_t rows, const PlanHeader& h) {
  const int64_t most = max_item_rows(group_of(h));
  PAT_CHECK(rows <= most, "an item has ", rows, " packed rows, at most ", most,
            " fit: give the target smaller row_tiles");
}

void check_item(const PlanView& plan, int index, const PlanRoom& room) {
  check_item_shape(plan, index);
  const PlanHeader& h = *plan.header;
  const Item& item = plan.items[index];
  PAT_CHECK(item.row_tile >= 0, "damaged plan: item ", index, " has a row tile of ", item.row_tile);
  plan.for_each_segment(index, [&](const Segment& s) {
    check_context(int64_t{s.kv_start} + (s.kv_len == kDynamic ? 0 : s.kv_len), room);
  });
  check_rows(static_cast<int64_t>(item.num_queries) * group_of(h), h);
}

}  // namespace

void check_plan_fits(const void* plan, int64_t plan_bytes, const PlanRoom& room) {
  const PlanView view = view_plan(plan, plan_bytes);
  const PlanHeader& h = *view.header;
  check_header(h, plan_bytes, room);
  check_splits(view);
  for (int i = 0; i < h.num_items; ++i) check_item(view, i, room);
  for (int i = 0; i < h.num_members; ++i) {
    const auto [query, partial] = view.members[i];
    PAT_CHECK(query >= 0 && query < h.num_queries && partial >= kDirect && partial < h.num_partials,
              "damaged plan: member ", i, " is query ", query, " of ", h.num_queries,
              " with partial ", partial, " of ", h.num_partials);
  }
}

void check_made_plan_fits(const void* plan, int64_t plan_bytes, int64_t last_token,
                          int64_t most_rows, const PlanRoom& room) {
  const PlanHeader& h = *view_plan(plan, plan_bytes).header;
  check_header(h, plan_bytes, room);
  check_context(last_token, room);
  check_rows(most_rows, h);
}

}  // namespace pat
