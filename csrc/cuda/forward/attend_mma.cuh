// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with mma.sync: units of up to 64 packed rows on every architecture, of
// up to 16 where wgmma does the rest.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/epilogue.cuh"
#include "cuda/forward/raw_tile.cuh"
#include "cuda/forward/softmax.cuh"

namespace pat {

// Of Q and of V: 16 rows from row `first` of the tile at `tile` on, the second 8 columns last.
__device__ __forceinline__ Fragment rows_first(uint32_t tile, int first) {
  const uint32_t lane = lane_id(), low = lane & 7;
  return {tile + (first + low + ((lane >> 3) & 1) * 8) * 128, ((lane >> 4) ^ low) << 4};
}

// Of K: 16 rows as well, the second 8 rows last.
__device__ __forceinline__ Fragment columns_first(uint32_t tile, int first) {
  const uint32_t lane = lane_id(), low = lane & 7;
  return {tile + (first + low + (lane >> 4) * 8) * 128, (((lane >> 3) & 1) ^ low) << 4};
}

// scores = Q K^T of 16 rows and 8 * kTiles tokens. `q_panel`: bytes from one panel of Q to the
// next.
template <typename T, int kTiles, int kHeadDim>
__device__ __forceinline__ void multiply_keys(float (&scores)[4 * kTiles], const Fragment& q,
                                              uint32_t q_panel, const Fragment& k) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    const uint32_t panel = d >> 2;
    const uint32_t chunk = (d & 3) << 5;
    uint32_t a[4];
    load_matrix(a, q.row + panel * q_panel + (q.chunk ^ chunk));
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t b[4];
      load_matrix(b, k.row + panel * Shape<kHeadDim>::kPanelBytes + j * 2048 + (k.chunk ^ chunk));
      mma16816<T>(scores + 8 * j, a, b[0], b[1]);
      mma16816<T>(scores + 8 * j + 4, a, b[2], b[3]);
    }
  }
}

// o += P V of 16 rows and the first `tokens` of 8 * kTiles tokens. weights(a, i): gives the weights
// of tokens 16 i to 16 i + 15 as an operand.
template <typename T, int kTiles, int kHeadDim, typename Weights>
__device__ __forceinline__ void add_values(float (&o)[kHeadDim / 2], const Fragment& v, int tokens,
                                           const Weights& weights) {
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
    if (kTiles > 2 && 16 * i >= tokens) break;
    uint32_t a[4];
    weights(a, i);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      uint32_t b[4];
      load_matrix_transposed(b, v.row + (j >> 2) * Shape<kHeadDim>::kPanelBytes + i * 2048 +
                                    (v.chunk ^ ((j & 3) << 5)));
      mma16816<T>(o + 8 * j, a, b[0], b[1]);
      mma16816<T>(o + 8 * j + 4, a, b[2], b[3]);
    }
  }
}

// Adds up what the 4 / kRowWarps warps of the same rows have: leaves in each the state of its rows
// over all tokens, and in the first values of `o` the columns of the output that it writes.
// `num_rows`: of the unit; a second turn is for rows beyond the first eight of each warp. Most
// units of one query have none: then state[1] and its values stay as they were, and nothing reads
// them. `scratch`: memory for a Q tile, whose rows no warp needs any more once all are here. The
// code is short, because a server's other kernels drive it out of the caches, and most SMs run it
// once a layer (docs/lessons.md).
template <int kRowWarps, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void join_warps(const Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                           float (&o)[kHeadDim / 2], SoftmaxState (&state)[2],
                                           int num_rows, float4* scratch) {
  constexpr int kTokenWarps = 4 / kRowWarps;
  constexpr int kPairs = kHeadDim / 16;        // of neighbouring tiles of 8 columns
  constexpr int kMine = kPairs / kTokenWarps;  // those that a warp writes
  const int lane = lane_id(), row = lane >> 2;
  const int row_warp = c.warp % kRowWarps;
  const int first = c.warp / kRowWarps * kMine;
  float (*exchange)[16][2] = c.s.control().exchange;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && num_rows <= 8) break;
    c.sync();  // Q, or the first turn's values, have been read
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float* x = o + 8 * i + 2 * r;
      scratch[(c.warp * kPairs + i) * 32 + lane] = make_float4(x[0], x[1], x[4], x[5]);
    }
    if ((lane & 3) == 0) {
      exchange[c.warp][row + 8 * r][0] = state[r].max;
      exchange[c.warp][row + 8 * r][1] = state[r].sum;
    }
    c.sync();
    SoftmaxState total = empty_state();
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      total.max = fmaxf(total.max, exchange[w * kRowWarps + row_warp][row + 8 * r][0]);
    }
    float sum[4 * kMine]{};
#pragma unroll
    for (int w = 0; w < kTokenWarps; ++w) {
      const int warp = w * kRowWarps + row_warp;
      const float* part = exchange[warp][row + 8 * r];
      const float weight = rescale(part[0], total.max);
      total.sum = fmaf(part[1], weight, total.sum);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const float4 x = scratch[(warp * kPairs + first + i) * 32 + lane];
        sum[4 * i] = fmaf(x.x, weight, sum[4 * i]);
        sum[4 * i + 1] = fmaf(x.y, weight, sum[4 * i + 1]);
        sum[4 * i + 2] = fmaf(x.z, weight, sum[4 * i + 2]);
        sum[4 * i + 3] = fmaf(x.w, weight, sum[4 * i + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float* x = o + 8 * i + 2 * r;
      x[0] = sum[4 * i];
      x[1] = sum[4 * i + 1];
      x[4] = sum[4 * i + 2];
      x[5] = sum[4 * i + 3];
    }
    state[r] = total;
  }
}

// A unit of up to 16 * kRowWarps packed rows: kRowWarps warps take 16 rows each, and the
// 4 / kRowWarps warps of the same rows share the tokens of each tile. kBranch: the unit is of a
// branch, which four warps with rows of their own run.
template <typename T, bool kFp8, int kRowWarps, bool kBranch, int kHeadDim, bool kTransforms,
          Drafts kDrafts>
__device__ __forceinline__ void attend_mma(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                           const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  using M = Operand<T, kFp8>;
  constexpr int kTokenWarps = 4 / kRowWarps;
  static_assert(!kBranch || kTokenWarps == 1);
  constexpr int kTokens = kTileTokens / kTokenWarps;
  constexpr int kTiles = kTokens / 8;
  const ForwardParams& p = c.p;
  const int first_row = c.warp % kRowWarps * 16;
  const int token_warp = c.warp / kRowWarps;
  const int first_token = token_warp * kTokens;
  const uint32_t q_tile = c.s.q(c.q.index);
  const Fragment q = rows_first(q_tile, first_row);

  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  PlainScores exponent{p};
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};

  const MaskedTiles masked(unit);
  [[maybe_unused]] const int drafts = kDrafts != kNoDrafts && !kBranch ? drafts_below(p, unit) : 0;
  const Destination to = destination_of<kHeadDim, kDrafts>(p, c.s.control(), unit, first_row);
  if (unit.num_tokens > 0) {
    c.q.wait_full(c.s.base);
    if constexpr (kFp8) {
      widen_queries<T, 16 * kRowWarps, kHeadDim>(q_tile, 32 * c.warp + lane_id());
      c.sync();
    }
  }
  for (int left = unit.num_tokens; left > 0; left -= kTileTokens) {
    uint32_t weights[kTiles * 2];
    float factor[2];
    const bool busy = first_token < left;
    c.stage.wait_full(c.s.base);
    if (busy) {
      float scores[4 * kTiles];
      const uint32_t keys = c.s.tile(c.stage.index);
      if constexpr (kFp8) {
        multiply_raw_keys<kTiles, kHeadDim>(
            scores, RawTile<kHeadDim>::keys(keys, first_token), [&](uint32_t (&a)[4], int i) {
              load_matrix(a, q.row + (i >> 2) * S::kPanelBytes + (q.chunk ^ ((i & 3) << 5)));
            });
      } else {
        const Fragment k = columns_first(keys, first_token);
        multiply_keys<T, kTiles, kHeadDim>(scores, q, S::kPanelBytes, k);
      }
      softmax<kTiles, kTransforms>(p, exponent, scores, row_max, row_sum, factor, first_token, left,
                                   [&](float (&s)[4 * kTiles]) {
                                     if constexpr (kDrafts != kNoDrafts && !kBranch) {
                                       if (left >= drafts) return;
                                       mask_drafts<kTiles, kDrafts>(
                                           p, s, unit.member.query,
                                           unit.first_packed_row + first_row, first_token, left);
                                     }
                                     if (!kBranch || !masked.has(left)) return;
                                     uint32_t row_masks[kTiles];
                                     read_row_masks<kTiles>(row_masks, c.row_masks(c.stage.index));
                                     mask_scores<kTiles>(s, row_masks, first_row);
                                   });
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        weights[i] = pack2<M>(scores[2 * i], scores[2 * i + 1]);
      }
    }
    if constexpr (!kFp8) {  // else V is in the same stage
      c.release_stage();
      c.stage.wait_full(c.s.base);
    }
    if (busy) {
      rescale_output(o, factor);
      const uint32_t values = c.s.tile(c.stage.index);
      const auto operand = [&](uint32_t (&a)[4], int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = weights[4 * i + j];
      };
      if constexpr (kFp8) {
        const Fragment v = RawTile<kHeadDim>::values(values, first_token);
        add_raw_values<kTiles, kHeadDim>(o, v, left - first_token, operand);
      } else {
        const Fragment v = rows_first(values, first_token);
        add_values<T, kTiles, kHeadDim>(o, v, left - first_token, operand);
      }
    }
    c.release_stage();
  }

  SoftmaxState state[2];
  finish_states(exponent, row_max, row_sum, state);
  if (unit.num_tokens > 0) {  // else there is nothing to add up and no Q buffer
    if constexpr (kTokenWarps > 1) {
      auto* scratch = reinterpret_cast<float4*>(__cvta_shared_to_generic(q_tile));
      join_warps<kRowWarps>(c, o, state, unit.num_rows, scratch);
    }
    c.release(c.q.empty(c.s.base));
    c.q.advance(p.q_buffers);
  }
  // This warp writes so many tiles of 8 columns of its rows' results.
  constexpr int kMine = kHeadDim / 8 / kTokenWarps;
  write_rows<T, kMine, kFp8, 2>(p, unit, to, first_row, token_warp * kMine * 8, o, state,
                                token_warp == 0);
}

// A narrow unit: up to 8 packed rows and kTokens tokens, by one warp. Rows 8 to 15 of the products
// are copies of rows 0 to 7, which are not used.
template <typename T, bool kFp8, int kTokens, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_narrow(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                              const WorkUnit& unit) {
  constexpr int kTiles = kTokens / 8;
  using M = Operand<T, kFp8>;
  constexpr bool kOneStage = kFp8 || kTokens == kShortTokens;  // of K and V
  const ForwardParams& p = c.p;
  Fragment q = rows_first(0, 0);
  q.row = c.s.narrow_q(c.narrow.index) + (lane_id() & 7) * 128;
  uint32_t tile = c.s.tile(c.stage.index);

  const Destination to = destination_of<kHeadDim, kDrafts>(p, c.s.control(), unit, 0);
  float scores[4 * kTiles];
  c.narrow.wait_full(c.s.base);
  c.stage.wait_full(c.s.base);
  if constexpr (kFp8) {
    const uint32_t buffer = c.s.narrow_q(c.narrow.index);
    multiply_raw_keys<kTiles, kHeadDim>(
        scores, RawTile<kHeadDim>::keys(tile, 0),
        [&](uint32_t (&a)[4], int i) { load_narrow_queries<T, kHeadDim>(a, buffer, i); });
  } else {
    multiply_keys<T, kTiles, kHeadDim>(scores, q, Shape<kHeadDim>::kNarrowPanelBytes,
                                       columns_first(tile, 0));
  }
  c.release(c.narrow.empty(c.s.base));
  if constexpr (!kOneStage) {
    c.release_stage();
    tile = c.s.tile(c.stage.index);
  }
  PlainScores exponent{p};
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  float factor[2];
  softmax<kTiles, kTransforms>(p, exponent, scores, row_max, row_sum, factor, 0, unit.num_tokens,
                               [&](float (&s)[4 * kTiles]) {
                                 if constexpr (kDrafts != kNoDrafts) {
                                   if (unit.has_drafts()) {
                                     mask_drafts<kTiles, kDrafts>(p, s, unit.member.query, 0, 0,
                                                                  unit.num_tokens);
                                   }
                                 }
                               });
  if constexpr (!kOneStage) c.stage.wait_full(c.s.base);
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
  const auto weights = [&](uint32_t (&a)[4], int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = pack2<M>(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
  };
  if constexpr (kFp8) {
    const Fragment v = RawTile<kHeadDim>::values(tile, 0);
    add_raw_values<kTiles, kHeadDim>(o, v, unit.num_tokens, weights);
  } else {
    const Fragment v = rows_first(tile, kOneStage ? kShortTokens : 0);
    add_values<T, kTiles, kHeadDim>(o, v, unit.num_tokens, weights);
  }
  c.release_stage();
  SoftmaxState state[2];
  finish_states(exponent, row_max, row_sum, state);
  write_rows<T, kHeadDim / 8, kFp8, 1>(p, unit, to, 0, 0, o, state, true);
}

}  // namespace pat
