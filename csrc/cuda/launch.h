// SPDX-License-Identifier: Apache-2.0
// The launches that decode_cuda consists of.
#pragma once

#include <cuda_runtime.h>

#include "cuda/decode.h"

namespace pat {

// Sets what the scheduler reads of the parameters beside Footprint::set(): the sizes of the batch,
// and what divides by them and by the CTAs. The batch has num_rows queries of draft_tokens tokens;
// the heads are those of a token.
void set_scheduling(ForwardParams& params, int num_rows, int num_q_heads, int num_kv_heads,
                    int draft_tokens);

// The forward of a head dim; with kFp8 K and V are float8_e4m3fn. `shares_sm`: with CTAs of half an
// SM, so that two run on one, those of other launches too.
template <int kHeadDim, bool kFp8>
void launch_forward(const ForwardParams&, CudaType, bool shares_sm, cudaStream_t);

// `overlap`: the merge may start while the kernel before it in the stream drains.
void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream);

}  // namespace pat
