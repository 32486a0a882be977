// SPDX-License-Identifier: Apache-2.0
#include "cuda/forward/launch.cuh"

namespace pat {

void launch_forward_fp8_64(const ForwardParams& params, CudaType type, bool shares_sm,
                           cudaStream_t stream) {
  launch_forward_dim<64, true>(params, type, shares_sm, stream);
}

}  // namespace pat
