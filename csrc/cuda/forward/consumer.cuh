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

  // A stage: addresses of its tile, of its barriers, and of its Control::row_masks (of this half;
  // only branches have them, and branches are never wide), and the parity of the phase in which it
  // is full.
  struct Stage {
    uint32_t tile, empty, row_masks, full, phase;

    // Whether it is full already.
    __device__ __forceinline__ bool is_full() const { return barrier_ready(full, phase); }
    __device__ __forceinline__ void wait() const { barrier_wait(full, phase); }
  };
  // Where a half's ring of stages is, and the position in it.
  struct Cursor {
    uint32_t base, to_empty;  // the half; from a stage's full barrier to the one to release it with
    StageRing at;
  };
  __device__ __forceinline__ Cursor cursor(bool of_peer) const {
    const auto empty = static_cast<uint32_t>(of_peer ? offsetof(Control, peer_empty)
                                                     : offsetof(Control, stage_barriers.empty));
    return {of_peer ? s.peer : s.base,
            empty - static_cast<uint32_t>(offsetof(Control, stage_barriers.full)),
            of_peer ? peer_stage : stage};
  }
  // The stages of a unit that wgmma runs, in order. Of a wide unit every second tile is in the
  // other half's memory.
  struct Stages {
    Cursor current, other;
    bool wide;

    __device__ __forceinline__ void next_tile() {
      const Cursor before = current;
      current = wide ? other : current;
      other = wide ? before : other;
    }
  };
  __device__ __forceinline__ Stages stages(bool wide) const {
    const bool of_peer = wide && s.sm_half == 1;  // so that both halves begin with the same tile
    return {cursor(of_peer), cursor(!of_peer), wide};
  }
  // The next stage, which may not be full yet.
  __device__ __forceinline__ Stage next_stage(Stages& stages) const {
    Cursor& cursor = stages.current;
    const int index = cursor.at.index;
    const uint32_t full = cursor.at.full(cursor.base);
    const uint32_t tile =
        cursor.base + static_cast<uint32_t>(sizeof(Control)) + index * Shape<kHeadDim>::kTileBytes;
    const Stage next{tile, full + cursor.to_empty, row_masks(index), full, cursor.at.phase};
    cursor.at.advance(p.stages);
    return next;
  }
  // After a unit: keeps the positions in both rings for the next one.
  __device__ __forceinline__ void keep_positions(const Stages& stages) {
    const bool at_peer = stages.current.base != s.base;
    stage = at_peer ? stages.other.at : stages.current.at;
    peer_stage = at_peer ? stages.current.at : stages.other.at;
  }
  __device__ __forceinline__ uint32_t row_masks(int index) const {
    return s.base + static_cast<uint32_t>(offsetof(Control, row_masks)) + 2 * kTileTokens * index;
  }
  // Synchronises all consumer warps of this half, or of both.
  __device__ __forceinline__ void sync() const { named_barrier(1 + s.sm_half, kConsumers); }
  __device__ __forceinline__ void sync_halves() const { named_barrier(3, 2 * kConsumers); }
};

}  // namespace pat
