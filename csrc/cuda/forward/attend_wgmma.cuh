// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with wgmma, on Hopper, for K and V of 16 bits: heavy units and branches,
// which one half runs or, as joint units, both halves with every second tile each; and wide units,
// which both halves run with 64 rows each. attend_wgmma_fp8.cuh does the same for e4m3.
#pragma once

#include "cuda/forward/join_halves.cuh"
#include "cuda/forward/lazy_softmax.cuh"
#include "cuda/forward/tile_walk.cuh"

namespace pat {

#if PAT_WGMMA

// Issues o += P V as one group.
template <typename M, int kHeadDim, int kCount>
__device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                             const uint32_t (&weights)[kCount], uint32_t tile) {
  using Tile = WgmmaTile<M, kHeadDim>;
  const uint64_t v = Tile::values(tile);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    wgmma_output<M>(o, weights + 4 * i, v + i * (Tile::kNextValues >> 4));
  }
  wgmma_commit();
}

// o += P V, when no other product is under way.
template <typename M, int kHeadDim, int kCount>
__device__ __forceinline__ void add_last_values(float (&o)[kHeadDim / 2],
                                                uint32_t (&weights)[kCount], uint32_t tile) {
  warpgroup_fence_operand(weights);
  warpgroup_fence_operand(o);
  wgmma_fence();
  issue_output<M, kHeadDim>(o, weights, tile);
  wgmma_wait<0>();
  warpgroup_fence_operand(o);
}

// Up to 64 packed rows. The products of a tile's keys and of the values of the tile before it are
// issued together, and both are waited for: while a half's softmax runs, the other half has the
// matrix units. So what counts is how long a half needs from one wait to its next products. While
// they run it looks up the next stages, and the softmax is a lazy one. It does not wait for these
// stages yet: until it has released those it has read, fewer can be loaded
// (docs/experiments/tiles.md, series 20 and 21).
template <typename T, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  const int first_row = c.warp * kWarpRows;
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  float scores[32];
  uint32_t weights[16];
  const Destination to = destination_of<kHeadDim, kDrafts>(c.p, c.s.control(), unit, first_row);
  const bool wide = __shfl_sync(~0u, static_cast<int>(unit.wide), 0);
  const bool joint = S::kJoint && __shfl_sync(~0u, static_cast<int>(unit.joint), 0);
  LazySoftmax softmax(c.p.exp_scale, __shfl_sync(~0u, unit.num_rows, 0) - first_row);
  TileWalk walk(c, unit, joint);

  if (walk.left > 0) {  // else it is a branch whose tails are all empty so far
    float unscale[2];   // not written
    const Queries<kHeadDim> q = take_queries<T, T>(c, joint, unscale);
    auto stages = c.stages(wide);
    auto keys = c.next_stage(stages), values = keys, next_keys = keys;
    // While products run: looks for V of the current tile and K of the next one.
    const auto look_ahead = [&] {
      values = c.next_stage(stages);
      values.look();
      if (walk.last()) return;
      stages.next_tile();
      next_keys = c.next_stage(stages);
      next_keys.look();
    };
    const auto wait_for_products = [&] {
      wgmma_wait<0>();
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(o);
    };
    keys.wait();
    fence_async_proxy();
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores<T, kHeadDim>(scores, q, keys.tile);
    look_ahead();
    wait_for_products();
    while (true) {
      if constexpr (kTransforms) transform_logits(c.p, scores);
      if (walk.masks()) {
        walk.mask_rows(scores, keys.row_masks);
        mask_tail<8>(scores, 0, walk.left);
      }
      c.release(keys.empty);
      softmax.template weigh_tile<T>(weights, scores, o);
      if (walk.last()) break;
      walk.advance();
      keys = next_keys;
      keys.wait();
      values.wait();
      const auto before = values;
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(o);
      fence_async_proxy();
      wgmma_fence();
      issue_scores<T, kHeadDim>(scores, q, keys.tile);
      issue_output<T, kHeadDim>(o, weights, before.tile);
      look_ahead();
      wait_for_products();
      c.release(before.empty);
    }
    if constexpr (!S::kQInRegisters) release_queries(c);
    values.wait();
    fence_async_proxy();
    add_last_values<T, kHeadDim>(o, weights, values.tile);
    c.release(values.empty);
    c.pass(stages);
  }

  SoftmaxState state[2];
  softmax.finish(state);
  finish_wgmma<T, false>(c, unit, to, joint, o, state);
}

#endif  // PAT_WGMMA

}  // namespace pat
