// SPDX-License-Identifier: Apache-2.0
// How the merge kernel spreads the splits of a query over warps. The judge (pack/judge.h) asks,
// too: the more splits a warp joins one after the other, the longer the merge takes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pat {

struct MergeRule {
  int32_t heads;    // of one query that a warp joins
  int32_t ahead;    // splits of a head that a warp loads at once
  int32_t sharing;  // warps that share the splits of a head

  constexpr int32_t splits_at_once() const { return ahead * sharing; }
};

inline constexpr MergeRule kMergeRules[] = {{1, 8, 8}, {1, 8, 4}, {1, 8, 2}, {1, 8, 1}, {2, 2, 1}};

// Which of kMergeRules holds for `rows` query heads of all queries, on a GPU of `num_sms`. The
// kernel also counts the rows that pad a batch, the judge does not, so it may apply the rule of
// a smaller batch. Few rows leave warps idle, so several warps share a head. But an SM has room for
// so many CTAs only, and those that find none run after the others, which costs 1 to 2 us. So the
// more rows, the fewer warps share a head. The bounds were timed when a warp that loads eight
// splits at once needed up to 168 registers a thread, and an SM ran three CTAs of four such warps,
// or six of two. It needs 128 at most now, and they have not been timed again.
constexpr size_t merge_rule(int64_t rows, int32_t num_sms) {
  if (rows <= num_sms) return 0;
  if (rows <= 3 * int64_t{num_sms}) return 1;
  if (rows <= 6 * int64_t{num_sms}) return 2;
  if (rows <= 16 * int64_t{num_sms}) return 3;
  return 4;
}

}  // namespace pat
