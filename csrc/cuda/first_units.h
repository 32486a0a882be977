// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "cuda/decode.h"

namespace pat {

// Whether the forward of such a launch begins with first units that were written down.
bool has_first_units(Launch launch);

// Writes them, behind the snapshot that lists the slots.
void launch_first_units(const SnapshotArgs& args, cudaStream_t stream);

}  // namespace pat
