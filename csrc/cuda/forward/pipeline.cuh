// SPDX-License-Identifier: Apache-2.0
// What the warps of a half share: the ring of work units, the rings of stages and slots, the Q
// buffers, and the mbarriers by which they hand these on.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "cuda/tiles.h"
#include "state.h"

namespace pat {

enum Narrow : int { kNotNarrow = 0, kNarrow = 1, kShort = 2 };

// A unit as the scheduler describes it. tokens < 0: no more units.
struct alignas(16) Unit {
  int32_t member_offset;
  int32_t row_begin;  // first packed row: items beyond the kernel's row tile run in parts
  int32_t rows;
  int32_t batch_row;  // of a branch: seen_by_all()
  int32_t kv_start;
  int32_t tokens;
  int32_t head;
  int32_t item;
  int16_t single;  // all rows belong to one query
  int8_t narrow;   // Narrow
  int8_t wide;     // both halves work on it
  Member member;   // if single; else only `query` means anything, that of some member
  int32_t branch;  // its tokens stand in the list of branches, from kv_start on
};

struct alignas(1024) Control {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t peer_empty[kMaxStages];  // by the other half's consumers, after a tile of a wide unit
  uint64_t q_full[2], q_empty[2];
  uint64_t unit_full[kUnits], unit_empty[kUnits];
  uint64_t slot_full[kSlotTiles], slot_empty[kSlotTiles];
  uint64_t narrow_full[kNarrowUnits], narrow_empty[kNarrowUnits];
  alignas(16) uint32_t slots[kSlotTiles][kTileTokens];
  alignas(16) uint16_t rows[kMaxStages][kTileTokens];  // of a branch, of the tile whose K it is
  Unit units[kUnits];
  float exchange[4][16][2];
  int32_t loaded_tiles;
  // The plan, looked up once.
  int32_t num_queries, num_items, num_wide_items, num_heavy_items;
  const Item* items;
  const Member* members;
};
static_assert(sizeof(Control) == 4096);

template <int kHeadDim>
struct Shape {
  static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
  static constexpr int kPanelBytes = kTileTokens * 128;
  static constexpr int kChunks = kHeadDim / 8;                     // 16-byte chunks of a row
  static constexpr int kRowsPerCopy = 32 / kChunks;                // rows of one warp-wide copy
  static constexpr int kNarrowBytes = kNarrowRows * kHeadDim * 2;  // Q of a narrow unit
  static constexpr int kHalves = kHeadDim > 128 ? 1 : 2;           // at most
  static constexpr bool kWgmma = PAT_WGMMA && kHeadDim <= 128;
};

// The least that a block runs with: one half, two stages and one Q buffer.
template <int kHeadDim>
inline constexpr int kMinSharedBytes =
    static_cast<int>(sizeof(Control)) + 3 * Shape<kHeadDim>::kTileBytes;

// Position in a ring of mbarriers.
struct Cursor {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int size) {
    if (++index == size) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Shared memory of a half: Control, the stages, the Q buffers, the Q buffers of narrow units.
// Addresses in the shared window.
template <int kHeadDim>
struct Shared {
  using S = Shape<kHeadDim>;
  uint32_t base;
  uint32_t peer;  // base of the other half
  uint32_t stages, q_buffers;
  int side, halves;  // which half this is, of how many

  __device__ __forceinline__ Control& control() const {
    return *static_cast<Control*>(__cvta_shared_to_generic(base));
  }
  __device__ __forceinline__ uint32_t tile(uint32_t i) const {
    return base + static_cast<uint32_t>(sizeof(Control)) + i * S::kTileBytes;
  }
  __device__ __forceinline__ uint32_t q(uint32_t i) const { return tile(stages + i); }
  __device__ __forceinline__ uint32_t narrow_q(uint32_t i) const {
    return tile(stages + q_buffers) + i * S::kNarrowBytes;
  }
  // Barrier i of a ring of Control.
  __device__ __forceinline__ uint32_t barrier(uint32_t ring, uint32_t i) const {
    return base + ring + 8 * i;
  }
  __device__ __forceinline__ uint32_t full(uint32_t i) const {
    return barrier(offsetof(Control, full), i);
  }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const {
    return barrier(offsetof(Control, empty), i);
  }
  __device__ __forceinline__ uint32_t peer_empty(uint32_t i) const {
    return barrier(offsetof(Control, peer_empty), i);
  }
  __device__ __forceinline__ uint32_t q_full(uint32_t i) const {
    return barrier(offsetof(Control, q_full), i);
  }
  __device__ __forceinline__ uint32_t q_empty(uint32_t i) const {
    return barrier(offsetof(Control, q_empty), i);
  }
  __device__ __forceinline__ uint32_t unit_full(uint32_t i) const {
    return barrier(offsetof(Control, unit_full), i);
  }
  __device__ __forceinline__ uint32_t unit_empty(uint32_t i) const {
    return barrier(offsetof(Control, unit_empty), i);
  }
  __device__ __forceinline__ uint32_t slot_full(uint32_t i) const {
    return barrier(offsetof(Control, slot_full), i);
  }
  __device__ __forceinline__ uint32_t slot_empty(uint32_t i) const {
    return barrier(offsetof(Control, slot_empty), i);
  }
  __device__ __forceinline__ uint32_t narrow_full(uint32_t i) const {
    return barrier(offsetof(Control, narrow_full), i);
  }
  __device__ __forceinline__ uint32_t narrow_empty(uint32_t i) const {
    return barrier(offsetof(Control, narrow_empty), i);
  }
};

__device__ __forceinline__ Member load_member(const Control& plan, int index) {
  const int2 m = __ldg(reinterpret_cast<const int2*>(plan.members) + index);
  return {m.x, m.y};
}

}  // namespace pat
