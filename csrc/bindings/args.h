// SPDX-License-Identifier: Apache-2.0
// How Python hands memory to the executors: as integers, so that no torch header is needed.
#pragma once

#include <array>
#include <cstdint>

namespace pat {

// (address, stride of dim 0, stride of dim 1), strides in elements.
using Tensor3 = std::array<int64_t, 3>;

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

}  // namespace pat
