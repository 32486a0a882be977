// SPDX-License-Identifier: Apache-2.0
// Tiles of one to four packed rows: vector lanes run along the head dimension, and K and V are read
// in place whatever their dtype. Only forward_isa.cpp includes this.
#pragma once

#include "cpu/tile.h"

namespace pat::PAT_ISA {
namespace {

// 512-bit lanes would leave tails of head dims that are no multiple of 16.
constexpr int kDimLanes = kLanes < 8 ? kLanes : 8;
constexpr int kDimSums = 8;  // accumulators of a loop: what hides the FMA latency
using DimVec = Vec<kDimLanes>;

// Lane i of the result is the sum of the lanes of v[i].
template <int L>
[[gnu::always_inline]] inline Vec<L> sum_each(const Vec<L> (&v)[L]) {
  Vec<L> pair[L / 2];
  if constexpr (L == 8) {
    Vec<L> quad[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
                __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      quad[i] = __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                __builtin_shufflevector(pair[2 * i], pair[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return __builtin_shufflevector(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
  } else {
    static_assert(L == 4);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      pair[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 4, 1, 5) +
                __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 6, 3, 7);
    }
    return __builtin_shufflevector(pair[0], pair[1], 0, 1, 4, 5) +
           __builtin_shufflevector(pair[0], pair[1], 2, 3, 6, 7);
  }
}

// Rows 1, 2 or 4; of three, the fourth is zero. Memory: q [Rows][head_dim] | o [Rows][v_head_dim].
// Scores lie token by token, [tokens][Rows], so that a vector holds whole tokens.
template <int Rows, typename T>
class DimLanesTile {
 public:
  DimLanesTile(const Shape& shape, float* memory, float* scores)
      : shape_(shape), q_(memory), o_(memory + Rows * shape.head_dim), scores_(scores) {
    for (int r = 0; r < Rows; ++r) state_[r] = empty_state();
  }

  static int64_t size(const Shape& shape) { return Rows * (shape.head_dim + shape.v_head_dim); }

  // The caller fills q, [Rows][head_dim], before the first block.
  float* q(int row) { return q_ + row * shape_.head_dim; }
  const float* o(int row) const { return o_ + row * shape_.v_head_dim; }
  SoftmaxState state(int row) const { return state_[row]; }

  void attend(const TokenRows<T>& tokens, Prefetcher& ahead) {
    constexpr int kTokens = kDimSums / Rows;
    const int padded = (tokens.count + kTokens - 1) / kTokens * kTokens;
    for (int t = 0; t < padded; t += kTokens) {
      ahead.step(kTokens);
      score(tokens, t, scores_ + t * Rows);
    }
    for (int i = tokens.count * Rows; i < padded * Rows; ++i) scores_[i] = -INFINITY;
    float scale[Rows];
    weigh(padded * Rows, scale);
    constexpr int kColumns = kDimSums / Rows;
    // What is left to fetch is spread over the passes.
    const int step = kBlockTokens * kColumns * kDimLanes / shape_.v_head_dim + 1;
    int column = 0;
    for (; column + kColumns * kDimLanes <= shape_.v_head_dim; column += kColumns * kDimLanes) {
      ahead.step(step);
      add_values<kColumns>(tokens, column, scale);
    }
    for (; column < shape_.v_head_dim; column += kDimLanes) {
      add_values<1>(tokens, column, scale);
    }
  }

 private:
  // Scores of kDimSums / Rows tokens.
  [[gnu::always_inline]] void score(const TokenRows<T>& tokens, int first, float* scores) const {
    constexpr int kTokens = kDimSums / Rows;
    constexpr int kGroups = kDimSums / kDimLanes;
    const T* k[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) k[t] = tokens.key(first + t);
    DimVec sums[kGroups][kDimLanes] = {};
    for (int j = 0; j < shape_.head_dim; j += kDimLanes) {
      DimVec q[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) q[r] = load<kDimLanes>(q_ + r * shape_.head_dim + j);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const DimVec key = load<kDimLanes>(k[t] + j);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const int i = t * Rows + r;
          sums[i / kDimLanes][i % kDimLanes] += key * q[r];
        }
      }
    }
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      store<kDimLanes>(scores + g * kDimLanes,
                       cap_logits<kDimLanes>(shape_, sum_each<kDimLanes>(sums[g])));
    }
  }

  // Turns `count` scores into weights and updates the states; `scale` is the old outputs' factor.
  void weigh(int count, float (&scale)[Rows]) {
    DimVec highest = DimVec{} - INFINITY;
    for (int i = 0; i < count; i += kDimLanes) {
      highest = max<kDimLanes>(highest, load<kDimLanes>(scores_ + i));
    }
    DimVec reference;  // per lane the new maximum of the lane's row
    for (int r = 0; r < Rows; ++r) {
      float row_max = state_[r].max;
      for (int i = r; i < kDimLanes; i += Rows) row_max = larger(row_max, highest[i]);
      scale[r] = rescale(state_[r].max, row_max);
      state_[r].max = row_max;
      for (int i = r; i < kDimLanes; i += Rows) reference[i] = finite_max(row_max);
    }
    DimVec sum = {};
    for (int i = 0; i < count; i += kDimLanes) {
      const DimVec p = exp2<kDimLanes>(load<kDimLanes>(scores_ + i) - reference);
      store<kDimLanes>(scores_ + i, p);
      sum += p;
    }
    for (int r = 0; r < Rows; ++r) {
      float row_sum = 0;
      for (int i = r; i < kDimLanes; i += Rows) row_sum += sum[i];
      state_[r].sum = state_[r].sum * scale[r] + row_sum;
    }
  }

  // o[:, column...] = o * scale + weights * V. The block has sums of its own, for accuracy.
  template <int Columns>
  [[gnu::always_inline]] void add_values(const TokenRows<T>& tokens, int column,
                                         const float (&scale)[Rows]) {
    DimVec sums[Rows][Columns] = {};
    for (int t = 0; t < tokens.count; ++t) {
      DimVec value[Columns];
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        value[c] = load<kDimLanes>(tokens.value(t) + column + c * kDimLanes);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const float weight = scores_[t * Rows + r];
#pragma GCC unroll 8
        for (int c = 0; c < Columns; ++c) sums[r][c] += weight * value[c];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      float* o = o_ + r * shape_.v_head_dim + column;
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        const DimVec old = load<kDimLanes>(o + c * kDimLanes);
        store<kDimLanes>(o + c * kDimLanes, old * scale[r] + sums[r][c]);
      }
    }
  }

  const Shape& shape_;
  float* q_;
  float* o_;
  float* scores_;
  SoftmaxState state_[Rows];
};

}  // namespace
}  // namespace pat::PAT_ISA
