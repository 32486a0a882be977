// SPDX-License-Identifier: Apache-2.0
// What a consumer warp keeps across work units, and how it takes stages from the ring.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// kTransforms: the logits are not kPlain. kDrafts: see Drafts.
template <int kHeadDim, bool kTransforms, Drafts kDrafts>
struct Consumer {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;               // 0 .. 3
  StageRing stage, peer_stage;  // this half's stages and the other half's
  QRing q;
  NarrowRing narrow;

  __device__ __forceinline__ void release(uint32_t barrier) { barrier_release(barrier, lane_id()); }
  __device__ __forceinline__ void release_stage() {
    release(stage.empty(s.base));
    stage.advance(p.stages);
  }
  // Passes a stage that another warp reads: every warp must wait on every phase (see Ring).
  __device__ __forceinline__ void pass_stage() {
    stage.wait_full(s.base);
    release_stage();
  }

  // A stage that is full: addresses of its tile, of the barrier to release it with, and of its
  // Control::row_masks (of this half; only branches have them, and branches are never wide).
  struct Stage {
    uint32_t tile, empty, row_masks;
  };
  // Waits for the next stage of this half or of the other.
  __device__ __forceinline__ Stage take_stage(bool of_peer) {
    const uint32_t base = of_peer ? s.peer : s.base;
    const int index = of_peer ? peer_stage.index : stage.index;
    const uint32_t phase = of_peer ? peer_stage.phase : stage.phase;
    barrier_wait(base + offsetof(Control, stage_barriers.full) + 8 * index, phase);
    if (of_peer) {
      peer_stage.advance(p.stages);
    } else {
      stage.advance(p.stages);
    }
    return {base + static_cast<uint32_t>(sizeof(Control)) + index * Shape<kHeadDim>::kTileBytes,
            base + 8 * index +
                static_cast<uint32_t>(of_peer ? offsetof(Control, peer_empty)
                                              : offsetof(Control, stage_barriers.empty)),
            row_masks(index)};
  }
  __device__ __forceinline__ uint32_t row_masks(int index) const {
    return s.base + static_cast<uint32_t>(offsetof(Control, row_masks)) + 2 * kTileTokens * index;
  }
  // Synchronises all consumer warps of this half, or of both.
  __device__ __forceinline__ void sync() const { named_barrier(1 + s.sm_half, kConsumers); }
  __device__ __forceinline__ void sync_halves() const { named_barrier(3, 2 * kConsumers); }
};

}  // namespace pat
