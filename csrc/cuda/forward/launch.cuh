// SPDX-License-Identifier: Apache-2.0
// Launches of the forward kernel: one template per head dimension and type of K and V,
// instantiated in instantiations/.
#pragma once

#include <algorithm>

#include "cuda/error.h"
#include "cuda/forward/kernel.cuh"
#include "cuda/launch.h"

namespace pat {

// What a launch needs of an SM.
struct Footprint {
  int stages, q_buffers, half_bytes, halves;
  bool narrow;
};

template <int kHeadDim>
Footprint footprint(const Device& device) {
  constexpr int kTile = Shape<kHeadDim>::kTileBytes;
  constexpr int kFixed = static_cast<int>(sizeof(Control));
  // Two halves if each gets at least three stages, otherwise one half with what there is.
  for (int halves = Shape<kHeadDim>::kMaxHalves; halves > 0; --halves) {
    const int room = device.shared_per_block / halves / 1024 * 1024;
    // For a head dim of 128 a fifth stage is worth more than a second Q buffer.
    for (int q_buffers = kHeadDim == 128 ? 1 : 2; q_buffers > 0; --q_buffers) {
      for (const bool narrow : {true, false}) {
        const int used = kFixed + q_buffers * kTile +
                         (narrow ? kNarrowBuffers * Shape<kHeadDim>::kNarrowBytes : 0);
        const int stages = std::min((room - used) / kTile, kMaxStages);
        if (stages >= (halves == 1 && q_buffers == 1 ? 2 : 3)) {
          const int bytes = (used + stages * kTile + 1023) / 1024 * 1024;
          return {stages, q_buffers, bytes, halves, narrow};
        }
      }
    }
  }
  throw_invalid("head_dim %d needs %d bytes of shared memory per block, the device has %d",
                kHeadDim, kMinSharedBytes<kHeadDim>, device.shared_per_block);
}

template <typename T, bool kFp8, int kHeadDim>
void launch_forward_as(ForwardParams params, cudaStream_t stream) {
  // check_decode() has refused draft tokens with other logits.
  auto* kernel = params.draft_masks != nullptr ? forward_kernel<T, kFp8, kHeadDim, false, kTrees>
                 : params.masked_tokens > 0    ? forward_kernel<T, kFp8, kHeadDim, false, kChains>
                 : params.logits == kPlain     ? forward_kernel<T, kFp8, kHeadDim, false, kNoDrafts>
                                               : forward_kernel<T, kFp8, kHeadDim, true, kNoDrafts>;
  const Device& device = current_device();
  const Footprint use = footprint<kHeadDim>(device);
  params.stages = use.stages;
  params.q_buffers = use.q_buffers;
  params.half_bytes = use.half_bytes;
  params.narrow = use.narrow;
  params.grid_magic = divisor_magic(device.num_sms);
  const int bytes = use.halves * use.half_bytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "forward kernel: shared memory");
  kernel<<<device.num_sms, kThreads * use.halves, bytes, stream>>>(params);
  check(cudaGetLastError(), "forward kernel: launch");
}

template <int kHeadDim, bool kFp8>
void launch_forward_dim(const ForwardParams& params, CudaType type, cudaStream_t stream) {
  if (type == CudaType::kBF16) {
    launch_forward_as<__nv_bfloat16, kFp8, kHeadDim>(params, stream);
  } else {
    launch_forward_as<__half, kFp8, kHeadDim>(params, stream);
  }
}

}  // namespace pat
