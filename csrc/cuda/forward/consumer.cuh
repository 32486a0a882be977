// SPDX-License-Identifier: Apache-2.0
// What a consumer warp keeps across work units, and how it takes stages from the ring.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// kTransforms: the logits are not kPlain.
template <int kHeadDim, bool kTransforms, Drafts kDrafts>
struct Consumer {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;               // 0 .. 3
  StageRing stage, peer_stage;  // this half's stages and the other half's
  QRing q;

  __device__ __forceinline__ void release(uint32_t barrier) { barrier_release(barrier, lane_id()); }
  __device__ __forceinline__ void release_stage() {
    release(stage.empty(s.base));
    stage.advance(p.stages);
  }
  // A stage: addresses of its tile, of its barriers, and of its Control::row_masks (of this half:
  // they are not read for common tiles, which have no masks), and the parity of the phase in which
  // it is full.
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
  // The stages of a unit that wgmma runs, in order. Of common tiles, which both halves attend to,
  // half 0 has the first one and then every second one.
  struct Stages {
    Cursor current, other;

    __device__ __forceinline__ void swap_if(bool condition) {
      const Cursor before = current;
      current = condition ? other : current;
      other = condition ? before : other;
    }
  };
  __device__ __forceinline__ Stages stages(bool common) const {
    const bool of_peer = common && s.sm_half == 1;
    return {cursor(of_peer), cursor(!of_peer)};
  }
  // To the next tile, which both halves attend to if it is `common`.
  __device__ __forceinline__ void next_tile(Stages& stages, bool common) const {
    if (Shape<kHeadDim>::kMaxHalves == 1) return;
    stages.swap_if(common || stages.current.base != s.base);
  }
  // A half does not read stages whose tiles are the other half's own, so it loses track of that
  // ring, and it must not wait for a stage more than a phase ahead (see Ring). After its own tiles
  // each consumer warp publishes the position of its half's ring as message `number`; the same warp
  // of the other half reads it before it uses that ring again. No warp is more than three messages
  // ahead of the other.
  __device__ __forceinline__ void tell(int number, const StageRing& at) const {
    const int position = static_cast<int>(at.phase) << 7 | at.index;
    if (lane_id() == 0) set_counter(s.control().messages[number & 3][warp], number << 8 | position);
  }
  __device__ __forceinline__ void hear(int number, StageRing& at) const {
    auto& peer = *static_cast<Control*>(__cvta_shared_to_generic(s.peer));
    int32_t message;
    do {
      message = counted(peer.messages[number & 3][warp]);
    } while (message >> 8 != number);
    at.index = message & 127;
    at.phase = message >> 7 & 1;
  }
  // From the last tile that the half has to itself to the first common one.
  __device__ __forceinline__ void turn_to_common(Stages& stages, int pair) const {
    tell(2 * pair, stages.current.at);
    hear(2 * pair, stages.other.at);
    stages.swap_if(s.sm_half == 1);
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
