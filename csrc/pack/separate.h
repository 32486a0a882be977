// SPDX-License-Identifier: Apache-2.0
// Separate: whether a small batch is faster if no item has several queries. Such items start later
// than those of one query, and few queries have little to share.
#pragma once

#include <cstdint>

#include "packer.h"
#include "target.h"

namespace pat {

// A plan with shared items is weighed against one without only for so many queries at most, and if
// these read no token of the batch more than so many times in the mean: others were not faster.
inline constexpr int32_t kMostSeparate = 160;
inline constexpr double kMostReads = 5.0;
// Branches of such a batch must be modelled to take less than so much of the time of every query by
// itself. At 0.8 and at 1 fewer of 547 batches get the faster of the two plans.
inline constexpr double kBranchedShare = 0.9;

// Whether every query by itself may be faster, with the rules that this was measured with. Several
// draft tokens were not.
bool shares_little(const Target& target, const int64_t* seq_lens, int32_t num_queries,
                   int64_t unique_tokens);
// Whether packs may be weighed by is_faster(): some are shared, and none has wide items.
bool may_separate(const Target& target, const Packs& packs);
// Whether `alone`, packs of one query each, are modelled to be faster than `packs` of the same
// batch, both split.
bool is_faster(const Target& target, const Packs& alone, const Packs& packs, int64_t unique_tokens);

}  // namespace pat
