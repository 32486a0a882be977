// SPDX-License-Identifier: Apache-2.0
// How the forward kernel uses an SM's shared memory.
#pragma once

#include <algorithm>

#include "cuda/error.h"
#include "cuda/forward/pipeline.cuh"

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

}  // namespace pat
