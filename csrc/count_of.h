// SPDX-License-Identifier: Apache-2.0
// Sizes as the plan counts them.
#pragma once

#include <cstdint>

namespace pat {

// The size of a container as int32_t: queries, nodes, items and members of one batch all fit.
template <typename Container>
constexpr int32_t count_of(const Container& container) {
  return static_cast<int32_t>(container.size());
}

}  // namespace pat
