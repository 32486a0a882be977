// SPDX-License-Identifier: Apache-2.0
// Online softmax of the units that wgmma runs with K and V of 16 bits: its reference is raised only
// where a tile's weights grow too great.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>

#include "cuda/forward/softmax.cuh"

namespace pat {

#if PAT_WGMMA

// The softmax of a lane's two rows. A weight is 2^(logit - reference), with logits of base 2. Any
// reference gives the same output, as long as no weight overflows and the great ones do not vanish.
// So it need not be the greatest logit so far, which FlashAttention-2 (equation 4) takes: of the
// first tile it is, and it stays until the weights of a tile grow beyond kMostWeight. Then no tile
// but the first has to look for its greatest logit, nor to multiply the output. Weights of up to
// kMostWeight are as exact as those of up to 1, in bf16 and in fp16.
//
// From the last exponential of a tile to the next products no other work hides what a warp waits
// for. So there is one vote of the warp between them, which tells both that no reference must be
// raised and that the caller is ready (docs/lessons.md).
class LazySoftmax {
 public:
  // `rows`: of the warp's 16, how many have queries. The others hold what was in the Q buffer
  // before, so that their scores may be anything. Their weights become 0 or NaN, which nobody
  // reads. They never ask for a higher reference: where they hold NaN, the warp would raise and
  // weigh again in every tile.
  __device__ __forceinline__ LazySoftmax(float scale, int rows) : scale_(scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool has_query = static_cast<int>(lane_id() >> 2) + 8 * r < rows;
      reference_[r] = has_query ? kNone : INFINITY;
      most_[r] = has_query ? __float_as_int(kMostWeight) : INT_MAX;
    }
  }

  // To call before each weigh_tile(), while products run. `ready`: whether the caller can go on
  // right after it.
  __device__ __forceinline__ void prepare(bool ready) {
    raises_first_ = computed_here(begins_);
#pragma unroll
    for (int r = 0; r < 2; ++r) limit_[r] = ready ? most_[r] : INT_MIN;
  }

  // Adds up the sums of the four lanes that hold a row, and gives the state of this lane's rows.
  __device__ __forceinline__ void finish(SoftmaxState (&state)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
      state[r] = {reference_[r] == kNone ? -INFINITY : reference_[r], sum_[r]};
    }
  }

  // Turns the scores of a tile into weights. No product with `o` is under way. What becomes of a
  // row depends on no other row. Calls `get_ready` at the end and returns its result if the caller
  // was not ready, or if weights are still too great after raising; else returns true. So it must
  // do no harm to a caller that is ready.
  template <typename M, int kCount, typename GetReady>
  __device__ __forceinline__ bool weigh_tile(uint32_t (&weights)[16], const float (&scores)[32],
                                             float (&o)[kCount], const GetReady& get_ready) {
    bool tested = false, ready = true, rows[2] = {};  // rows: those whose weights are too great
    // With goto, because a loop would be entered at its test whether to raise: that took 2 % of the
    // time of long units.
    if (!raises_first_) goto weigh;
  raise:
    raise_rows(scores, o, rows);
  weigh:
    weigh_scores<M>(weights, scores);
    if (__any_sync(~0u, exceeds(0, limit_[0]) || exceeds(1, limit_[1]))) {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[r] = exceeds(r, most_[r]);
      // Raising a row for its weights once is enough. Twice might never end, where logits are so
      // great that the differences between them are rounding errors.
      if (!tested && __any_sync(~0u, rows[0] || rows[1])) {
        tested = true;
        goto raise;
      }
      ready = get_ready();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += tested_sum_[r] + last_sum_[r];
    return ready;
  }

 private:
  // Of a lane's 16 weights of a row: what the first 14 may add up to, and each of the last two may
  // be. The first 14 add up to at most 14 where no logit is greater than the reference.
  static constexpr float kMostWeight = 64.0f;
  static constexpr float kMostExponent = 6.0f;  // log2(kMostWeight)
  // The reference of a row that has attended to no token yet.
  static constexpr float kNone = -FLT_MAX;

  // Sums are compared by their bits, as integers. Those of floats that are not negative have the
  // same order, and NaN (0x7FFFFFFF) exceeds every limit but INT_MAX. As a float NaN would exceed
  // none, and a caller that is not ready would go on. The last two weights are compared by their
  // exponents, which are there earlier.
  __device__ __forceinline__ bool exceeds(int r, int limit) const {
    return __float_as_int(tested_sum_[r]) > limit || last_exponent_[r] > kMostExponent;
  }

  // Raises the references of those rows for which a lane asks, and of those without one, to the
  // tile's greatest logits, where these are greater. A row without a reference has no output yet,
  // so at a unit's first tile the output is not multiplied.
  template <int kCount>
  __device__ __forceinline__ void raise_rows(const float (&scores)[32], float (&o)[kCount],
                                             const bool (&rows)[2]) {
    float m[2] = {-INFINITY, -INFINITY}, factor[2];
    bool has_output = false;
    find_max<8>(scores, m);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool begins = reference_[r] == kNone;
      has_output = has_output || (rows[r] && !begins);
      const uint32_t lanes = __ballot_sync(~0u, rows[r] || begins);
      const uint32_t of_quad = lanes >> (lane_id() & 28) & 0xF;
      const float next = of_quad ? fmaxf(reference_[r], __fmul_rn(m[r], scale_)) : reference_[r];
      factor[r] = next == reference_[r] ? 1.0f : fast_exp2(reference_[r] - next);
      reference_[r] = next;
      sum_[r] *= factor[r];
    }
    begins_ = __any_sync(~0u, reference_[0] == kNone || reference_[1] == kNone);
    if (__any_sync(~0u, has_output)) rescale_output(o, factor);
  }

  template <typename M>
  __device__ __forceinline__ void weigh_scores(uint32_t (&weights)[16], const float (&scores)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int r = i & 1;
      float exponent[2], w[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        exponent[j] = fmaf(scores[2 * i + j], scale_, -reference_[r]);
        w[j] = fast_exp2(exponent[j]);
      }
      const float pair = w[0] + w[1];  // first, so that they are waited for once
      if (i >= 14) {
        last_exponent_[r] = fmaxf(exponent[0], exponent[1]);
        last_sum_[r] = pair;
      } else {
        tested_sum_[r] = i < 2 ? pair : tested_sum_[r] + pair;
      }
      weights[i] = pack2<M>(w[0], w[1]);
    }
  }

  float scale_;         // makes logits of base 2 of scores
  float reference_[2];  // of a row
  float sum_[2] = {};   // of a row's weights in this lane's columns, of all tiles
  // Whether a row of the warp may have no reference yet, and the same as prepare() found it for the
  // tile that it was called for.
  bool begins_ = true, raises_first_;
  // The bits of what the sum of a row's weights may be, and the limit in the vote: the same, or
  // less than any sum if the caller is not ready. A row without a query has INT_MAX: no sum is
  // greater, not even NaN.
  int most_[2], limit_[2];
  // Of the current tile: the sum of all weights but the last two, that of these, and their greater
  // exponent.
  float tested_sum_[2], last_sum_[2], last_exponent_[2];
};

#endif  // PAT_WGMMA

}  // namespace pat
