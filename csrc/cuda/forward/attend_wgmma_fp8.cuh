// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with wgmma, on Hopper, for K and V of e4m3: see attend_wgmma.cuh for
// which units these are.
#pragma once

#include "cuda/forward/join_halves.cuh"
#include "cuda/forward/softmax.cuh"
#include "cuda/forward/tile_walk.cuh"

namespace pat {

#if PAT_WGMMA

// Issues sum = P V of a tile's e4m3 and columns 64 * part to 64 * part + 63 as one group. The
// matrix units add up products of e4m3 with some 14 bits and cut off what is below. An output of
// 8192 tokens whose V have a mean lost 14 % of it that way, so each tile has a sum of its own,
// which add_part() adds in fp32.
template <int kHeadDim>
__device__ __forceinline__ void issue_part(float (&sum)[32], const uint32_t (&weights)[8],
                                           uint32_t tile, int part) {
  using Tile = WgmmaTile<E4M3, kHeadDim>;
  const uint64_t v = Tile::values(tile, part);
  warpgroup_fence_operand(sum);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    wgmma_k_major<E4M3>(sum, weights + 4 * i, v + i * (Tile::kNextValues >> 4), i > 0);
  }
  wgmma_commit();
}

// Adds such a sum, whose product must be done. `factor`: of the tile's softmax.
template <int kCount>
__device__ __forceinline__ void add_part(float (&o)[kCount], float (&sum)[32], int part,
                                         const float (&factor)[2]) {
  warpgroup_fence_operand(sum);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float& x = o[32 * part + i];
    x = fmaf(x, factor[(i >> 1) & 1], sum[i]);
  }
}

// Issues and adds the parts from `first` on, one after the other.
template <int kHeadDim>
__device__ __forceinline__ void add_parts(float (&o)[kHeadDim / 2], float (&sum)[32],
                                          uint32_t (&weights)[8], uint32_t tile, int first,
                                          const float (&factor)[2]) {
  warpgroup_fence_operand(weights);
#pragma unroll
  for (int part = first; part < kHeadDim / 64; ++part) {
    issue_part<kHeadDim>(sum, weights, tile, part);
    wgmma_wait<0>();
    add_part(o, sum, part, factor);
  }
}

// Makes a tile's weights the operand of issue_part(): a lane has four of a row's tokens in a
// register, those that ValueBlocks puts next to each other.
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[8], const float (&w)[32]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float* row = w + 8 * (i >> 1) + 2 * (i & 1);
    weights[i] = pack_e4m3(row[0], row[1], row[4], row[5]);
  }
}

// Up to 64 packed rows. The product of a tile's weights and values is issued with that of the next
// tile's keys.
template <typename T, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_wgmma_fp8(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                                 const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  const ForwardParams& p = c.p;
  const int first_row = c.warp * kWarpRows;
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  float scores[32], sum[32];  // sum: see issue_part()
  uint32_t weights[8];
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  float factor[2];
  ScaledScores<kTransforms> exponent{p};
  const Destination to = destination_of<kHeadDim, kDrafts>(p, c.s.control(), unit, first_row);
  TileWalk walk(c, unit);

  if (walk.left > 0) {  // else it is a branch whose tails are all empty so far
    const Queries<kHeadDim> q = take_queries<E4M3, T>(c, walk.joint, exponent.unscale);
    auto stages = c.stages(walk.is_common());
    auto stage = c.next_stage(stages), next = stage;  // K and V of the current and the next tile
    bool ready = false;                               // the next stage is full and fenced
    // While products run: see attend_wgmma().
    const auto look_ahead = [&] {
      ready = false;
      if (walk.at_bound()) return;
      c.next_tile(stages, walk.next_is_common());
      next = c.next_stage(stages);
      ready = __all_sync(~0u, next.is_full());
      fence_async_proxy();
    };
    const auto weigh = [&] {
      softmax<8, kTransforms>(p, exponent, scores, row_max, row_sum, factor, 0, walk.left,
                              [&](float (&s)[32]) { walk.mask_rows(s, stage.row_masks); });
      pack_weights(weights, scores);
    };
    stage.wait();
    fence_async_proxy();
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores<E4M3, kHeadDim>(scores, q, stage.tile);
    look_ahead();
    wgmma_wait<0>();
    warpgroup_fence_operand(scores);
    weigh();
    while (!walk.last()) {
      if (!ready) {
        if (walk.at_bound()) {
          c.turn_to_common(stages, unit.pair);
          next = c.next_stage(stages);
          walk.turn_to_common();
        }
        next.wait();
        fence_async_proxy();
      }
      walk.advance();
      const auto before = stage;
      stage = next;
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(weights);
      issue_part<kHeadDim>(sum, weights, before.tile, 0);
      issue_scores<E4M3, kHeadDim>(scores, q, stage.tile);
      look_ahead();
      wgmma_wait<1>();
      add_part(o, sum, 0, factor);
      add_parts<kHeadDim>(o, sum, weights, before.tile, 1, factor);
      wgmma_wait<0>();
      warpgroup_fence_operand(scores);
      c.release(before.empty);
      weigh();
    }
    if constexpr (!S::kQInRegisters) release_queries(c);
    add_parts<kHeadDim>(o, sum, weights, stage.tile, 0, factor);
    c.release(stage.empty);
    c.keep_positions(stages);
    if (walk.paired()) c.tell(2 * unit.pair + 1, c.stage);
  }

  SoftmaxState state[2];
  finish_states(exponent, row_max, row_sum, state);
  finish_wgmma<T, true>(c, unit, to, walk.joint, o, state);
  if (walk.paired()) c.hear(2 * unit.pair + 1, c.peer_stage);
}

#endif  // PAT_WGMMA

}  // namespace pat
