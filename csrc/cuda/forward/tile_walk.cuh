// SPDX-License-Identifier: Apache-2.0
// The tiles of a unit that wgmma runs, and which of their scores are masked.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/softmax.cuh"

namespace pat {

#if PAT_WGMMA

// The tiles of a unit that a half attends to, in order: all of them, or every second one of a joint
// unit. Of a paired branch with kOwnFirst those that the half has to itself, which are its last
// ones, then those that both halves attend to.
template <int kHeadDim, bool kTransforms, Drafts kDrafts>
struct TileWalk {
  static constexpr bool kTwoHalves = Shape<kHeadDim>::kMaxHalves == 2;

  const ForwardParams& p;
  const WorkUnit& unit;
  const int first_row;  // of the warp
  const int pairing;    // the unit's Pairing
  const bool joint;     // it is joint
  const MaskedTiles masked;
  const int drafts;  // see drafts_below()
  const int step;    // tokens from a tile to the next one
  const int total;   // tokens of the unit
  const int own;     // those behind the common ones; INT_MAX if no tile is common
  int left;          // tokens from the current tile's first on
  int bound;         // at_bound() when left <= bound: at the last tile, or at the last own tile
                     // before common ones

  __device__ __forceinline__ TileWalk(const Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                      const WorkUnit& unit)
      : p(c.p),
        unit(unit),
        first_row(c.warp * kWarpRows),
        pairing(kTwoHalves ? __shfl_sync(~0u, static_cast<int>(unit.pairing), 0) : kAlone),
        joint(Shape<kHeadDim>::kJoint && __shfl_sync(~0u, static_cast<int>(unit.joint), 0)),
        masked(unit),
        drafts(kDrafts != kNoDrafts ? drafts_below(c.p, unit) : 0),
        step(joint ? 2 * kTileTokens : kTileTokens),
        total(__shfl_sync(~0u, unit.num_tokens, 0)),
        own(pairing == kAlone ? INT_MAX : total - __shfl_sync(~0u, unit.halved_tokens, 0)),
        left(joint                  ? total - c.s.sm_half * kTileTokens
             : pairing == kOwnFirst ? own
                                    : total),
        bound(step) {}

  __device__ __forceinline__ bool paired() const { return pairing != kAlone; }
  // Whether the tile is the last one, or the last one before the common ones.
  __device__ __forceinline__ bool at_bound() const { return left <= bound; }
  __device__ __forceinline__ bool before_common() const {
    return pairing == kOwnFirst && bound == step && at_bound();
  }
  __device__ __forceinline__ bool last() const { return at_bound() && !before_common(); }
  // Whether both halves attend to the current tile, and to the next one.
  __device__ __forceinline__ bool is_common() const { return left > own; }
  __device__ __forceinline__ bool next_is_common() const { return left - step > own; }
  __device__ __forceinline__ void advance() { left -= step; }
  // Lets advance() go to the first common tile.
  __device__ __forceinline__ void turn_to_common() {
    left = total + step;
    bound = own + step;
  }
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
