// SPDX-License-Identifier: Apache-2.0
// The tiles of a unit that wgmma runs, and which of their scores are masked.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/softmax.cuh"

namespace pat {

#if PAT_WGMMA

// The tiles of a unit that a half attends to, in order: all of them, or every second one of a joint
// unit.
template <int kHeadDim, bool kTransforms, Drafts kDrafts>
struct TileWalk {
  const ForwardParams& p;
  const WorkUnit& unit;
  const int first_row;     // of the warp
  const bool wide, joint;  // the unit is
  const MaskedTiles masked;
  const int drafts;  // see drafts_below()
  const int step;    // tokens from a tile to the next one
  int left;          // tokens from the current tile's first on

  __device__ __forceinline__ TileWalk(const Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                      const WorkUnit& unit)
      : p(c.p),
        unit(unit),
        first_row(c.warp * kWarpRows),
        wide(__shfl_sync(~0u, static_cast<int>(unit.wide), 0)),
        joint(Shape<kHeadDim>::kJoint && __shfl_sync(~0u, static_cast<int>(unit.joint), 0)),
        masked(unit),
        drafts(kDrafts != kNoDrafts ? drafts_below(c.p, unit) : 0),
        step(joint ? 2 * kTileTokens : kTileTokens),
        left(__shfl_sync(~0u, unit.num_tokens, 0) - (joint ? c.s.sm_half * kTileTokens : 0)) {}

  __device__ __forceinline__ bool last() const { return left <= step; }
  __device__ __forceinline__ void advance() { left -= step; }
  // Whether some of the current tile's scores are masked: it has tokens that only some rows attend
  // to, or fewer than other tiles.
  __device__ __forceinline__ bool masks() const {
    return masked.has(left) || left < kTileTokens || (kDrafts != kNoDrafts && left < drafts);
  }
  // Sets the current tile's scores of tokens that a row does not attend to to -inf. It leaves
  // tokens beyond the unit's last one to mask_tail(). `row_masks`: where those of the tile are.
  __device__ __forceinline__ void mask_rows(float (&scores)[32], uint32_t row_masks) const {
    if (masked.has(left)) {
      uint32_t of_tokens[8];
      read_row_masks<8>(of_tokens, row_masks);
      mask_scores<8>(scores, of_tokens, first_row);
    }
    if constexpr (kDrafts != kNoDrafts) {
      if (left < drafts) {
        mask_drafts<8, kDrafts>(p, scores, unit.member.query, unit.first_packed_row + first_row, 0,
                                left);
      }
    }
  }
};

#endif  // PAT_WGMMA

}  // namespace pat
