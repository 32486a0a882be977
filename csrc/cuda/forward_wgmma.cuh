// SPDX-License-Identifier: Apache-2.0
// Units of 33 to 128 packed rows on Hopper: wgmma on one or two blocks of 64 rows.
#pragma once

#include "cuda/forward_softmax.cuh"

namespace pat {

#if PAT_WGMMA

// Issues S = Q K^T of one block of 64 rows and as many tokens as there are scores.
template <typename T, int kHeadDim, int kCount>
__device__ __forceinline__ void issue_scores(float (&scores)[kCount], uint32_t q, uint32_t k) {
  using S = Shape<kHeadDim>;
  const uint64_t a = wgmma_operand(q, 0, 1024);
  const uint64_t b = wgmma_operand(k, 0, 1024);
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    const uint32_t step = ((i >> 2) * S::kPanelBytes + (i & 3) * 32) >> 4;
    wgmma_scores<T>(scores, a + step, b + step, i > 0);
  }
}

// Issues O += P V.
template <typename T, int kHeadDim, int kCount>
__device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                             const uint32_t (&weights)[kCount], uint32_t v) {
  const uint64_t b = wgmma_operand(v, Shape<kHeadDim>::kPanelBytes, 1024);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    wgmma_output<T>(o, weights + 4 * i, b + i * (2048 >> 4));
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kCount],
                                             const float (&scores)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) weights[i] = pack2<T>(scores[2 * i], scores[2 * i + 1]);
}

// Up to 64 rows. While the softmax of a tile runs, the product of the previous tile's weights with
// its values does too.
template <typename T, int kHeadDim>
__device__ __forceinline__ void attend_wgmma(Consumer<kHeadDim>& c, const Unit& u) {
  const ForwardParams& p = c.p;
  const int q_buffer = c.q.index;
  const uint32_t q = c.s.q(q_buffer);
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  float scores[32];
  uint32_t weights[16];
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  float factor[2];
  const Destination to = destination_of(p, u, c.warp * 16);
  int left = __shfl_sync(~0u, u.tokens, 0);  // tokens from the tile at hand on

  barrier_wait(c.s.q_full(q_buffer), c.q.phase);
  c.q.advance(p.q_buffers);
  c.wait_stage();
  fence_async_proxy();
  pin(scores);
  wgmma_fence();
  issue_scores<T, kHeadDim>(scores, q, c.s.tile(c.stage.index));
  wgmma_commit();
  wgmma_wait<0>();
  pin(scores);
  c.release_stage(c.stage.index);
  c.stage.advance(p.stages);
  softmax<8>(p, scores, row_max, row_sum, factor, 0, left);
  pack_weights<T>(weights, scores);

  for (; left > kTileTokens; left -= kTileTokens) {
    c.wait_stage();
    const int value_stage = c.stage.index;
    c.stage.advance(p.stages);
    c.wait_stage();
    fence_async_proxy();
    pin(scores);
    pin(weights);
    pin(o);
    wgmma_fence();
    issue_scores<T, kHeadDim>(scores, q, c.s.tile(c.stage.index));
    wgmma_commit();
    issue_output<T, kHeadDim>(o, weights, c.s.tile(value_stage));
    wgmma_commit();
    wgmma_wait<1>();
    pin(scores);
    c.release_stage(c.stage.index);
    c.stage.advance(p.stages);
    softmax<8>(p, scores, row_max, row_sum, factor, 0, left - kTileTokens);
    wgmma_wait<0>();
    pin(o);
    pin(weights);
    c.release_stage(value_stage);
    pack_weights<T>(weights, scores);
    rescale_output(o, factor);
  }
  c.wait_stage();
  fence_async_proxy();
  pin(weights);
  pin(o);
  wgmma_fence();
  issue_output<T, kHeadDim>(o, weights, c.s.tile(c.stage.index));
  wgmma_commit();
  wgmma_wait<0>();
  pin(o);
  c.release_stage(c.stage.index);
  c.stage.advance(p.stages);

  c.release(c.s.q_empty(q_buffer));
  SoftmaxState state[2];
  finish_states(p, row_max, row_sum, state);
  write_rows<T, kHeadDim, kHeadDim / 8>(p, u, to, c.warp * 16, 0, o, state, true);
}

#endif  // PAT_WGMMA

}  // namespace pat
