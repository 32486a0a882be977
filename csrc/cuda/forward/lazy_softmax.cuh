// SPDX-License-Identifier: Apache-2.0
// Online softmax of the units that wgmma runs with K and V of 16 bits: its reference is raised only
// where a tile's weights grow too great.
#pragma once

#include "cuda/forward/softmax.cuh"

namespace pat {

#if PAT_WGMMA

// The softmax of a lane's two rows. A weight is 2^(logit - reference), with logits of base 2. Any
// reference gives the same output, as long as no weight overflows and the great ones do not vanish.
// So it need not be the greatest logit so far, which FlashAttention-2 (equation 4) takes: of the
// first tile it is, and it stays until the weights of a tile add up to more than kMostOfTile. Then
// no tile but the first has to look for its greatest logit, nor to multiply the output. Weights of
// up to kMostOfTile are as exact as those of up to 1, in bf16 and in fp16.
class LazySoftmax {
 public:
  // `rows`: of the warp's 16, how many have queries. The others hold what was in the Q buffer
  // before. Their weights become 0, or they would decide whether the warp raises its references,
  // and so the bits of the output.
  __device__ __forceinline__ LazySoftmax(float scale, int rows) : scale_(scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool has_query = static_cast<int>(lane_id() >> 2) + 8 * r < rows;
      reference_[r] = has_query ? -INFINITY : INFINITY;
    }
  }

  // Adds up the sums of the four lanes that hold a row, and gives the state of this lane's rows.
  __device__ __forceinline__ void finish(SoftmaxState (&state)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
      state[r] = {reference_[r], sum_[r]};
    }
  }

  // Turns the scores of a tile into weights. No product with `o` is under way. What becomes of a
  // row depends on no other row.
  template <typename M, int kCount>
  __device__ __forceinline__ void weigh_tile(uint32_t (&weights)[16], const float (&scores)[32],
                                             float (&o)[kCount]) {
    // Rows to raise. One without a reference has attended to no token yet.
    bool rows[2] = {reference_[0] == -INFINITY, reference_[1] == -INFINITY};
    bool raised = __any_sync(~0u, rows[0] || rows[1]);
    // A loop, so that the code of weigh() is there once.
    for (bool tested = false;; tested = true) {
      if (raised) raise(scores, o, rows);
      weigh<M>(weights, scores);
      // Raising a row for its sum once is enough. Twice might never end, where logits are so great
      // that the differences between them are rounding errors.
      if (tested) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[r] = tile_sum_[r] > kMostOfTile;
      raised = __any_sync(~0u, rows[0] || rows[1]);
      if (!raised) break;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += tile_sum_[r];
  }

 private:
  // The sum of a lane's 16 weights of a row. It is at most 16 where no logit is greater than the
  // reference.
  static constexpr float kMostOfTile = 64.0f;

  // Raises the references of those rows for which a lane asks to the tile's greatest logits, where
  // those are greater. A row without a reference has no output yet, so at a unit's first tile the
  // output is not multiplied.
  template <int kCount>
  __device__ __forceinline__ void raise(const float (&scores)[32], float (&o)[kCount],
                                        const bool (&rows)[2]) {
    float m[2] = {-INFINITY, -INFINITY}, factor[2];
    const bool has_output =
        (rows[0] && reference_[0] != -INFINITY) || (rows[1] && reference_[1] != -INFINITY);
    find_max<8>(scores, m);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t of_quad = __ballot_sync(~0u, rows[r]) >> (lane_id() & 28) & 0xF;
      const float next = of_quad ? fmaxf(reference_[r], __fmul_rn(m[r], scale_)) : reference_[r];
      factor[r] = next == reference_[r] ? 1.0f : fast_exp2(reference_[r] - next);
      reference_[r] = next;
      sum_[r] *= factor[r];
    }
    if (__any_sync(~0u, has_output)) rescale_output(o, factor);
  }

  template <typename M>
  __device__ __forceinline__ void weigh(uint32_t (&weights)[16], const float (&scores)[32]) {
    float base[2], sums[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = reference_[r] == -INFINITY ? 0.0f : reference_[r];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float w[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        w[j] = fast_exp2(fmaf(scores[2 * i + j], scale_, -base[i & 1]));
        sums[i & 1][j] += w[j];
      }
      weights[i] = pack2<M>(w[0], w[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) tile_sum_[r] = sums[r][0] + sums[r][1];
  }

  float scale_;         // makes logits of base 2 of scores
  float reference_[2];  // of a row
  float sum_[2] = {};   // of a row's weights in this lane's columns, of all tiles
  float tile_sum_[2];   // of the current tile
};

#endif  // PAT_WGMMA

}  // namespace pat
