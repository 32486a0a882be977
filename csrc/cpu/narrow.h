// SPDX-License-Identifier: Apache-2.0
// Tiles of one to four packed rows: vector lanes run along the head dimension, K and V are read in
// place whatever their dtype. Only forward_isa.cpp includes this.
#pragma once

#include "cpu/tile.h"

namespace pat::PAT_ISA {
namespace {

// 512-bit lanes would leave tails of head dims that are no multiple of 16.
constexpr int kNarrowLanes = kLanes < 8 ? kLanes : 8;
constexpr int kNarrowSums = 8;  // accumulators of a loop: what hides the FMA latency
using NarrowVec = Vec<kNarrowLanes>;

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
class NarrowTile {
 public:
  NarrowTile(const Shape& shape, float* memory, float* scores)
      : shape_(shape), q_(memory), o_(memory + Rows * shape.head_dim), scores_(scores) {
    for (int r = 0; r < Rows; ++r) state_[r] = empty_state();
  }

  static int64_t size(const Shape& shape) { return Rows * (shape.head_dim + shape.v_head_dim); }

  // The caller fills q, [Rows][head_dim], before the first block.
  float* q(int row) { return q_ + row * shape_.head_dim; }
  const float* o(int row) const { return o_ + row * shape_.v_head_dim; }
  SoftmaxState state(int row) const { return state_[row]; }

  void attend(const TokenRows<T>& tokens, Prefetcher& ahead) {
    constexpr int kTokens = kNarrowSums / Rows;
    const int padded = (tokens.count + kTokens - 1) / kTokens * kTokens;
    for (int t = 0; t < padded; t += kTokens) {
      ahead.step(kTokens);
      score(tokens, t, scores_ + t * Rows);
    }
    for (int i = tokens.count * Rows; i < padded * Rows; ++i) scores_[i] = -INFINITY;
    float scale[Rows];
    weigh(padded * Rows, scale);
    constexpr int kWide = kNarrowSums / Rows;
    // What is left to fetch is spread over the passes.
    const int step = kBlockTokens * kWide * kNarrowLanes / shape_.v_head_dim + 1;
    int column = 0;
    for (; column + kWide * kNarrowLanes <= shape_.v_head_dim; column += kWide * kNarrowLanes) {
      ahead.step(step);
      add_values<kWide>(tokens, column, scale);
    }
    for (; column < shape_.v_head_dim; column += kNarrowLanes) {
      add_values<1>(tokens, column, scale);
    }
  }

 private:
  // Scores of kNarrowSums / Rows tokens.
  [[gnu::always_inline]] void score(const TokenRows<T>& tokens, int first, float* scores) const {
    constexpr int kTokens = kNarrowSums / Rows;
    constexpr int kGroups = kNarrowSums / kNarrowLanes;
    const T* k[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) k[t] = tokens.key(first + t);
    NarrowVec sums[kGroups][kNarrowLanes] = {};
    for (int j = 0; j < shape_.head_dim; j += kNarrowLanes) {
      NarrowVec q[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) q[r] = load<kNarrowLanes>(q_ + r * shape_.head_dim + j);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const NarrowVec key = load<kNarrowLanes>(k[t] + j);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          const int i = t * Rows + r;
          sums[i / kNarrowLanes][i % kNarrowLanes] += key * q[r];
        }
      }
    }
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      store<kNarrowLanes>(scores + g * kNarrowLanes,
                          cap_logits<kNarrowLanes>(shape_, sum_each<kNarrowLanes>(sums[g])));
    }
  }

  // Turns `count` scores into weights and updates the states; `scale` is the old outputs' factor.
  void weigh(int count, float (&scale)[Rows]) {
    NarrowVec highest = NarrowVec{} - INFINITY;
    for (int i = 0; i < count; i += kNarrowLanes) {
      highest = max<kNarrowLanes>(highest, load<kNarrowLanes>(scores_ + i));
    }
    NarrowVec reference;  // per lane the new maximum of the lane's row
    for (int r = 0; r < Rows; ++r) {
      float row_max = state_[r].max;
      for (int i = r; i < kNarrowLanes; i += Rows) row_max = larger(row_max, highest[i]);
      scale[r] = rescale(state_[r].max, row_max);
      state_[r].max = row_max;
      for (int i = r; i < kNarrowLanes; i += Rows) reference[i] = finite_max(row_max);
    }
    NarrowVec sum = {};
    for (int i = 0; i < count; i += kNarrowLanes) {
      const NarrowVec p = exp2<kNarrowLanes>(load<kNarrowLanes>(scores_ + i) - reference);
      store<kNarrowLanes>(scores_ + i, p);
      sum += p;
    }
    for (int r = 0; r < Rows; ++r) {
      float row_sum = 0;
      for (int i = r; i < kNarrowLanes; i += Rows) row_sum += sum[i];
      state_[r].sum = state_[r].sum * scale[r] + row_sum;
    }
  }

  // o[:, column...] = o * scale + weights * V. The block has sums of its own, for accuracy.
  template <int Columns>
  [[gnu::always_inline]] void add_values(const TokenRows<T>& tokens, int column,
                                         const float (&scale)[Rows]) {
    NarrowVec sums[Rows][Columns] = {};
    for (int t = 0; t < tokens.count; ++t) {
      NarrowVec value[Columns];
#pragma GCC unroll 8
      for (int c = 0; c < Columns; ++c) {
        value[c] = load<kNarrowLanes>(tokens.value(t) + column + c * kNarrowLanes);
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
        const NarrowVec old = load<kNarrowLanes>(o + c * kNarrowLanes);
        store<kNarrowLanes>(o + c * kNarrowLanes, old * scale[r] + sums[r][c]);
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
