// SPDX-License-Identifier: Apache-2.0
// The launches that decode_cuda consists of. The forward has one function per head dimension and
// type of K and V, each in a file of its own (forward/instantiations/), so that they compile in
// parallel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/decode.h"

namespace pat {

struct ForwardParams;

void launch_forward_64(const ForwardParams&, CudaType, cudaStream_t);
void launch_forward_128(const ForwardParams&, CudaType, cudaStream_t);
void launch_forward_256(const ForwardParams&, CudaType, cudaStream_t);
// K and V are float8_e4m3fn.
void launch_forward_fp8_64(const ForwardParams&, CudaType, cudaStream_t);
void launch_forward_fp8_128(const ForwardParams&, CudaType, cudaStream_t);
void launch_forward_fp8_256(const ForwardParams&, CudaType, cudaStream_t);

// `overlap`: the merge may start while the kernel before it in the stream drains.
void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream);

}  // namespace pat
