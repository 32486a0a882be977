// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with wgmma, on Hopper: heavy units and branches, which one half runs or,
// as joint units, both halves with every second tile each; and wide units, which both halves run
// with 64 rows each.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/epilogue.cuh"
#include "cuda/forward/join_halves.cuh"
#include "cuda/forward/raw_tile.cuh"
#include "cuda/forward/softmax.cuh"

namespace pat {

#if PAT_WGMMA

// A unit's Q where the products take it from. In registers: reading it from shared memory for every
// tile as well takes half of the bandwidth that the products need.
template <int kHeadDim, bool kInRegisters = Shape<kHeadDim>::kQInRegisters>
struct Queries {
  uint32_t parts[kHeadDim / 4];
  __device__ __forceinline__ const uint32_t* step(int i) const { return parts + 4 * i; }
};
template <int kHeadDim>
struct Queries<kHeadDim, false> {
  uint64_t operand;
  __device__ __forceinline__ uint64_t step(int i) const {
    return operand + (((i >> 2) * Shape<kHeadDim>::kPanelBytes + (i & 3) * 32) >> 4);
  }
};

// Issues scores = Q K^T of 64 rows and 64 tokens as one group.
template <typename T, int kHeadDim>
__device__ __forceinline__ void issue_scores(float (&scores)[32], const Queries<kHeadDim>& q,
                                             uint32_t k) {
  const uint64_t b = wgmma_operand(k, 0, 1024);
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    const uint32_t step = ((i >> 2) * Shape<kHeadDim>::kPanelBytes + (i & 3) * 32) >> 4;
    wgmma_scores<T>(scores, q.step(i), b + step, i > 0);
  }
  wgmma_commit();
}

// This warp's 16 rows of a Q buffer.
template <int kHeadDim>
__device__ __forceinline__ void load_queries(uint32_t (&q)[kHeadDim / 4], uint32_t buffer,
                                             int warp) {
  const int lane = lane_id();
  const uint32_t low = lane & 7;
  const uint32_t row = (warp * 16 + low + ((lane >> 3) & 1) * 8) * 128;
  const uint32_t chunk = ((lane >> 4) ^ low) << 4;
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    uint32_t part[4];
    load_matrix(part,
                buffer + (i >> 2) * Shape<kHeadDim>::kPanelBytes + row + (chunk ^ ((i & 3) << 5)));
#pragma unroll
    for (int j = 0; j < 4; ++j) q[4 * i + j] = part[j];
  }
}

// Makes a Q buffer the operand of products of fp16. All threads of the half do, each with the
// chunks of 16 bytes from its own on.
template <typename T, int kHeadDim>
__device__ __forceinline__ void narrow_queries(uint32_t buffer, int thread) {
#pragma unroll 4
  for (int i = thread; i < kTileRows * kHeadDim / 8; i += kConsumers) {
    uint4 x = load_shared4(buffer + 16 * i);
    x = {to_half2<T>(x.x), to_half2<T>(x.y), to_half2<T>(x.z), to_half2<T>(x.w)};
    store_shared4(buffer + 16 * i, x);
  }
}

template <int kHeadDim, bool kTransforms, bool kDrafts>
__device__ __forceinline__ void release_queries(Consumer<kHeadDim, kTransforms, kDrafts>& c) {
  c.release(c.q.empty(c.s.base));
  c.q.advance(c.p.q_buffers);
}

// Takes the next unit's Q: into registers, whose buffer is released then unless `keep`, or as an
// operand in its buffer. release_queries() releases what is not released here.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, bool kDrafts>
__device__ __forceinline__ Queries<kHeadDim> take_queries(
    Consumer<kHeadDim, kTransforms, kDrafts>& c, bool keep) {
  c.q.wait_full(c.s.base);
  const uint32_t buffer = c.s.q(c.q.index);
  Queries<kHeadDim> q;
  if constexpr (Shape<kHeadDim>::kQInRegisters) {
    load_queries<kHeadDim>(q.parts, buffer, c.warp);
    if constexpr (kFp8) {
#pragma unroll
      for (uint32_t& pair : q.parts) pair = to_half2<T>(pair);
    }
    if (!keep) release_queries(c);
  } else {
    if constexpr (kFp8 && !std::is_same_v<T, __half>) {
      narrow_queries<T, kHeadDim>(buffer, 32 * c.warp + lane_id());
      fence_async_proxy();
      c.sync();
    }
    q.operand = wgmma_operand(buffer, 0, 1024);
  }
  return q;
}

// Issues o += P V as one group.
template <typename T, int kHeadDim, int kCount>
__device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                             const uint32_t (&weights)[kCount], uint32_t v) {
  const uint64_t b = wgmma_operand(v, Shape<kHeadDim>::kPanelBytes, 1024);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    wgmma_output<T>(o, weights + 4 * i, b + i * (2048 >> 4));
  }
  wgmma_commit();
}

template <typename T, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kCount],
                                             const float (&scores)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) weights[i] = pack2<T>(scores[2 * i], scores[2 * i + 1]);
}

// o += P V, when no other product is under way.
template <typename T, int kHeadDim>
__device__ __forceinline__ void add_last_values(float (&o)[kHeadDim / 2], uint32_t (&weights)[16],
                                                uint32_t v) {
  fence_async_proxy();
  warpgroup_fence_operand(weights);
  warpgroup_fence_operand(o);
  wgmma_fence();
  issue_output<T, kHeadDim>(o, weights, v);
  wgmma_wait<0>();
  warpgroup_fence_operand(o);
}

// Up to 64 packed rows. The softmax of a tile runs at the same time as the product of the
// previous tile's weights and values. Of a wide unit every second tile is in the other half's
// shared memory; of a joint one the other half attends to it.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, bool kDrafts>
__device__ __forceinline__ void attend_wgmma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                             const WorkUnit& unit) {
  using M = Operand<T, kFp8>;
  using S = Shape<kHeadDim>;
  const ForwardParams& p = c.p;
  const int first_row = c.warp * kWarpRows;
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  float scores[32];
  uint32_t weights[16];
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  float factor[2];
  const Destination to = destination_of<kDrafts>(p, c.s.control(), unit, first_row);
  const bool wide = __shfl_sync(~0u, static_cast<int>(unit.wide), 0);
  const bool joint = S::kJoint && __shfl_sync(~0u, static_cast<int>(unit.joint), 0);
  const int step = joint ? 2 * kTileTokens : kTileTokens;
  // Tokens from the current tile's first on.
  int left = __shfl_sync(~0u, unit.num_tokens, 0) - (joint ? c.s.sm_half * kTileTokens : 0);
  const MaskedTiles masked(unit);
  [[maybe_unused]] const int drafts = kDrafts ? drafts_below(p, unit) : 0;
  uint32_t row_masks[8];
  const auto mask = [&](float (&scores)[32]) {
    if (masked.has(left)) mask_scores<8>(scores, row_masks, first_row);
    if constexpr (kDrafts) {
      if (left < drafts) mask_drafts<8>(p, scores, unit.first_packed_row + first_row, 0, left);
    }
  };
  bool of_peer = wide && c.s.sm_half == 1;  // the current tile is in the other half's memory

  if (left > 0) {  // else it is a branch whose tails are all empty so far
    const Queries<kHeadDim> q = take_queries<T, kFp8>(c, joint);
    auto keys = c.take_stage(of_peer);
    fence_async_proxy();
    warpgroup_fence_operand(scores);
    wgmma_fence();
    issue_scores<M, kHeadDim>(scores, q, keys.tile);
    wgmma_wait<0>();
    warpgroup_fence_operand(scores);
    if (masked.has(left)) read_row_masks<8>(row_masks, keys.row_masks);
    c.release(keys.empty);
    softmax<8, kTransforms>(p, scores, row_max, row_sum, factor, 0, left, mask);
    pack_weights<M>(weights, scores);

    while (left > step) {
      left -= step;
      const auto values = c.take_stage(of_peer);
      of_peer ^= wide;
      keys = c.take_stage(of_peer);
      fence_async_proxy();
      warpgroup_fence_operand(scores);
      warpgroup_fence_operand(weights);
      warpgroup_fence_operand(o);
      wgmma_fence();
      issue_scores<M, kHeadDim>(scores, q, keys.tile);
      issue_output<M, kHeadDim>(o, weights, values.tile);
      wgmma_wait<1>();
      warpgroup_fence_operand(scores);
      if (masked.has(left)) read_row_masks<8>(row_masks, keys.row_masks);
      c.release(keys.empty);
      softmax<8, kTransforms>(p, scores, row_max, row_sum, factor, 0, left, mask);
      wgmma_wait<0>();
      warpgroup_fence_operand(o);
      warpgroup_fence_operand(weights);
      c.release(values.empty);
      pack_weights<M>(weights, scores);
      rescale_output(o, factor);
    }
    if constexpr (!S::kQInRegisters) release_queries(c);
    const auto values = c.take_stage(of_peer);
    add_last_values<M, kHeadDim>(o, weights, values.tile);
    c.release(values.empty);
  }

  SoftmaxState state[2];
  finish_states(p, row_max, row_sum, state);
  if constexpr (S::kJoint) {
    if (joint) {
      join_halves(c, o, state);
      release_queries(c);
      const bool upper = c.s.sm_half == 1;
      write_rows<T, kHeadDim, kHeadDim / 16, kFp8>(p, unit, to, first_row, upper ? kHeadDim / 2 : 0,
                                                   o, state, !upper);
      return;
    }
  }
  write_rows<T, kHeadDim, kHeadDim / 8, kFp8>(p, unit, to, first_row, 0, o, state, true);
}

#endif  // PAT_WGMMA

}  // namespace pat
