// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "cpu/attend.h"

namespace pat {
namespace {

constexpr int kMaxHeadDim = 576;
constexpr int kMaxHeads = 4096;

void check_head_dim(const char* name, int dim) {
  PAT_CHECK(dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0, name, " is ", dim,
            ", must be a multiple of 8 up to ", kMaxHeadDim);
}

// What sglang_pat/ops.py leaves: it has looked at pointers, dtypes, shapes and K/V scales.
void check_args(const DecodeArgs& args) {
  PAT_CHECK(
      args.num_kv_heads > 0 && args.num_q_heads > 0 && args.num_q_heads % args.num_kv_heads == 0,
      args.num_q_heads, " query heads do not divide into ", args.num_kv_heads, " KV heads");
  PAT_CHECK(args.num_q_heads <= kMaxHeads, args.num_q_heads, " query heads, at most ", kMaxHeads);
  check_head_dim("head_dim", args.head_dim);
  check_head_dim("v_head_dim", args.v_head_dim);
  PAT_CHECK(std::isfinite(args.scale), "scale is ", args.scale, ", must be finite");
  PAT_CHECK(args.logit_cap >= 0.0f && std::isfinite(args.logit_cap), "logit_cap is ",
            args.logit_cap, ", must be finite and 0 (off) or more");
  for (int i = 0; i < args.num_queries; ++i) {
    PAT_CHECK(args.rows[i] >= 0 && args.rows[i] < args.table_rows, "query ", i, ": row ",
              args.rows[i], " is outside of req_to_token with ", args.table_rows, " rows");
    PAT_CHECK(args.seq_lens[i] >= 0 && args.seq_lens[i] <= args.table_width, "query ", i,
              ": length ", args.seq_lens[i], " is outside of req_to_token with ", args.table_width,
              " tokens a row");
  }
}

void check_header(const PlanHeader& header, const DecodeArgs& args) {
  PAT_CHECK(header.num_q_heads == args.num_q_heads && header.num_kv_heads == args.num_kv_heads,
            "the plan is for ", header.num_q_heads, " query and ", header.num_kv_heads,
            " KV heads, the arguments have ", args.num_q_heads, " and ", args.num_kv_heads);
  PAT_CHECK(header.num_queries == args.num_queries, "the plan is for ", header.num_queries,
            " queries, the arguments have ", args.num_queries);
  PAT_CHECK(header.draft_tokens == args.draft_tokens, "the plan is for ", header.draft_tokens,
            " draft tokens a query, the arguments have ", args.draft_tokens);
}

// What the items have given so far.
struct Seen {
  std::vector<int32_t> splits;   // [num_queries]
  std::vector<int64_t> tokens;   // [num_queries]
  std::vector<char> is_written;  // [num_partials]
};

// Gives each of an item's members its tokens. Of draft tokens only the first may stand before a
// dynamic segment: all of the query's attend to it.
void check_tokens(CheckedPlan& plan, const DecodeArgs& args, int index, Seen& seen) {
  plan.for_each_segment(index, [&](const Segment& s) {
    const int64_t length = args.seq_lens[s.query], masked = args.draft_tokens - 1;
    const int64_t tokens = is_dynamic(s) ? length - s.kv_start : s.kv_len;
    PAT_CHECK(is_dynamic(s) ? tokens >= masked : s.kv_start + tokens <= length - masked, "item ",
              index, " reads tokens ", s.kv_start, " + ", s.kv_len, " of query ", s.query,
              ", whose length is ", length, ": the plan was made for other lengths");
    PAT_CHECK(tokens <= s.room, "item ", index, " has room for ", s.room, " tokens of query ",
              s.query, ", which has ", tokens, " from ", s.kv_start,
              " on: the plan was made for other lengths");
    plan.query_tokens += tokens * s.num_queries;
    const Member* members = plan.members + plan.items[index].member_offset + s.first_member;
    for (int m = 0; m < s.num_queries; ++m) seen.tokens[members[m].query] += tokens;
  });
}

void check_item(CheckedPlan& plan, const DecodeArgs& args, int index, Seen& seen) {
  check_item_shape(plan, index);
  const Item& item = plan.items[index];
  plan.max_item_queries = std::max(plan.max_item_queries, item.num_queries);
  for (int m = item.member_offset; m < item.member_offset + item.num_queries; ++m) {
    const auto [query, partial] = plan.members[m];
    PAT_CHECK(query >= 0 && query < args.num_queries, "damaged plan: item ", index, " has query ",
              query, " of ", args.num_queries);
    const auto [offset, splits] = plan.queries[query];
    if (splits == 1) {
      PAT_CHECK(partial == kDirect, "damaged plan: query ", query, " has one split, item ", index,
                " writes it to partial ", partial);
    } else {
      PAT_CHECK(partial >= offset && partial - offset < splits && !seen.is_written[partial],
                "damaged plan: item ", index, " writes partial ", partial, " of query ", query,
                ", which owns ", offset, " + ", splits, ", each written once");
      seen.is_written[partial] = 1;
    }
    ++seen.splits[query];
  }
  check_tokens(plan, args, index, seen);
}

}  // namespace

CheckedPlan check_plan(const void* plan, int64_t plan_bytes, const DecodeArgs& args) {
  check_args(args);
  CheckedPlan checked{view_plan(plan, plan_bytes)};
  const PlanHeader& header = *checked.header;
  check_header(header, args);
  check_splits(checked);
  Seen seen{std::vector<int32_t>(header.num_queries), std::vector<int64_t>(header.num_queries),
            std::vector<char>(header.num_partials)};
  for (int i = 0; i < header.num_items; ++i) check_item(checked, args, i, seen);
  for (int q = 0; q < header.num_queries; ++q) {
    PAT_CHECK(seen.splits[q] == checked.queries[q].num_splits, "damaged plan: query ", q,
              " is a member of ", seen.splits[q], " items and has ", checked.queries[q].num_splits,
              " splits");
    PAT_CHECK(seen.tokens[q] == args.seq_lens[q], "the plan covers ", seen.tokens[q],
              " tokens of query ", q, ", whose length is ", args.seq_lens[q],
              ": it was made for other lengths, make a new one");
  }
  return checked;
}

}  // namespace pat
