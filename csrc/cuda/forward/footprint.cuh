// SPDX-License-Identifier: Apache-2.0
// How the forward kernel uses an SM's shared memory.
#pragma once

#include <algorithm>

#include "check.h"
#include "cuda/error.h"
#include "cuda/forward/pipeline.cuh"

namespace pat {

// What a CTA needs of an SM.
struct Footprint {
  int stages, q_buffers, half_bytes, halves;

  void set(ForwardParams& params) const {
    params.stages = stages;
    params.q_buffers = q_buffers;
    params.half_bytes = half_bytes;
  }
};

// What `halves` halves have room for in `bytes` of shared memory. If they do not run with that,
// `halves` is 0 in the result.
template <int kHeadDim>
Footprint fill(int bytes, int halves) {
  constexpr int kTile = Shape<kHeadDim>::kTileBytes;
  constexpr int kFixed = static_cast<int>(sizeof(Control));
  const int room = bytes / halves / 1024 * 1024;
  // For a head dim of 128 a fifth stage is worth more than a second Q buffer.
  for (int q_buffers = kHeadDim == 128 ? 1 : 2; q_buffers > 0; --q_buffers) {
    const int used = kFixed + q_buffers * kTile;
    const int stages = std::min((room - used) / kTile, kMaxStages);
    if (stages >= (halves == 1 && q_buffers == 1 ? 2 : 3)) {
      const int used_bytes = (used + stages * kTile + 1023) / 1024 * 1024;
      return {stages, q_buffers, used_bytes, halves};
    }
  }
  return {};
}

// Of a CTA that has an SM for itself: two halves if each gets at least three stages, otherwise one
// half with what there is.
template <int kHeadDim>
Footprint footprint(const Device& device) {
  PAT_CHECK(device.shared_per_block >= kMinSharedBytes<kHeadDim>, "head_dim ", kHeadDim, " needs ",
            kMinSharedBytes<kHeadDim>, " bytes of shared memory per block, the device has ",
            device.shared_per_block);
  const Footprint use = fill<kHeadDim>(device.shared_per_block, Shape<kHeadDim>::kMaxHalves);
  return use.halves > 0 ? use : fill<kHeadDim>(device.shared_per_block, 1);
}

// Of a CTA of one half, which leaves room on its SM for one of a kernel on another stream. At head
// dim 256 one half takes all registers of an SM.
template <int kHeadDim>
Footprint shared_footprint(const Device& device) {
  if (Shape<kHeadDim>::kMaxHalves == 2) {
    const int bytes = device.shared_per_sm / 2 - device.shared_reserved;
    const Footprint use = fill<kHeadDim>(std::min(bytes, device.shared_per_block), 1);
    if (use.halves > 0) return use;
  }
  return footprint<kHeadDim>(device);
}

}  // namespace pat
