// SPDX-License-Identifier: Apache-2.0
// The forward of one head dimension and type of K and V. It is compiled for each of them, side by
// side, with PAT_HEAD_DIM and PAT_FP8 naming them (core.cmake).
#include "cuda/forward/launch.cuh"

namespace pat {

template void launch_forward<PAT_HEAD_DIM, PAT_FP8>(const ForwardParams&, CudaType, bool,
                                                    cudaStream_t);

}  // namespace pat
