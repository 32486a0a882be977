// SPDX-License-Identifier: Apache-2.0
// The forward kernel: a persistent CTA an SM, of two halves that run the plan's units (item x KV
// head), each on its own. A half has two warpgroups:
//
//   producers, warp 0     scheduler  claims units, heaviest first, and describes them in a ring
//              warp 3     fetcher    fetches Q and the slot ids of the tokens, some tiles ahead
//              warps 1-2  loaders    gather K and V rows into shared memory, ahead of the consumers
//                                    and across units
//              of half 1 the warps are 1, 2, 0 and 3: see forward_kernel
//   consumers, warps 0-3  attention of a unit, and its output or partial result
//
// They meet in mbarriers only. K and V tiles of 64 tokens share one ring of stages. A tile is kept
// as panels of 64 elements: [head_dim / 64][64 rows][128 bytes], 16-byte chunks XORed with row % 8,
// which both ldmatrix (free of bank conflicts) and wgmma read.
//
// Wide units, of up to 128 packed rows, come first, and both halves work on them: each loads every
// second tile, and multiplies all of them with 64 rows of its own. Then one half begins with the
// heavy units, the other with the light ones.
#pragma once

#include "cuda/decode.h"
#include "cuda/ptx.cuh"
#include "state.h"

namespace pat {

inline constexpr int kThreads = 256;  // of a half
inline constexpr int kConsumers = 128;
inline constexpr int kLoaderWarps = 2;
inline constexpr int kTileTokens = 64;
static_assert(kTileTokens == kBranchAlign);
inline constexpr int kTileRows = 64;  // packed rows of a Q buffer
inline constexpr int kMaxStages = 8;
inline constexpr int kUnits = 8;      // ring of unit descriptions
inline constexpr int kSlotTiles = 6;  // ring of tiles whose slots are known
// A narrow unit, of one tile, is done by one consumer warp. A short one takes one stage: its K in
// the first half of the rows, its V in the second.
inline constexpr int kNarrowRows = 8;
inline constexpr int kShortTokens = kTileTokens / 2;
inline constexpr int kNarrowUnits = 4;  // one a consumer warp
inline constexpr int kAheadTiles = 4;   // the scheduler claims on when fewer tiles are left to load

struct ForwardParams {
  const PlanHeader* plan;
  const char* q;
  int64_t q_stride_query, q_stride_head;  // strides in bytes
  const char* k;
  int64_t k_stride_head;
  const char* v;
  int64_t v_stride_head;
  uint32_t k_stride_slot, v_stride_slot;
  const int32_t* slots;
  int64_t slots_stride;
  BranchList branches;
  char* out;
  int64_t out_stride_query, out_stride_head;
  float* lse;
  char* partials;
  float* partial_lse;
  int32_t* queue;    // tickets of heavy units, of light ones; halves done
  uint64_t* trace;   // see trace_unit, or null
  int32_t num_rows;  // queries that q and out have room for
  int32_t num_q_heads, num_kv_heads, group;
  uint32_t group_magic;     // r / group == r * group_magic >> 16 for packed rows r
  uint32_t kv_heads_magic;  // the same of units, below 2^32 / num_kv_heads, >> 32; 0 if that is 1
  int32_t min_row_tile, max_row_tile;  // run only items of these row tiles
  int32_t half_bytes;                  // shared memory of a half
  int32_t stages;
  int32_t q_buffers;  // 1 or 2: see footprint()
  bool narrow;        // there is room for narrow units
  bool float_partials;
  float scale;      // factor of q . k inside exp2, or of the transformed logit
  float pre_scale;  // kScaled: factor to the base-2 logit; kCapped: factor inside exp2 of tanh
  float cap;        // kCapped: base-2 logit cap
  int32_t logits;   // Logits
};

enum Logits : int { kPlain = 0, kScaled = 1, kCapped = 2 };

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
