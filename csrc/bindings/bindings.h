// SPDX-License-Identifier: Apache-2.0
// The parts of the extension module, each bound in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace pat {

void bind_limits(pybind11::module_& m);
void bind_pack(pybind11::module_& m);
void bind_cpu(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);  // only where the CUDA kernels are built

}  // namespace pat
