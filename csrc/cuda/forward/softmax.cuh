// SPDX-License-Identifier: Apache-2.0
// Online softmax in registers, as all consumers of the forward kernel have it.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Which tiles of a unit hold tokens that not all of its rows attend to: those of a branch, but for
// the first or last ones.
struct MaskedTiles {
  int above, below;  // tokens from such a tile on

  __device__ __forceinline__ explicit MaskedTiles(const Unit& u) {
    const int free = __shfl_sync(~0u, u.batch_row, 0) * kTileTokens;
    above = __shfl_sync(~0u, u.branch, 0) ? max(-free, 0) : INT_MAX;
    below = __shfl_sync(~0u, u.tokens, 0) + kTileTokens - max(free, 0);
  }
  // Of the tile that `left` tokens are left from.
  __device__ __forceinline__ bool has(int left) const { return left > above && left < below; }
};

// Which packed rows attend to the tokens of a branch's tile: of each 8 tokens the lane's two, as
// BranchList::rows has them.
template <int kTiles>
__device__ __forceinline__ void read_seen(uint32_t (&seen)[kTiles], uint32_t rows) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) seen[i] = load_shared(rows + 4 * (lane_id() & 3) + 16 * i);
}

// Hides from rows lane / 4 and lane / 4 + 8, of those from `first_row` on, what they do not attend
// to.
template <int kTiles>
__device__ __forceinline__ void hide_others(float (&s)[4 * kTiles], const uint32_t (&seen)[kTiles],
                                            int first_row) {
  const uint32_t row = first_row + (lane_id() >> 2);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t first = (seen[i] >> (16 * c)) & 0xFF;
      const uint32_t count = (seen[i] >> (16 * c + BranchList::kRowsCount)) & 0xFF;
      if (row - first >= count) s[4 * i + c] = -INFINITY;
      if (row + 8 - first >= count) s[4 * i + 2 + c] = -INFINITY;
    }
  }
}

// Online softmax over one tile of scores: lane holds rows lane / 4 and lane / 4 + 8 in mma layout.
// Turns scores into weights, updates max and sum (of this lane's columns), and gives the factors
// that the output so far is to be multiplied with. Calls hide(scores) for the logits that no weight
// shall come of, beyond those of tokens that are not there.
template <int kTiles, bool kTransforms, typename Hide>
__device__ __forceinline__ void softmax(const ForwardParams& p, float (&s)[4 * kTiles],
                                        float (&row_max)[2], float (&row_sum)[2],
                                        float (&factor)[2], int first_token, int tokens,
                                        const Hide& hide) {
  const int column = first_token + 2 * (lane_id() & 3);
  if constexpr (kTransforms) {
    const bool capped = p.logits == kCapped;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      s[i] *= p.pre_scale;
      // tanh(x) = 1 - 2 / (exp(2 x) + 1)
      const float tanh = 1.0f - __fdividef(2.0f, exp2_approx(fminf(s[i], 64.0f)) + 1.0f);
      s[i] = capped ? p.cap * tanh : s[i];
    }
  }
  hide(s);
  if (first_token + 8 * kTiles > tokens) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      if (column + (i >> 2) * 8 + (i & 1) >= tokens) s[i] = -INFINITY;
    }
  }
  // The two rows side by side: neither waits for the other's shuffles.
  float m[2] = {row_max[0], row_max[1]};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) m[r] = fmaxf(m[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other[2] = {__shfl_xor_sync(~0u, m[0], step), __shfl_xor_sync(~0u, m[1], step)};
    m[0] = fmaxf(m[0], other[0]);
    m[1] = fmaxf(m[1], other[1]);
  }
  float base[2], sum[2][2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    base[r] = m[r] == -INFINITY ? 0.0f : m[r] * p.scale;
    factor[r] = exp2_approx(fmaf(row_max[r], p.scale, -base[r]));
    row_max[r] = m[r];
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = s[4 * i + j];
      x = exp2_approx(fmaf(x, p.scale, -base[j / 2]));
      sum[j / 2][j % 2] += x;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) row_sum[r] = row_sum[r] * factor[r] + (sum[r][0] + sum[r][1]);
}

template <int kCount>
__device__ __forceinline__ void rescale_output(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[(i >> 1) & 1];
}

// Adds the four lanes' sums and gives the state of this lane's rows.
__device__ __forceinline__ void finish_states(const ForwardParams& p, const float (&row_max)[2],
                                              float (&row_sum)[2], SoftmaxState (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    state[r] = {row_max[r] == -INFINITY ? -INFINITY : row_max[r] * p.scale, row_sum[r]};
  }
}

}  // namespace pat
