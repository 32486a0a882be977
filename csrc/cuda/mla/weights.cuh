// SPDX-License-Identifier: Apache-2.0
// Online softmax of MLA. Its weights are as in lazy_softmax.cuh; but the warps that weigh do not
// hold the output, so they tell the others what its rows are to be multiplied with.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>

#include "cuda/forward/softmax.cuh"

namespace pat::mla {

#if PAT_WGMMA

// The softmax of a lane's two rows, lane / 4 and lane / 4 + 8 of the warp's 16. A weight is
// 2^(logit - reference), with logits of base 2. The reference is the greatest logit of the row's
// first tile with tokens, and it is raised where the weights of a tile add up to too much: seldom.
class Weights {
 public:
  // `rows`: of the warp's 16, how many have queries. The others hold what was in the Q buffer
  // before. Their weights become 0 or NaN, which nobody reads, and they never ask for a higher
  // reference.
  __device__ __forceinline__ Weights(float scale, int rows) : scale_(scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool has_query = static_cast<int>(lane_id() >> 2) + 8 * r < rows;
      reference_[r] = has_query ? kNone : INFINITY;
      most_[r] = has_query ? __float_as_int(kMostSum) : INT_MAX;
    }
  }

  // Turns the scores of a tile into weights. Returns whether the output of the warp's rows so far
  // must be multiplied with `factor`. What becomes of a row depends on no other row.
  __device__ __forceinline__ bool weigh_tile(uint32_t (&weights)[16], const float (&scores)[32],
                                             float (&factor)[2]) {
    factor[0] = factor[1] = 1.0f;
    float sum[2];
    Rows exceeding{};
    bool raised = false;
    // A loop, so that its code is there once. Raising once is enough; twice might never end, where
    // logits are so great that the differences between them are rounding errors.
#pragma unroll 1
    for (bool raise = begins_;; raise = true) {
      if (raise) raise_rows(scores, exceeding, factor);
      weigh_scores(weights, scores, sum);
      if (raised) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) exceeding.of[r] = __float_as_int(sum[r]) > most_[r];
      raised = __any_sync(~0u, exceeding.of[0] || exceeding.of[1]);
      if (!raised) break;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += sum[r];
    return raised;
  }

  // Adds up the sums of the four lanes that hold a row, and gives the state of row r of the two.
  __device__ __forceinline__ SoftmaxState finish(int r) const {
    float sum = sum_[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return {reference_[r] == kNone ? -INFINITY : reference_[r], sum};
  }

 private:
  // What a lane's 16 weights of a row may add up to. They add up to at most 16 where no logit is
  // greater than the reference. Compared by bits, as integers, NaN exceeds it.
  static constexpr float kMostSum = 64.0f;
  // The reference of a row that has attended to no token yet.
  static constexpr float kNone = -FLT_MAX;

  struct Rows {
    bool of[2];
  };

  // Raises the references of those rows for which a lane asks, and of those without one, to the
  // tile's greatest logits, where these are greater. `factor` is multiplied with what the output
  // must be multiplied with; that of a row without a reference is 0 yet.
  __device__ __forceinline__ void raise_rows(const float (&scores)[32], const Rows& rows,
                                             float (&factor)[2]) {
    float m[2] = {-INFINITY, -INFINITY};
    find_max<8>(scores, m);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t lanes = __ballot_sync(~0u, rows.of[r] || reference_[r] == kNone);
      const uint32_t of_quad = lanes >> (lane_id() & 28) & 0xF;
      const float next = of_quad ? fmaxf(reference_[r], __fmul_rn(m[r], scale_)) : reference_[r];
      const float by = next == reference_[r] ? 1.0f : fast_exp2(reference_[r] - next);
      reference_[r] = next;
      sum_[r] *= by;
      factor[r] *= by;
    }
    begins_ = __any_sync(~0u, reference_[0] == kNone || reference_[1] == kNone);
  }

  __device__ __forceinline__ void weigh_scores(uint32_t (&weights)[16], const float (&scores)[32],
                                               float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i & 1;
      float w[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        w[j] = fast_exp2(fmaf(scores[2 * i + j], scale_, -reference_[r]));
      }
      const float pair = w[0] + w[1];  // first, so that they are waited for once
      sum[r] = i < 2 ? pair : sum[r] + pair;
      weights[i] = pack2<__nv_bfloat16>(w[0], w[1]);
    }
  }

  float scale_;         // makes logits of base 2 of scores
  float reference_[2];  // of a row
  float sum_[2] = {};   // of a row's weights in this lane's columns, of all tiles
  bool begins_ = true;  // a row of the warp may have no reference yet
  int most_[2];  // the bits of what a row's sum may be; no sum, not even NaN, exceeds INT_MAX
};

#endif  // PAT_WGMMA

}  // namespace pat::mla
