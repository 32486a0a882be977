// SPDX-License-Identifier: Apache-2.0
// The launches that decode_cuda and snapshot_cuda consist of.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "check.h"
#include "cuda/params.h"

namespace pat {

// Gives run(dim), whose type names the head dim. Throws for one that has no kernel.
template <typename Run>
auto with_head_dim(int head_dim, const Run& run) {
  PAT_CHECK(head_dim == 64 || head_dim == 128 || head_dim == 256, "head_dim is ", head_dim,
            ", the CUDA kernels have 64, 128 and 256");
  if (head_dim == 64) return run(std::integral_constant<int, 64>{});
  if (head_dim == 128) return run(std::integral_constant<int, 128>{});
  return run(std::integral_constant<int, 256>{});
}

// Sets what the scheduler reads of the parameters beside Footprint::set(): the sizes of the batch,
// and what divides by them and by the CTAs. The batch has num_rows queries of draft_tokens tokens;
// the heads are those of a token.
void set_scheduling(ForwardParams& params, int num_rows, int num_q_heads, int num_kv_heads,
                    int draft_tokens);

// The forward of a head dim; with kFp8 K and V are float8_e4m3fn. `shares_sm`: CTAs take half an
// SM, so that those of two launches run side by side on one.
template <int kHeadDim, bool kFp8>
void launch_forward(const ForwardParams&, DType, bool shares_sm, cudaStream_t);

// Whether the forward of such a launch begins with first units that were written down.
bool has_first_units(Launch launch);

// Writes them, behind the snapshot that lists the slots.
void launch_first_units(const SnapshotArgs& args, cudaStream_t stream);

// `overlap`: the merge may start while the kernel before it in the stream drains.
void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream);

}  // namespace pat
