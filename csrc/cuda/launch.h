// SPDX-License-Identifier: Apache-2.0
// The launches that decode_cuda consists of. The forward has one function per head dimension and
// type of K and V, each in a file of its own (forward/instantiations/), so that they compile in
// parallel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/decode.h"

namespace pat {

// Sets what the scheduler reads of the parameters beside Footprint::set(): the sizes of the batch,
// and what divides by them and by the CTAs. The batch has num_rows queries of draft_tokens tokens;
// the heads are those of a token.
void set_scheduling(ForwardParams& params, int num_rows, int num_q_heads, int num_kv_heads,
                    int draft_tokens);

// `shares_sm`: with CTAs of half an SM, so that two run on one, those of other launches too.
void launch_forward_64(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);
void launch_forward_128(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);
void launch_forward_256(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);
// K and V are float8_e4m3fn.
void launch_forward_fp8_64(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);
void launch_forward_fp8_128(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);
void launch_forward_fp8_256(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);

// `overlap`: the merge may start while the kernel before it in the stream drains.
void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream);

}  // namespace pat
