// SPDX-License-Identifier: Apache-2.0
// Every tile and ring size of the forward kernel. The sizes that the scheduler knows as well
// (kWideRows, kHeavyRows, kBranchRows, kBranchAlign) are defined in plan.h.
//
// Work units by their number of packed rows, largest first:
//   wide    more than 64: both halves of an SM work on it, each with 64 rows at a time
//   heavy   17 to 64, and all branches: four consumer warps, limited by the matrix units
//   light   up to 16: four consumer warps, limited by memory
//   narrow  up to 8 rows and 64 tokens: one consumer warp, so that four of them run at a time
//   short   a narrow unit of up to 32 tokens: its K and its V share one stage
// K and V in fp8 share a stage in every unit.
#pragma once

#include <array>
#include <limits>

#include "plan.h"

namespace pat {

// Threads of a half: a warpgroup of producers and one of consumers.
inline constexpr int kThreads = 256;
inline constexpr int kConsumers = 128;
inline constexpr int kLoaderWarps = 2;

inline constexpr int kTileTokens = 64;                // tokens of a K or V tile
inline constexpr int kTileRows = kWideRows;           // packed rows of a Q buffer
inline constexpr int kWarpRows = 16;                  // packed rows of one warp's matrix product
inline constexpr int kNarrowRows = 8;                 // packed rows of a narrow unit, at most
inline constexpr int kShortTokens = kTileTokens / 2;  // tokens of a short unit, at most
static_assert(kTileTokens == kBranchAlign);  // a branch begins in the list where a tile does
static_assert(kTileRows == 4 * kWarpRows && kHeavyRows == kWarpRows);

inline constexpr int kMaxStages = 8;      // ring of K and V tiles
inline constexpr int kWorkUnits = 8;      // ring of work units
inline constexpr int kSlotTiles = 6;      // ring of tiles whose slots are known
inline constexpr int kGivenTiles = 3;     // tiles whose slots a FirstUnit has
inline constexpr int kNarrowBuffers = 4;  // ring of Q buffers of narrow units: one a consumer warp
inline constexpr int kAheadTiles = 4;     // the scheduler claims on when no more are left to load

// Upper ends of the row tiles that Launch::kStreams runs in one kernel each.
inline constexpr std::array<int, 4> kRowTiles = {kWarpRows, 2 * kWarpRows, kWideRows,
                                                 std::numeric_limits<int>::max()};

}  // namespace pat
