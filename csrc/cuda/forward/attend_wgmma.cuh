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
template <typename T, int kHeadDim>
__device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                             const uint32_t (&weights)[16], uint32_t tile) {
  using Tile = WgmmaTile<T, kHeadDim>;
  const uint64_t v = Tile::values(tile);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wgmma_output<T>(o, weights + 4 * i, v + i * (Tile::kNextValues >> 4));
  }
  wgmma_commit();
}

// Up to 64 packed rows. The products of a tile's keys and of the values of the tile before it are
// issued together, and both are waited for: while a half's softmax runs, the other half has the
// matrix units. So what counts is how long a half needs from one wait for products to its next
// products. Hence the softmax is lazy, and whatever need not wait for products is done while they
// run: the half looks whether the next stages are full, fences them, and finds whether the tile has
// masks. It does not wait for stages there: as long as it holds stages that it has read, no others
// can be loaded into them (docs/lessons.md).
template <typename T, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  const int first_row = c.warp * kWarpRows;
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  // Else the compiler zeroes `o` in two places, for units with and without tokens, and the loop
  // ends beyond the 64 KB that a launch fetches.
  warpgroup_fence_operand(o);
  float scores[32];
  uint32_t weights[16];
  const Destination to = destination_of<kHeadDim, kDrafts>(c.p, c.s.control(), unit, first_row);
  LazySoftmax softmax(c.p.exp_scale, __shfl_sync(~0u, unit.num_rows, 0) - first_row);
  TileWalk walk(c, unit);

  if (walk.left > 0) {  // else it is a branch whose tails are all empty so far
    float unscale[2];   // not written
    const Queries<kHeadDim> q = take_queries<T, T>(c, walk.joint, unscale);
    auto stages = c.stages(walk.is_common());
    auto keys = c.next_stage(stages), values = keys, next_keys = keys;
    bool plain = false;  // the current tile has no masks
    // The shuffle keeps it in a register: lane_id() would be read anew at each use, which takes
    // long.
    const int lane = __shfl_sync(~0u, lane_id(), lane_id());
    // While products run: what a tile needs and need not wait for them. Whether it has masks, and,
    // if they are full, V of this tile and K of the next one and their fence.
    const auto look_ahead = [&] {
      plain = computed_here(!walk.masks());
      values = c.next_stage(stages);
      softmax.prepare(false);  // not once at the end: that would need a flag in a register
      if (walk.at_bound()) return;
      c.next_tile(stages, walk.next_is_common());
      next_keys = c.next_stage(stages);
      const bool full = values.is_full(), next_full = next_keys.is_full();
      softmax.prepare(__all_sync(~0u, full && next_full));
      fence_async_proxy();
    };
    // Waits for both stages and fences them. Where there is no next tile it does not wait, and
    // gives false.
    const auto wait_for_stages = [&] {
      if (walk.last()) return false;
      values.wait();
      if (walk.at_bound()) {
        c.turn_to_common(stages, unit.pair);
        next_keys = c.next_stage(stages);
        walk.turn_to_common();
      }
      next_keys.wait();
      fence_async_proxy();
      return true;
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
      if (!plain) {
        walk.mask_rows(scores, keys.row_masks);
        mask_tail<8>(scores, 0, walk.left);
      }
      barrier_release(keys.empty, lane);
      // False after the last tile, for which the softmax was told that the stages are not ready.
      if (!softmax.template weigh_tile<T>(weights, scores, o, wait_for_stages)) break;
      walk.advance();
      keys = next_keys;
      const auto before = values;
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(o);
      wgmma_fence();
      issue_scores<T, kHeadDim>(scores, q, keys.tile);
      issue_output<T, kHeadDim>(o, weights, before.tile);
      look_ahead();
      wait_for_products();
      barrier_release(before.empty, lane);
    }
    if constexpr (!S::kQInRegisters) release_queries(c);
    values.wait();
    fence_async_proxy();
    warpgroup_fence_operand(weights);
    warpgroup_fence_operand(o);
    wgmma_fence();
    issue_output<T, kHeadDim>(o, weights, values.tile);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
    c.release(values.empty);
    c.keep_positions(stages);
    if (walk.paired()) c.tell(2 * unit.pair + 1, c.stage);
  }

  SoftmaxState state[2];
  softmax.finish(state);
  finish_wgmma<T, false>(c, unit, to, walk.joint, o, state);
  if (walk.paired()) c.hear(2 * unit.pair + 1, c.peer_stage);
}

#endif  // PAT_WGMMA

}  // namespace pat
