// SPDX-License-Identifier: Apache-2.0
// Tiles of five and more packed rows, and of branches: vector lanes run along the packed rows, so
// that K and V enter as broadcast scalars and need no transposition, and softmax needs no reduction
// across lanes. Only forward_isa.cpp includes this.
#pragma once

#include "cpu/tile.h"

namespace pat::PAT_ISA {
namespace {

// Vectors x lanes packed rows. Memory: q [head_dim][kRows] | o [v_head_dim][kRows] | max [kRows] |
// sum [kRows]. Lanes without a row hold q = 0.
template <int L, int Vectors>
class RowLanesTile {
 public:
  static constexpr int kRows = L * Vectors;

  RowLanesTile(const Shape& shape, float* memory)
      : shape_(shape),
        q_(memory),
        o_(q_ + shape.head_dim * kRows),
        max_(o_ + shape.v_head_dim * kRows),
        sum_(max_ + kRows) {}

  static int64_t size(const Shape& shape) {
    return kRows * (static_cast<int64_t>(shape.head_dim) + shape.v_head_dim + 2);
  }

  // Starts with no tokens and no rows.
  void clear() {
    for (int64_t i = 0; i < size(shape_); ++i) q_[i] = 0.0f;
    for (int r = 0; r < kRows; ++r) max_[r] = -INFINITY;
  }

  // Element j of a row stands at [j * kRows].
  float* q(int row) { return q_ + row; }
  const float* o(int row) const { return o_ + row; }
  SoftmaxState state(int row) const { return {max_[row], sum_[row]}; }

  // Only the rows of [first, end) attend to the tokens. `scores` has room for
  // [kBlockTokens][kRows].
  void attend(const TokenRows<float>& tokens, float* scores, Prefetcher& ahead, int first = 0,
              int end = kRows) {
    for (int t = 0; t < tokens.count; t += kSteps) {
      ahead.step(kSteps);
      score(tokens, t, scores + t * kRows);
    }
    Vec<L> scale[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      scale[v] = weigh(tokens.count, v * L, scores + v * L, first, end);
    }
    // What is left to fetch is spread over the passes.
    const int step = kBlockTokens * kSteps / shape_.v_head_dim + 1;
    for (int j = 0; j < shape_.v_head_dim; j += kSteps) {
      ahead.step(step);
      add_values(tokens, j, scores, scale);
    }
  }

 private:
  // Scalars broadcast per step of a loop: with 32 vector registers 8 x 2 sums fit, with 16, 4 x 2.
  static constexpr int kSteps = kLanes == 16 || Vectors == 1 ? 8 : 4;

  // Logits of kSteps tokens, [kSteps][kRows].
  [[gnu::always_inline]] void score(const TokenRows<float>& tokens, int first,
                                    float* scores) const {
    const float* key[kSteps];
    Vec<L> sums[kSteps][Vectors] = {};
#pragma GCC unroll 8
    for (int t = 0; t < kSteps; ++t) key[t] = tokens.key(first + t);
    for (int j = 0; j < shape_.head_dim; ++j) {
      Vec<L> q[Vectors];
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) q[v] = load<L>(q_ + j * kRows + v * L);
#pragma GCC unroll 8
      for (int t = 0; t < kSteps; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sums[t][v] += key[t][j] * q[v];
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kSteps; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) store<L>(scores + t * kRows + v * L, sums[t][v]);
    }
  }

  // Turns the logits of L rows into weights, updates their states and returns the factor of their
  // outputs so far.
  Vec<L> weigh(int tokens, int row, float* scores, int first, int end) {
    const Vec<L> old_max = load<L>(max_ + row);
    Vec<L> new_max = old_max;
    const bool all = first <= row && end >= row + L;
    Vec<L> masked = {};
    for (int r = 0; r < L && !all; ++r) {
      if (row + r < first || row + r >= end) masked[r] = -INFINITY;
    }
    for (int t = 0; t < tokens; ++t) {
      Vec<L> logit = cap_logits<L>(shape_, load<L>(scores + t * kRows));
      if (!all) logit = masked == -INFINITY ? masked : logit;
      store<L>(scores + t * kRows, logit);
      new_max = max<L>(new_max, logit);
    }
    const Vec<L> reference = new_max == -INFINITY ? Vec<L>{} : new_max;
    const Vec<L> scale = exp2<L>(old_max - reference);
    Vec<L> sum = {};
    for (int t = 0; t < tokens; ++t) {
      const Vec<L> p = exp2<L>(load<L>(scores + t * kRows) - reference);
      store<L>(scores + t * kRows, p);
      sum += p;
    }
    store<L>(max_ + row, new_max);
    store<L>(sum_ + row, load<L>(sum_ + row) * scale + sum);
    return scale;
  }

  // o[column...] = o * scale + V * weights for kSteps columns. The block has sums of its own, for
  // accuracy.
  [[gnu::always_inline]] void add_values(const TokenRows<float>& tokens, int column,
                                         const float* weights, const Vec<L> (&scale)[Vectors]) {
    Vec<L> sums[kSteps][Vectors] = {};
    for (int t = 0; t < tokens.count; ++t) {
      const float* value = tokens.value(t) + column;
      Vec<L> p[Vectors];
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) p[v] = load<L>(weights + t * kRows + v * L);
#pragma GCC unroll 8
      for (int j = 0; j < kSteps; ++j) {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sums[j][v] += value[j] * p[v];
      }
    }
    float* o = o_ + column * kRows;
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        float* at = o + j * kRows + v * L;
        store<L>(at, load<L>(at) * scale[v] + sums[j][v]);
      }
    }
  }

  const Shape& shape_;
  float* q_;
  float* o_;
  float* max_;
  float* sum_;
};

}  // namespace
}  // namespace pat::PAT_ISA
