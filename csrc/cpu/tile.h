// SPDX-License-Identifier: Apache-2.0
// What both kinds of tiles share: shapes, rows of a block of tokens, the capped logit. Only
// forward_isa.cpp includes this.
#pragma once

#include "cpu/job.h"
#include "cpu/vec.h"

namespace pat::PAT_ISA {
namespace {

struct Shape {
  int head_dim;
  int v_head_dim;
  float logit_cap;  // times log2(e); 0 = off
};

// The K and V rows of a block of tokens. k is padded with its last row to a multiple of eight.
template <typename T>
struct TokenRows {
  int count;
  const void* k[kBlockTokens];
  const void* v[kBlockTokens];

  const T* key(int token) const { return static_cast<const T*>(k[token]); }
  const T* value(int token) const { return static_cast<const T*>(v[token]); }
};

// Fetches rows into the cache during the arithmetic before them. Slots lie anywhere in the pool, so
// that the hardware's own prefetcher cannot predict them.
class Prefetcher {
 public:
  void add(const void* const* rows, int count, int bytes) {
    rows_[lists_] = rows;
    count_[lists_] = count;
    bytes_[lists_++] = bytes;
  }

  // Asks for the next `count` rows that are left.
  [[gnu::always_inline]] void step(int count) {
    for (; count > 0 && list_ < lists_; --count) {
      const char* row = static_cast<const char*>(rows_[list_][row_]);
      for (int i = 0; i < bytes_[list_]; i += 64) __builtin_prefetch(row + i);
      if (++row_ == count_[list_]) {
        row_ = 0;
        ++list_;
      }
    }
  }

 private:
  const void* const* rows_[2];
  int count_[2];
  int bytes_[2];
  int lists_ = 0, list_ = 0, row_ = 0;
};

// Base-2 logit of q . k, where q carries scale * log2(e), or scale / cap if there is a cap.
template <int N>
[[gnu::always_inline]] inline Vec<N> cap_logits(const Shape& shape, Vec<N> score) {
  return shape.logit_cap == 0.0f ? score : shape.logit_cap * tanh<N>(score);
}

[[gnu::always_inline]] inline float larger(float a, float b) { return a < b ? b : a; }

// What to subtract from logits with the maximum `max`: 0 if all are -inf, so that they stay so.
[[gnu::always_inline]] inline float finite_max(float max) { return max == -INFINITY ? 0.0f : max; }

}  // namespace
}  // namespace pat::PAT_ISA
