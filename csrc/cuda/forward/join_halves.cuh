// SPDX-License-Identifier: Apache-2.0
// The end of a unit that wgmma runs. Of a joint one both halves of an SM have attended to every
// second tile with all packed rows, and add up what they have.
#pragma once

#include "cuda/forward/epilogue.cuh"
#include "cuda/forward/softmax.cuh"
#include "cuda/forward/wgmma_tile.cuh"

namespace pat {

// Leaves in `o` the half's columns of the result, from the first on: half 0 has the lower half of
// all columns, half 1 the upper one. `state` becomes that of all tokens. The other columns go to
// the other half through this half's Q buffer, which is as large as the half of a unit's output in
// floats and is not needed any more. A joint unit is the first one of its half, so this is Q buffer
// 0. All consumers of both halves call it.
template <int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void join_halves(const Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                            float (&o)[kHeadDim / 2], SoftmaxState (&state)[2]) {
  constexpr int kKept = kHeadDim / 4;
  const auto buffer_of = [&](uint32_t half) {
    return static_cast<float4*>(__cvta_shared_to_generic(half + (c.s.q(0) - c.s.base)));
  };
  const auto state_of = [&](uint32_t half, int row) {
    return static_cast<Control*>(__cvta_shared_to_generic(half))->exchange[c.warp][row];
  };
  const int lane = lane_id(), row = lane >> 2;
  const bool upper = c.s.sm_half == 1;
  float4* to = buffer_of(c.s.base) + c.warp * (kKept / 4) * 32 + lane;
  const float4* from = buffer_of(c.s.peer) + c.warp * (kKept / 4) * 32 + lane;

  c.sync();  // all warps of the half have read their rows of Q
#pragma unroll
  for (int i = 0; i < kKept / 4; ++i) {
    const float* low = o + 4 * i;
    const float* high = low + kKept;
    to[32 * i] = make_float4(upper ? low[0] : high[0], upper ? low[1] : high[1],
                             upper ? low[2] : high[2], upper ? low[3] : high[3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if ((lane & 3) != 0) break;
    state_of(c.s.base, row + 8 * r)[0] = state[r].max;
    state_of(c.s.base, row + 8 * r)[1] = state[r].sum;
  }
  c.sync_halves();
  float mine[2], theirs[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float* part = state_of(c.s.peer, row + 8 * r);
    const SoftmaxState other = {part[0], part[1]};
    const SoftmaxState total = join(state[r], other);
    mine[r] = rescale(state[r].max, total.max);
    theirs[r] = rescale(other.max, total.max);
    state[r] = total;
  }
#pragma unroll
  for (int i = 0; i < kKept / 4; ++i) {
    const float4 x = from[32 * i];
    const float other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float kept = upper ? o[kKept + 4 * i + j] : o[4 * i + j];
      o[4 * i + j] = kept * mine[j / 2] + other[j] * theirs[j / 2];
    }
  }
  c.sync_halves();  // before the Q buffers and the states get others
}

#if PAT_WGMMA

// Joins the halves of a joint unit, and writes the results of 16 rows. Both kinds of units write
// with the same code, for it is long (see placed_first()).
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void finish_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit, const Destination& to,
                                             bool joint, float (&o)[kHeadDim / 2],
                                             SoftmaxState (&state)[2]) {
  if constexpr (Shape<kHeadDim>::kJoint) {
    if (joint) {
      join_halves(c, o, state);
      release_queries(c);
    }
  }
  const bool upper = joint && c.s.sm_half == 1;
  write_rows<T, kHeadDim / 8, kFp8>(c.p, unit, to, c.warp * kWarpRows, upper ? kHeadDim / 2 : 0, o,
                                    state, !upper, joint);
}

#endif  // PAT_WGMMA

}  // namespace pat
