// SPDX-License-Identifier: Apache-2.0
// The parts of the extension module, each bound in a file of its own, and how Python hands memory
// to the executors: as integers, so that no torch header is needed.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

namespace pat {

void bind_pack(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);  // only where the CUDA kernels are built

// (address, stride of dim 0, stride of dim 1), strides in elements.
using Tensor3 = std::array<int64_t, 3>;

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(address));
}

}  // namespace pat
