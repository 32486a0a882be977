// SPDX-License-Identifier: Apache-2.0
// How many tokens a tail may grow beyond its scheduled length before the plan is made anew.
#pragma once

#include <algorithm>
#include <cstdint>

#include "costs.h"
#include "packs.h"

namespace pat {

// Of a tail that is an item of its own: plans get rarer as sequences get longer. The last piece
// takes all of the growth: half a chunk more unbalances items little.
inline int32_t headroom(const Pack& tail) {
  const int32_t most =
      tail.pieces == 1 ? tail.tokens() / 4 : std::min(tail.tokens() / 4, tail.chunk / 2);
  return std::max(kMinHeadroom, most);
}

}  // namespace pat
