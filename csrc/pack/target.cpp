// SPDX-License-Identifier: Apache-2.0
#include "target.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "../check.h"
#include "../plan.h"

namespace pat {

Target Target::without_wide() const {
  Target without = *this;
  auto& tiles = without.row_tiles;
  const int32_t needed = std::max(kWideRows, group());
  if (tiles.size() > 1 && tiles.back() == 2 * kWideRows && tiles[tiles.size() - 2] >= needed) {
    tiles.pop_back();
  }
  return without;
}

void Target::validate() const {
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"num_sms", num_sms},
                                    {"head_dim", head_dim},
                                    {"v_head_dim", v_head_dim},
                                    {"token_values", token_values},
                                    {"kv_bytes", kv_bytes},
                                    {"max_queries", max_queries}}) {
    PAT_CHECK(value > 0, "Target.", name, " is ", value, ", must be positive");
  }
  PAT_CHECK(num_kv_heads > 0 && num_q_heads > 0 && num_q_heads % num_kv_heads == 0,
            "Target.num_q_heads is ", num_q_heads,
            ", must be a positive multiple of num_kv_heads, ", num_kv_heads);
  PAT_CHECK(draft_tokens > 0 && draft_tokens <= INT16_MAX, "Target.draft_tokens is ", draft_tokens,
            ", must be from 1 to ", INT16_MAX);
  PAT_CHECK(partial_bytes == 2 || partial_bytes == 4, "Target.partial_bytes is ", partial_bytes,
            ", must be 2 (bf16) or 4 (fp32)");
  PAT_CHECK(bytes_per_s > 0 && flops_per_s > 0 && item_overhead_s > 0,
            "Target rates must be positive: bytes_per_s ", bytes_per_s, ", flops_per_s ",
            flops_per_s, ", item_overhead_s ", item_overhead_s);
  PAT_CHECK(reread_weight > 0 && reread_weight <= 1, "Target.reread_weight is ", reread_weight,
            ", must be in (0, 1]");
  PAT_CHECK(sm_speedup >= 1, "Target.sm_speedup is ", sm_speedup, ", must be 1 or more");
  PAT_CHECK(items_per_sm == 1 || items_per_sm == 2, "Target.items_per_sm is ", items_per_sm,
            ", must be 1 or 2");
  for (const auto* tiles : {&row_tiles, &kv_tiles}) {
    const char* name = tiles == &row_tiles ? "row_tiles" : "kv_tiles";
    PAT_CHECK(!tiles->empty() && tiles->front() > 0 && tiles->back() <= INT16_MAX &&
                  std::adjacent_find(tiles->begin(), tiles->end(), std::greater_equal<>()) ==
                      tiles->end(),
              "Target.", name, " must be a strictly ascending list of 1..32767");
  }
  PAT_CHECK(row_tiles.back() >= group(), "Target.row_tiles end at ", row_tiles.back(),
            " rows, fewer than the ", group(), " of one query: a GQA group of ",
            num_q_heads / num_kv_heads, " for each of its draft tokens, ", draft_tokens);
  PAT_CHECK(max_items >= max_queries, "Target.max_items is ", max_items,
            ", must hold one item per query, at least ", max_queries);
  for (const auto& [name, value] : {std::pair{"max_partials", max_partials},
                                    {"max_segments", max_segments},
                                    {"max_branch_tokens", max_branch_tokens}}) {
    PAT_CHECK(value >= 0, "Target.", name, " is ", value, ", must not be negative");
  }
}

}  // namespace pat
