// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace pat {

void bind_cpu(pybind11::module_& m);

}  // namespace pat
