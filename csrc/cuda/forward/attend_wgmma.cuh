// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with wgmma, on Hopper: heavy units and branches, which one half runs or,
// as joint units, both halves with every second tile each; and wide units, which both halves run
// with 64 rows each.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/epilogue.cuh"
#include "cuda/forward/join_halves.cuh"
#include "cuda/forward/softmax.cuh"
#include "cuda/forward/wgmma_tile.cuh"

namespace pat {

#if PAT_WGMMA

// Issues scores = Q K^T of 64 rows and 64 tokens as one group.
template <typename M, int kHeadDim>
__device__ __forceinline__ void issue_scores(float (&scores)[32], const Queries<kHeadDim>& q,
                                             uint32_t tile) {
  using Tile = WgmmaTile<M, kHeadDim>;
  const uint64_t k = Tile::keys(tile);
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    wgmma_k_major<M>(scores, q.step(i), k + (Tile::columns(i) >> 4), i > 0);
  }
  wgmma_commit();
}

// Issues o += P V as one group; not for e4m3.
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

// Makes a tile's weights the operand of issue_output() or issue_part(). Of e4m3 a lane has four of
// a row's tokens in a register, those that ValueBlocks puts next to each other.
template <typename M, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kCount], const float (&w)[32]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<M, E4M3>) {
      const float* row = w + 8 * (i >> 1) + 2 * (i & 1);
      weights[i] = pack_e4m3(row[0], row[1], row[4], row[5]);
    } else {
      weights[i] = pack2<M>(w[2 * i], w[2 * i + 1]);
    }
  }
}

// o += P V, when no other product is under way; not for e4m3.
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

// scores = Q K^T of a unit's first tile, when no other product is under way.
template <typename M, int kHeadDim>
__device__ __forceinline__ void multiply_first_keys(float (&scores)[32], const Queries<kHeadDim>& q,
                                                    uint32_t tile) {
  fence_async_proxy();
  warpgroup_fence_operand(scores);
  wgmma_fence();
  issue_scores<M, kHeadDim>(scores, q, tile);
  wgmma_wait<0>();
  warpgroup_fence_operand(scores);
}

// scores = Q K^T of the tile whose K is at `keys`, and o += P V of the tile before it, whose V is
// at `values`. The scores are there at the return; of e4m3 so is the output, otherwise it is under
// way.
template <typename M, int kHeadDim, int kCount>
__device__ __forceinline__ void multiply_tile(float (&scores)[32], float (&o)[kHeadDim / 2],
                                              float (&sum)[32], uint32_t (&weights)[kCount],
                                              const Queries<kHeadDim>& q, uint32_t keys,
                                              uint32_t values, const float (&factor)[2]) {
  fence_async_proxy();
  warpgroup_fence_operand(scores);
  warpgroup_fence_operand(weights);
  if constexpr (std::is_same_v<M, E4M3>) {
    issue_part<kHeadDim>(sum, weights, values, 0);
    issue_scores<M, kHeadDim>(scores, q, keys);
    wgmma_wait<1>();
    add_part(o, sum, 0, factor);
    add_parts<kHeadDim>(o, sum, weights, values, 1, factor);
    wgmma_wait<0>();
  } else {
    warpgroup_fence_operand(o);
    wgmma_fence();
    issue_scores<M, kHeadDim>(scores, q, keys);
    issue_output<M, kHeadDim>(o, weights, values);
    wgmma_wait<1>();
  }
}

// Joins the halves of a joint unit, and writes the results of 16 rows.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void finish_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit, const Destination& to,
                                             bool joint, float (&o)[kHeadDim / 2],
                                             SoftmaxState (&state)[2]) {
  const int first_row = c.warp * kWarpRows;
  if constexpr (Shape<kHeadDim>::kJoint) {
    if (joint) {
      join_halves(c, o, state);
      release_queries(c);
      const bool upper = c.s.sm_half == 1;
      write_rows<T, kHeadDim, kHeadDim / 16, kFp8, 2, kFp8>(
          c.p, unit, to, first_row, upper ? kHeadDim / 2 : 0, o, state, !upper);
      return;
    }
  }
  write_rows<T, kHeadDim, kHeadDim / 8, kFp8, 2, kFp8>(c.p, unit, to, first_row, 0, o, state, true);
}

// Up to 64 packed rows. The product of a tile's weights and values is issued with that of the next
// tile's keys. The source waits for it after that tile's softmax, but ptxas waits before, which is
// faster (docs/experiments/tiles.md, series 19); that of e4m3 is done before. Of a wide unit every
// second tile is in the other half's shared memory; of a joint one the other half attends to it.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit) {
  using M = std::conditional_t<kFp8, E4M3, T>;
  using S = Shape<kHeadDim>;
  using Tile = WgmmaTile<M, kHeadDim>;
  const ForwardParams& p = c.p;
  // Where V has a stage of its own: whether it is waited for before the tile's softmax, or after.
  constexpr bool kEarly = !Tile::kOneStage && S::kEarlyValues;
  constexpr bool kLate = !Tile::kOneStage && !kEarly;
  const int first_row = c.warp * kWarpRows;
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  float scores[32];
  uint32_t weights[Tile::kWeights];
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  [[maybe_unused]] float sum[32];  // see issue_part()
  float factor[2];
  std::conditional_t<kFp8, ScaledScores<kTransforms>, PlainScores> exponent{p};
  const Destination to = destination_of<kHeadDim, kDrafts>(p, c.s.control(), unit, first_row);
  const bool wide = __shfl_sync(~0u, static_cast<int>(unit.wide), 0);
  const bool joint = S::kJoint && __shfl_sync(~0u, static_cast<int>(unit.joint), 0);
  const int step = joint ? 2 * kTileTokens : kTileTokens;
  // Tokens from the current tile's first on.
  int left = __shfl_sync(~0u, unit.num_tokens, 0) - (joint ? c.s.sm_half * kTileTokens : 0);
  const MaskedTiles masked(unit);
  [[maybe_unused]] const int drafts = kDrafts != kNoDrafts ? drafts_below(p, unit) : 0;
  uint32_t row_masks[8];
  const auto mask = [&](float (&scores)[32]) {
    if (masked.has(left)) mask_scores<8>(scores, row_masks, first_row);
    if constexpr (kDrafts != kNoDrafts) {
      if (left < drafts) {
        mask_drafts<8, kDrafts>(p, scores, unit.member.query, unit.first_packed_row + first_row, 0,
                                left);
      }
    }
  };
  bool of_peer = wide && c.s.sm_half == 1;  // the current tile is in the other half's memory

  if (left > 0) {  // else it is a branch whose tails are all empty so far
    const Queries<kHeadDim> q = take_queries<M, T>(c, joint, exponent.unscale);
    // K of the current tile; its V, too, or else the next stage has that.
    auto stage = c.take_stage(of_peer);
    multiply_first_keys<M>(scores, q, stage.tile);
    if (masked.has(left)) read_row_masks<8>(row_masks, stage.row_masks);
    auto values = stage;
    if constexpr (!Tile::kOneStage) c.release(stage.empty);
    if constexpr (kEarly) values = c.take_stage(of_peer);
    softmax<8, kTransforms>(p, exponent, scores, row_max, row_sum, factor, 0, left, mask);
    pack_weights<M>(weights, scores);

    while (left > step) {
      left -= step;
      if constexpr (kLate) values = c.take_stage(of_peer);
      of_peer ^= wide;
      stage = c.take_stage(of_peer);
      auto next_values = stage;
      multiply_tile<M, kHeadDim>(scores, o, sum, weights, q, stage.tile, values.tile, factor);
      if constexpr (kFp8) c.release(values.empty);
      warpgroup_fence_operand(scores);
      if (masked.has(left)) read_row_masks<8>(row_masks, stage.row_masks);
      if constexpr (!Tile::kOneStage) c.release(stage.empty);
      if constexpr (kEarly) next_values = c.take_stage(of_peer);
      softmax<8, kTransforms>(p, exponent, scores, row_max, row_sum, factor, 0, left, mask);
      if constexpr (!kFp8) {
        wgmma_wait<0>();
        warpgroup_fence_operand(o);
        warpgroup_fence_operand(weights);
        c.release(values.empty);
      }
      pack_weights<M>(weights, scores);
      if constexpr (!kFp8) rescale_output(o, factor);
      values = next_values;
    }
    if constexpr (!S::kQInRegisters) release_queries(c);
    if constexpr (kLate) values = c.take_stage(of_peer);
    fence_async_proxy();
    if constexpr (kFp8) {
      add_parts<kHeadDim>(o, sum, weights, values.tile, 0, factor);
    } else {
      add_last_values<M, kHeadDim>(o, weights, values.tile);
    }
    c.release(values.empty);
  }

  SoftmaxState state[2];
  finish_states(exponent, row_max, row_sum, state);
  finish_wgmma<T, kFp8>(c, unit, to, joint, o, state);
}

#endif  // PAT_WGMMA

}  // namespace pat
