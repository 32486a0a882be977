// SPDX-License-Identifier: Apache-2.0
// Decode attention of multi-head latent attention (MLA) on Hopper: its sizes, its shared memory and
// its parameters. K of a token is one latent of 576 values, which all query heads share; its first
// 512 values are V as well. kernel.cu says who does what.
#pragma once

#include "cuda/forward/pipeline.cuh"
#include "cuda/mla/launch.h"

namespace pat::mla {

inline constexpr int kKeyDim = 576, kValueDim = 512;
inline constexpr int kRopeDim = kKeyDim - kValueDim;

// A tile of K, or Q, is kept as panels of 64 columns: [9][64 rows][128 bytes], with the 16-byte
// chunks of a row XORed with row % 8, which wgmma reads. The last panel holds the rope part.
inline constexpr int kPanelBytes = kTileTokens * 128;
inline constexpr int kValuePanels = kValueDim / 64;
inline constexpr int kPanels = kKeyDim / 64;
inline constexpr int kTileBytes = kPanels * kPanelBytes;
inline constexpr int kRopeOffset = kValuePanels * kPanelBytes;
static_assert(kRopeDim == 64 && kTileRows == kTileTokens);  // Q is as large as a tile

// Warpgroups: loaders, scores, output columns 0 to 255, output columns 256 to 511.
inline constexpr int kGroups = 4;
inline constexpr int kGroupWarps = 4;
inline constexpr int kCtaThreads = kGroups * kGroupWarps * 32;
// Registers of a thread of each. A kernel of 512 threads begins with 128, so the first two give up
// some and the others take them.
inline constexpr int kLoaderRegisters = 72, kScoreRegisters = 88, kOutputRegisters = 176;
static_assert(kLoaderRegisters + kScoreRegisters + 2 * kOutputRegisters == kGroups * 128 &&
              kLoaderRegisters < 128 && kScoreRegisters < 128);
inline constexpr int kHalfColumns = kValueDim / 2;  // of the output, of a warpgroup

inline constexpr int kTileStages = 2;
// A tile is given up in parts, two panels each and the rope panel last, by the warpgroup that has
// multiplied the columns; the rope panel by both. So it is loaded part by part.
inline constexpr int kParts = 5;
inline constexpr int kRopePart = kParts - 1;
inline constexpr int kUnits = 8;  // ring of work units

// The head of a CTA's shared memory. Barriers come first: shared_address() + offsetof.
struct alignas(1024) Board {
  uint64_t full[kTileStages];
  uint64_t empty[kTileStages][kParts];
  // The weights of the stage's tile are where its rope panel was, and what follows is written.
  uint64_t weighed[kTileStages];
  uint64_t q_full, q_empty;
  uint64_t unit_full[kUnits], unit_empty[kUnits];
  WorkUnit units[kUnits];
  // Of a stage's tile, until its rope panel is given up:
  alignas(16) uint16_t row_masks[kTileStages][kTileTokens];
  int32_t raised[kTileStages][kGroupWarps];     // 1: the output of the warp's rows is to be scaled
  float factors[kTileStages][kTileRows];        // by this
  SoftmaxState states[kTileStages][kTileRows];  // of a unit, with its last tile
};
static_assert(sizeof(Board) <= 3 * 1024);

inline constexpr int kSharedBytes =
    static_cast<int>(sizeof(Board)) + (1 + kTileStages) * kTileBytes;
static_assert(kSharedBytes <= 227 * 1024 && kSharedBytes == kMinSharedBytes);

struct Params {
  ForwardParams f;  // `q`: the nope part, [rows, heads, 512]
  int64_t q_stride_row;
  const char* q_rope;  // [rows, heads, 64]
  int64_t q_rope_stride_row, q_rope_stride_head;
};

// Where things are in shared memory. Addresses are those of the shared window.
struct Place {
  uint32_t base;

  __device__ __forceinline__ Board& board() const {
    return *static_cast<Board*>(__cvta_shared_to_generic(base));
  }
  __device__ __forceinline__ uint32_t q() const { return base + uint32_t{sizeof(Board)}; }
  __device__ __forceinline__ uint32_t tile(int stage) const {
    return q() + (1 + stage) * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + uint32_t{offsetof(Board, full)} + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const {
    return base + uint32_t{offsetof(Board, empty)} + 8 * (stage * kParts + part);
  }
  __device__ __forceinline__ uint32_t weighed(int stage) const {
    return base + uint32_t{offsetof(Board, weighed)} + 8 * stage;
  }
  __device__ __forceinline__ uint32_t q_full() const {
    return base + uint32_t{offsetof(Board, q_full)};
  }
  __device__ __forceinline__ uint32_t q_empty() const {
    return base + uint32_t{offsetof(Board, q_empty)};
  }
  __device__ __forceinline__ uint32_t unit_full(int i) const {
    return base + uint32_t{offsetof(Board, unit_full)} + 8 * i;
  }
  __device__ __forceinline__ uint32_t unit_empty(int i) const {
    return base + uint32_t{offsetof(Board, unit_empty)} + 8 * i;
  }

  // One thread makes the barriers, before all threads meet.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kLoaders = kGroupWarps * 32, kWarps = kGroupWarps * kArriving;
    for (int stage = 0; stage < kTileStages; ++stage) {
      barrier_init(full(stage), kLoaders);
      for (int part = 0; part < kParts; ++part) {
        barrier_init(empty(stage, part), part == kRopePart ? 2 * kWarps : kWarps);
      }
      barrier_init(weighed(stage), kWarps);
    }
    barrier_init(q_full(), kLoaders);
    barrier_init(q_empty(), kWarps);
    for (int i = 0; i < kUnits; ++i) {
      barrier_init(unit_full(i), 1);
      barrier_init(unit_empty(i), kGroups * kWarps);
    }
  }
};

// A position in a ring of kCapacity buffers: see Ring.
template <int kCapacity>
struct Position {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kCapacity) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Tiles of a unit. One without tokens has a tile as well, of which all tokens are masked.
__device__ __forceinline__ int tiles_of(int tokens) {
  return tokens > kTileTokens ? (tokens + kTileTokens - 1) / kTileTokens : 1;
}

}  // namespace pat::mla
