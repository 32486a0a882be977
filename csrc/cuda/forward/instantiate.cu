// SPDX-License-Identifier: Apache-2.0
// The forward of one head dimension and type of K and V. It is compiled for each of them, side by
// side, with PAT_HEAD_DIM and PAT_FP8 naming them (core.cmake).
#include "cuda/error.h"
#include "cuda/forward/footprint.cuh"
#include "cuda/forward/kernel.cuh"
#include "cuda/launch.h"

namespace pat {

template <typename T, bool kFp8, int kHeadDim>
void launch_forward_as(ForwardParams params, bool shares_sm, cudaStream_t stream) {
  // check_decode() has refused draft tokens with other logits.
  auto* kernel = params.draft_masks != nullptr ? forward_kernel<T, kFp8, kHeadDim, false, kTrees>
                 : params.masked_tokens > 0    ? forward_kernel<T, kFp8, kHeadDim, false, kChains>
                 : params.logits == kPlain     ? forward_kernel<T, kFp8, kHeadDim, false, kNoDrafts>
                                               : forward_kernel<T, kFp8, kHeadDim, true, kNoDrafts>;
  const Device& device = current_device();
  const Footprint use =
      shares_sm ? shared_footprint<kHeadDim>(device) : footprint<kHeadDim>(device);
  use.set(params);
  const int bytes = use.halves * use.half_bytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "forward kernel: shared memory");
  if (shares_sm) {  // else an SM may give shared memory to one CTA alone, and the rest to its L1
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "forward kernel: carveout");
  }
  kernel<<<device.num_sms, kThreads * use.halves, bytes, stream>>>(params);
  check(cudaGetLastError(), "forward kernel: launch");
}

template <int kHeadDim, bool kFp8>
void launch_forward(const ForwardParams& params, DType type, bool shares_sm, cudaStream_t stream) {
  if (type == DType::kBF16) {
    launch_forward_as<__nv_bfloat16, kFp8, kHeadDim>(params, shares_sm, stream);
  } else {
    launch_forward_as<__half, kFp8, kHeadDim>(params, shares_sm, stream);
  }
}

template void launch_forward<PAT_HEAD_DIM, PAT_FP8>(const ForwardParams&, DType, bool,
                                                    cudaStream_t);

}  // namespace pat
