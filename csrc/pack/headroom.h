// SPDX-License-Identifier: Apache-2.0
// How many tokens a tail may grow beyond its scheduled length before the plan is made anew.
#pragma once

#include <algorithm>
#include <cstdint>

#include "packer.h"

namespace pat {

inline constexpr int32_t kMinHeadroom = 128;

// Of a tail that one item or branch reads: plans get rarer as sequences get longer.
inline int32_t headroom(int32_t tokens) { return std::max(kMinHeadroom, tokens / 4); }

// Of any tail. The last piece takes all of the growth: half a chunk more unbalances items little.
inline int32_t headroom(const Pack& tail) {
  if (tail.pieces == 1) return headroom(tail.tokens());
  return std::max(kMinHeadroom, std::min(tail.tokens() / 4, tail.chunk / 2));
}

}  // namespace pat
