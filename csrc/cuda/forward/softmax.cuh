// SPDX-License-Identifier: Apache-2.0
// Online softmax of a tile in registers, and the mask of a branch. All consumers use it but those
// of lazy_softmax.cuh, which take only its masks and maximum. A lane holds rows lane / 4 and lane /
// 4 + 8 of 16 rows, as mma.sync and wgmma lay out their results.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Which tiles of a unit need a mask, because some of its rows do not attend to some of their
// tokens: those of a branch, except for the first ones or the last ones.
struct MaskedTiles {
  int above, below;  // such a tile has more than `above` and fewer than `below`
                     // tokens left

  __device__ __forceinline__ explicit MaskedTiles(const WorkUnit& unit) {
    const int unmasked = __shfl_sync(~0u, unit.unmasked_tiles, 0) * kTileTokens;
    const bool last = __shfl_sync(~0u, unit.order == BranchOrder::kUnmaskedLast, 0);
    above = !__shfl_sync(~0u, unit.is_branch(), 0) ? INT_MAX : last ? unmasked : 0;
    below = __shfl_sync(~0u, unit.num_tokens, 0) + kTileTokens - (last ? 0 : unmasked);
  }
  // `left`: tokens from the tile's first on.
  __device__ __forceinline__ bool has(int left) const { return left > above && left < below; }
};

// Tiles of a unit with fewer tokens left than this one gives hold draft tokens that only some of
// its rows attend to.
__device__ __forceinline__ int drafts_below(const ForwardParams& p, const WorkUnit& unit) {
  return __shfl_sync(~0u, unit.has_drafts(), 0) ? p.masked_tokens + kTileTokens : 0;
}

// Draft masks of a lane's two rows, `row` and row + 8, of a query.
struct DraftMasks {
  uint64_t of_row[2];

  __device__ __forceinline__ DraftMasks(const ForwardParams& p, int query, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Rows beyond the query's are not used.
      const int draft_token = (row + 8 * i) * p.head_group_magic >> 16;
      of_row[i] =
          __ldg(p.draft_masks + query * (p.masked_tokens + 1) + min(draft_token, p.masked_tokens));
    }
  }
  // Whether row i of the two attends to a draft token; to the first and what is before it, always.
  __device__ __forceinline__ bool attends(int i, int draft_token) const {
    return draft_token <= 0 || (of_row[i] >> (draft_token & 63) & 1);
  }
};

// Sets the scores of draft tokens that a row does not attend to to -inf: those after its own, or
// those that its draft mask leaves out. `query`: of the unit; `first_row`: packed row of the query
// that is row 0 of the 16; `left`: tokens from the tile's first on, of which the scores begin at
// token `first_token`.
template <int kTiles, Drafts kDrafts>
__device__ __forceinline__ void mask_drafts(const ForwardParams& p, float (&scores)[4 * kTiles],
                                            int query, int first_row, int first_token, int left) {
  const int row = first_row + (lane_id() >> 2);
  // Column c is draft token c + first_draft; before the first draft token that is negative.
  const int first_draft = first_token + 2 * (lane_id() & 3) - (left - 1 - p.masked_tokens);
  if constexpr (kDrafts == kTrees) {
    const DraftMasks masks(p, query, row);
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      if (!masks.attends(i >> 1 & 1, first_draft + (i >> 2) * 8 + (i & 1))) scores[i] = -INFINITY;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int first_attending = (first_draft + (i >> 2) * 8 + (i & 1)) * p.head_group;
      if (row + (i & 2) * 4 < first_attending) scores[i] = -INFINITY;
    }
  }
}

// Reads the row masks of a tile's tokens: of each 8 tokens the lane's two, in one word.
template <int kTiles>
__device__ __forceinline__ void read_row_masks(uint32_t (&row_masks)[kTiles], uint32_t from) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) row_masks[i] = load_shared(from + 4 * (lane_id() & 3) + 16 * i);
}

// Sets the scores of tokens that a row does not attend to to -inf. `first_row`: packed row of the
// branch that is row 0 of the 16.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&scores)[4 * kTiles],
                                            const uint32_t (&row_masks)[kTiles], int first_row) {
  const uint32_t row = first_row + (lane_id() >> 2);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t first = (row_masks[i] >> (16 * c)) & 0xFF;
      const uint32_t count = (row_masks[i] >> (16 * c + kRowCountShift)) & 0xFF;
      if (row - first >= count) scores[4 * i + c] = -INFINITY;
      if (row + 8 - first >= count) scores[4 * i + 2 + c] = -INFINITY;
    }
  }
}

// Sets the scores of tokens beyond the last of a unit to -inf. `tokens`: how many are left, from
// the tile's first on, of which the scores begin at token `first_token`.
template <int kTiles>
__device__ __forceinline__ void mask_tail(float (&scores)[4 * kTiles], int first_token,
                                          int tokens) {
  if (first_token + 8 * kTiles <= tokens) return;
  const int column = first_token + 2 * (lane_id() & 3);
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    if (column + (i >> 2) * 8 + (i & 1) >= tokens) scores[i] = -INFINITY;
  }
}

// Turns q . k into logits where more than a factor is needed: scaled, or capped with tanh.
template <int kCount>
__device__ __forceinline__ void transform_logits(const ForwardParams& p, float (&scores)[kCount]) {
  const bool capped = p.logits == kCapped;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] *= p.pre_scale;
    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
    const float tanh = 1.0f - __fdividef(2.0f, fast_exp2(fminf(scores[i], 64.0f)) + 1.0f);
    scores[i] = capped ? p.cap * tanh : scores[i];
  }
}

// How scores become weights: a weight is 2^(factor * (score - reference)), of logits or, if only a
// factor makes them logits, of q . k. This one is for weights of fp16 or bf16, for mma.sync:
// the reference is the greatest score of the row so far.
struct PlainScores {
  static constexpr bool kOfTile = false;
  static constexpr float kShift = 0.0f;
  const ForwardParams& p;

  __device__ __forceinline__ float factor(int) const { return p.exp_scale; }
  template <int kCount>
  __device__ __forceinline__ void restore(float (&)[kCount]) const {}
};

// For weights in e4m3, of which those below 2^-18 of the greatest become 0. So the reference is the
// greatest score of the tile, not of the row: else a token with most of the weight, as the first
// one of a text often is, would make those of a long text vanish, which are many. kShift lets them
// use the whole range of e4m3. `unscale`: what the scores of the lane's two rows must be multiplied
// with, because split_queries() has scaled the queries.
template <bool kTransforms>
struct ScaledScores {
  static constexpr bool kOfTile = true;
  static constexpr float kShift = 8.0f;
  // The reference is no further than that below the greatest logit of the row, base 2, so that the
  // output so far, which is multiplied by up to 2^kMostBelow, stays finite.
  static constexpr float kMostBelow = 40.0f;
  const ForwardParams& p;
  float unscale[2] = {1.0f, 1.0f};
  float greatest[2] = {-INFINITY, -INFINITY};  // logits of the lane's rows, base 2

  __device__ __forceinline__ float factor(int r) const {
    return kTransforms ? p.exp_scale : p.exp_scale * unscale[r];
  }
  // Before other logits are made of the scores.
  template <int kCount>
  __device__ __forceinline__ void restore(float (&scores)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] *= unscale[(i >> 1) & 1];
  }
  // The reference of a tile whose greatest logit is `logit`.
  __device__ __forceinline__ float reference(int r, float logit) {
    greatest[r] = fmaxf(greatest[r], logit);
    return fmaxf(logit, greatest[r] - kMostBelow);
  }
};

// Gives the greatest of `m` and the scores, of each of the lane's rows.
template <int kTiles>
__device__ __forceinline__ void find_max(const float (&scores)[4 * kTiles], float (&m)[2]) {
  // The two rows are interleaved, so that neither waits for the other's shuffles.
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = fmaxf(m[r], fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other[2] = {__shfl_xor_sync(~0u, m[0], step), __shfl_xor_sync(~0u, m[1], step)};
    m[0] = fmaxf(m[0], other[0]);
    m[1] = fmaxf(m[1], other[1]);
  }
}

// Online softmax over one tile of scores, whose first column is token `first_token` of the `tokens`
// that are left. Turns scores into weights, updates each row's max and sum (the sum only over this
// lane's columns), and gives the factors that the output so far must be multiplied with. `row_max`:
// of scores or, where Exponent::kOfTile, the reference of the weights, a logit of base 2.
// `mask(scores)` sets masked logits to -inf; tokens beyond the last are masked here.
template <int kTiles, bool kTransforms, typename Exponent, typename Mask>
__device__ __forceinline__ void softmax(const ForwardParams& p, Exponent& exponent,
                                        float (&scores)[4 * kTiles], float (&row_max)[2],
                                        float (&row_sum)[2], float (&factor)[2], int first_token,
                                        int tokens, const Mask& mask) {
  if constexpr (kTransforms) {
    exponent.restore(scores);
    transform_logits(p, scores);
  }
  mask(scores);
  mask_tail<kTiles>(scores, first_token, tokens);
  constexpr bool kOfTile = Exponent::kOfTile;
  float m[2] = {kOfTile ? -INFINITY : row_max[0], kOfTile ? -INFINITY : row_max[1]};
  find_max<kTiles>(scores, m);
  float base[2], sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (kOfTile) {
      const float reference = exponent.reference(r, m[r] * exponent.factor(r));
      base[r] = reference == -INFINITY ? 0.0f : reference;
      factor[r] = fast_exp2(row_max[r] - base[r]);
      row_max[r] = reference;
      base[r] -= Exponent::kShift;
    } else {
      // Both products are rounded by themselves, so that an unchanged maximum gives exactly 1: with
      // fmaf the error would have the same sign in each tile.
      base[r] = m[r] == -INFINITY ? 0.0f : __fmul_rn(m[r], exponent.factor(r));
      factor[r] = fast_exp2(__fmul_rn(row_max[r], exponent.factor(r)) - base[r]);
      row_max[r] = m[r];
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* x = scores + 4 * i + 2 * r;
      x[0] = fast_exp2(fmaf(x[0], exponent.factor(r), -base[r]));
      x[1] = fast_exp2(fmaf(x[1], exponent.factor(r), -base[r]));
      const float pair = x[0] + x[1];  // first, so that they are waited for once
      sum[r] = i == 0 ? pair : sum[r] + pair;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) row_sum[r] = row_sum[r] * factor[r] + sum[r];
}

template <int kCount>
__device__ __forceinline__ void rescale_output(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[(i >> 1) & 1];
}

// Adds up the sums of the four lanes that hold a row, and gives the state of this lane's rows.
template <typename Exponent>
__device__ __forceinline__ void finish_states(const Exponent& exponent, const float (&row_max)[2],
                                              float (&row_sum)[2], SoftmaxState (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    const float max = Exponent::kOfTile ? row_max[r] : row_max[r] * exponent.factor(r);
    state[r] = {row_max[r] == -INFINITY ? -INFINITY : max - Exponent::kShift, row_sum[r]};
  }
}

}  // namespace pat
