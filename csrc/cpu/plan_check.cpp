// SPDX-License-Identifier: Apache-2.0
#include "cpu/plan_check.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "check.h"

namespace pat {
namespace {

constexpr int kMaxHeadDim = 576;
constexpr int kMaxHeads = 4096;
constexpr int kMaxThreads = 1024;

void check_head_dim(const char* name, int dim) {
  PAT_CHECK(dim >= 8 && dim <= kMaxHeadDim && dim % 8 == 0, name, " is ", dim,
            ", must be a multiple of 8 up to ", kMaxHeadDim);
}

void check_kv(const DecodeArgs& args) {
  PAT_CHECK(args.kv_dtype == KVDType::kSame || args.kv_dtype == KVDType::kE4M3, "kv_dtype is ",
            static_cast<int>(args.kv_dtype), ", must be 0 (as q) or 1 (float8_e4m3fn)");
  for (const auto& [name, scale] :
       {std::pair{"k_scale", args.k_scale}, {"v_scale", args.v_scale}}) {
    PAT_CHECK(std::isfinite(scale) && scale > 0.0f, name, " is ", scale,
              ", must be finite and more than 0");
    PAT_CHECK(args.kv_dtype == KVDType::kE4M3 || scale == 1.0f, name, " is ", scale,
              ", must be 1 where K and V are of q's dtype");
  }
}

void check_args(const DecodeArgs& args) {
  PAT_CHECK(args.num_queries >= 0, "num_queries is ", args.num_queries);
  PAT_CHECK(args.draft_tokens > 0, "draft_tokens is ", args.draft_tokens, ", must be 1 or more");
  PAT_CHECK(
      args.num_kv_heads > 0 && args.num_q_heads > 0 && args.num_q_heads % args.num_kv_heads == 0,
      args.num_q_heads, " query heads do not divide into ", args.num_kv_heads, " KV heads");
  PAT_CHECK(args.num_q_heads <= kMaxHeads, args.num_q_heads, " query heads, at most ", kMaxHeads);
  check_head_dim("head_dim", args.head_dim);
  check_head_dim("v_head_dim", args.v_head_dim);
  PAT_CHECK(!args.q_rope || args.v_head_dim < args.head_dim, "q_rope is given and head_dim ",
            args.head_dim, " is no more than v_head_dim, ", args.v_head_dim);
  PAT_CHECK(args.dtype == DType::kF32 || args.dtype == DType::kBF16 || args.dtype == DType::kF16,
            "dtype is ", static_cast<int>(args.dtype), ", must be 0 (fp32), 1 (bf16) or 2 (fp16)");
  check_kv(args);
  PAT_CHECK(args.partial_dtype == DType::kF32 || args.partial_dtype == DType::kBF16,
            "partial_dtype is ", static_cast<int>(args.partial_dtype),
            ", must be 0 (fp32) or 1 (bf16)");
  PAT_CHECK(args.sink_dtype == DType::kF32 || args.sink_dtype == DType::kBF16 ||
                args.sink_dtype == DType::kF16,
            "sink_dtype is ", static_cast<int>(args.sink_dtype),
            ", must be 0 (fp32), 1 (bf16) or 2 (fp16)");
  PAT_CHECK(std::isfinite(args.scale), "scale is ", args.scale, ", must be finite");
  PAT_CHECK(args.logit_cap >= 0.0f && std::isfinite(args.logit_cap), "logit_cap is ",
            args.logit_cap, ", must be finite and 0 (off) or more");
  PAT_CHECK(args.num_threads >= 1 && args.num_threads <= kMaxThreads, "num_threads is ",
            args.num_threads, ", must be from 1 to ", kMaxThreads);
  PAT_CHECK(args.num_slots >= 0 && args.table_rows >= 0 && args.table_width >= 0,
            "negative size: num_slots ", args.num_slots, ", req_to_token ", args.table_rows, " x ",
            args.table_width);
  if (args.num_queries == 0) return;
  PAT_CHECK(args.q && args.k_cache && args.v_cache && args.req_to_token && args.rows &&
                args.seq_lens && args.out,
            "null pointer: q ", args.q, ", k_cache ", args.k_cache, ", v_cache ", args.v_cache,
            ", req_to_token ", args.req_to_token, ", rows ", args.rows, ", seq_lens ",
            args.seq_lens, ", out ", args.out);
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

// Tokens that a segment of item `index` has in this call. Of draft tokens only the first may stand
// before a dynamic segment: all of the query's attend to it.
int64_t count_tokens(const DecodeArgs& args, int index, const Segment& s) {
  const int64_t length = args.seq_lens[s.query];
  const int64_t masked = args.draft_tokens - 1;
  const int64_t tokens = is_dynamic(s) ? length - s.kv_start : s.kv_len;
  PAT_CHECK(is_dynamic(s) ? tokens >= masked : s.kv_start + tokens <= length - masked, "item ",
            index, " reads tokens ", s.kv_start, " + ", s.kv_len, " of query ", s.query,
            ", whose length is ", length, ": the plan was made for other lengths, make a new one");
  return tokens;
}

// What the items have given so far.
struct Seen {
  std::vector<int32_t> splits;   // [num_queries]
  std::vector<int64_t> tokens;   // [num_queries]
  std::vector<char> is_written;  // [num_partials]
};

// Gives each of an item's members its tokens.
void check_tokens(CheckedPlan& plan, const DecodeArgs& args, int index, Seen& seen) {
  plan.for_each_segment(index, [&](const Segment& s) {
    const int64_t tokens = count_tokens(args, index, s);
    PAT_CHECK(tokens <= s.room, "item ", index, " has room for ", s.room, " tokens of query ",
              s.query, ", which has ", tokens, " from ", s.kv_start,
              " on: the plan was made for other lengths, make a new one");
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
