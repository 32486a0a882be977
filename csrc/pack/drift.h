// SPDX-License-Identifier: Apache-2.0
// When a plan has drifted: its longest branch, whose tails all grow, has come to hold up the other
// work. Then a plan for the present lengths is faster, as PackInfer (section 3.1, equation 4)
// regroups once its groups have grown apart.
#pragma once

#include <cstdint>

#include "emit.h"
#include "target.h"

namespace pat {

// A plan may be modelled to take this much of its time when it was made, plus that of the tokens
// that were added, spread evenly.
inline constexpr double kMostDrift = 1.03;
// Tokens that every sequence may grow in any case, lest plans are made too often.
inline constexpr int64_t kLeastGrowth = 16;

// Lowers plan.max_seq_lens, the bounds within which `plan` holds, to the lengths at which it has
// drifted if all sequences grow alike. `seq_lens` are those that it was made for, `unique_tokens`
// those of the batch. Does nothing with several draft tokens, for which the model was not measured.
void limit_drift(const Target& target, const int64_t* seq_lens, int64_t unique_tokens, Plan& plan);

}  // namespace pat
