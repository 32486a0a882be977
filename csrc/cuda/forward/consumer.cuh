// SPDX-License-Identifier: Apache-2.0
// What a consumer warp keeps and how it takes its stages.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// What a consumer warp keeps over all units. kTransforms: the logits are not kPlain.
template <int kHeadDim, bool kTransforms>
struct Consumer {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;  // 0 .. 3
  Cursor stage, peer_stage, q, narrow;

  __device__ __forceinline__ void wait_stage() { barrier_wait(s.full(stage.index), stage.phase); }
  __device__ __forceinline__ void release(uint32_t bar) { barrier_release(bar, lane_id()); }
  __device__ __forceinline__ void release_stage(int index) { release(s.empty(index)); }
  // Passes by a stage of another warp. Every warp waits for every stage and releases it: who left
  // one out would take the parity of a later phase for that of an earlier one.
  __device__ __forceinline__ void pass_stage() {
    wait_stage();
    release_stage(stage.index);
    stage.advance(p.stages);
  }

  // The next stage, of this half or of the other, once it is full: where it is and the barrier to
  // release it with.
  struct Stage {
    uint32_t tile, empty, rows;
  };
  __device__ __forceinline__ Stage take_stage(bool of_peer) {
    const uint32_t base = of_peer ? s.peer : s.base;
    const int index = of_peer ? peer_stage.index : stage.index;
    const uint32_t phase = of_peer ? peer_stage.phase : stage.phase;
    barrier_wait(base + offsetof(Control, full) + 8 * index, phase);
    if (of_peer) {
      peer_stage.advance(p.stages);
    } else {
      stage.advance(p.stages);
    }
    return {base + static_cast<uint32_t>(sizeof(Control)) + index * Shape<kHeadDim>::kTileBytes,
            base + 8 * index +
                static_cast<uint32_t>(of_peer ? offsetof(Control, peer_empty)
                                              : offsetof(Control, empty)),
            rows_of(index)};
  }
  // Control::rows of a stage of this half.
  __device__ __forceinline__ uint32_t rows_of(int index) const {
    return s.base + static_cast<uint32_t>(offsetof(Control, rows)) + 2 * kTileTokens * index;
  }
  // All consumer warps of this half.
  __device__ __forceinline__ void sync() const { named_barrier(1 + s.side, kConsumers); }
};

}  // namespace pat
