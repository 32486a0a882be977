// SPDX-License-Identifier: Apache-2.0
// Attention of a work unit with mma.sync: units of up to 64 packed rows on every architecture, of
// up to 32 where wgmma does the rest.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/epilogue.cuh"
#include "cuda/forward/softmax.cuh"

namespace pat {

// One step of the sum over warps: keeps kKeep of this warp's columns, the upper or the lower ones,
// gives the others to the partner and adds what the partner gives.
template <int kKeep, int kHeadDim, bool kTransforms, int kCount>
__device__ __forceinline__ void exchange_columns(const Consumer<kHeadDim, kTransforms>& c,
                                                 float (&o)[kCount], float4* scratch, int partner,
                                                 bool upper) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < kKeep / 4; ++i) {
    float4 x;
    x.x = upper ? o[4 * i] : o[kKeep + 4 * i];
    x.y = upper ? o[4 * i + 1] : o[kKeep + 4 * i + 1];
    x.z = upper ? o[4 * i + 2] : o[kKeep + 4 * i + 2];
    x.w = upper ? o[4 * i + 3] : o[kKeep + 4 * i + 3];
    scratch[(c.warp * (kKeep / 4) + i) * 32 + lane] = x;
  }
  c.sync();
#pragma unroll
  for (int i = 0; i < kKeep / 4; ++i) {
    const float4 x = scratch[(partner * (kKeep / 4) + i) * 32 + lane];
    o[4 * i] = (upper ? o[kKeep + 4 * i] : o[4 * i]) + x.x;
    o[4 * i + 1] = (upper ? o[kKeep + 4 * i + 1] : o[4 * i + 1]) + x.y;
    o[4 * i + 2] = (upper ? o[kKeep + 4 * i + 2] : o[4 * i + 2]) + x.z;
    o[4 * i + 3] = (upper ? o[kKeep + 4 * i + 3] : o[4 * i + 3]) + x.w;
  }
}

// A unit of up to 16 * kRowWarps packed rows: kRowWarps warps take 16 rows each, and the
// 4 / kRowWarps warps of the same rows share the tokens of each tile. kBranch: the unit is of a
// branch, which four warps with rows of their own run.
template <typename T, int kRowWarps, bool kBranch, int kHeadDim, bool kTransforms>
__device__ __forceinline__ void attend_mma(Consumer<kHeadDim, kTransforms>& c,
                                           const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  constexpr int kTokenWarps = 4 / kRowWarps;
  static_assert(!kBranch || kTokenWarps == 1);
  constexpr int kTokens = kTileTokens / kTokenWarps;
  constexpr int kTiles = kTokens / 8;
  constexpr int kOut = kHeadDim / 2;  // output floats of a lane
  const ForwardParams& p = c.p;
  const int lane = lane_id();
  const int row_warp = c.warp % kRowWarps;
  const int token_warp = c.warp / kRowWarps;
  const int first_token = token_warp * kTokens;

  const uint32_t q_tile = c.s.q(c.q.index);
  // Offsets that this lane passes to ldmatrix: of its row, and of its swizzled 16-byte chunk in it.
  const uint32_t low = lane & 7;
  const uint32_t q_row = (row_warp * 16 + low + ((lane >> 3) & 1) * 8) * 128;
  const uint32_t q_chunk = ((lane >> 4) ^ low) << 4;
  const uint32_t k_row = (first_token + low + (lane >> 4) * 8) * 128;
  const uint32_t k_chunk = (((lane >> 3) & 1) ^ low) << 4;
  const uint32_t v_row = (first_token + low + ((lane >> 3) & 1) * 8) * 128;
  const uint32_t v_chunk = q_chunk;

  float o[kOut];
#pragma unroll
  for (int i = 0; i < kOut; ++i) o[i] = 0.0f;
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};

  const MaskedTiles masked(unit);
  const Destination to = destination_of(p, c.s.control(), unit, row_warp * 16);
  // This warp writes so many tiles of 8 columns of its rows' results, from `column` on.
  constexpr int kMine = kHeadDim / 8 / kTokenWarps;
  const int column = token_warp * kMine * 8;
  if (unit.num_tokens > 0) c.q.wait_full(c.s.base);
  for (int left = unit.num_tokens; left > 0; left -= kTileTokens) {
    uint32_t weights[kTiles * 2];
    float factor[2];
    const bool busy = first_token < left;
    c.stage.wait_full(c.s.base);
    if (busy) {
      const uint32_t tile = c.s.tile(c.stage.index);
      float scores[4 * kTiles];
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) scores[i] = 0.0f;
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        const uint32_t panel = (k >> 2) * S::kPanelBytes;
        const uint32_t chunk = (k & 3) << 5;
        uint32_t a[4];
        load_matrix(a, q_tile + panel + q_row + (q_chunk ^ chunk));
#pragma unroll
        for (int j = 0; j < kTiles / 2; ++j) {
          uint32_t b[4];
          load_matrix(b, tile + panel + k_row + j * 2048 + (k_chunk ^ chunk));
          mma16816<T>(scores + 8 * j, a, b[0], b[1]);
          mma16816<T>(scores + 8 * j + 4, a, b[2], b[3]);
        }
      }
      softmax<kTiles, kTransforms>(p, scores, row_max, row_sum, factor, first_token, left,
                                   [&](float (&s)[4 * kTiles]) {
                                     if (!kBranch || !masked.has(left)) return;
                                     uint32_t row_masks[kTiles];
                                     read_row_masks<kTiles>(row_masks, c.row_masks(c.stage.index));
                                     mask_scores<kTiles>(s, row_masks, row_warp * 16);
                                   });
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        weights[i] = pack2<T>(scores[2 * i], scores[2 * i + 1]);
      }
    }
    c.release_stage();
    c.stage.wait_full(c.s.base);
    if (busy) {
      const uint32_t tile = c.s.tile(c.stage.index);
      rescale_output(o, factor);
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        if (kTiles > 2 && first_token + 16 * k >= left) break;
        const uint32_t a[4] = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                               weights[4 * k + 3]};
#pragma unroll
        for (int j = 0; j < kHeadDim / 16; ++j) {
          uint32_t b[4];
          load_matrix_transposed(
              b, tile + (j >> 2) * S::kPanelBytes + v_row + k * 2048 + (v_chunk ^ ((j & 3) << 5)));
          mma16816<T>(o + 8 * j, a, b[0], b[1]);
          mma16816<T>(o + 8 * j + 4, a, b[2], b[3]);
        }
      }
    }
    c.release_stage();
  }

  SoftmaxState state[2];
  finish_states(p, row_max, row_sum, state);
  if constexpr (kTokenWarps > 1) {
    if (unit.num_tokens > 0) {  // else there is nothing to add up and no Q buffer for scratch
      float (*exchange)[16][2] = c.s.control().exchange;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if ((lane & 3) == 0) {
          exchange[c.warp][(lane >> 2) + 8 * r][0] = state[r].max;
          exchange[c.warp][(lane >> 2) + 8 * r][1] = state[r].sum;
        }
      }
      c.sync();
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        SoftmaxState total = empty_state();
#pragma unroll
        for (int w = 0; w < kTokenWarps; ++w) {
          const float* part = exchange[w * kRowWarps + row_warp][(lane >> 2) + 8 * r];
          total = join(total, {part[0], part[1]});
        }
        factor[r] = rescale(state[r].max, total.max);
        state[r] = total;
      }
      rescale_output(o, factor);
      auto* scratch = reinterpret_cast<float4*>(__cvta_shared_to_generic(q_tile));
      if constexpr (kTokenWarps == 4) {
        exchange_columns<kOut / 2>(c, o, scratch, c.warp ^ 2, token_warp & 2);
        c.sync();
        exchange_columns<kOut / 4>(c, o, scratch, c.warp ^ 1, token_warp & 1);
      } else {
        exchange_columns<kOut / 2>(c, o, scratch, c.warp ^ kRowWarps, token_warp);
      }
    }
  }
  if (unit.num_tokens > 0) {
    c.release(c.q.empty(c.s.base));
    c.q.advance(p.q_buffers);
  }
  write_rows<T, kHeadDim, kMine>(p, unit, to, row_warp * 16, column, o, state, token_warp == 0);
}

// A narrow unit: up to 8 packed rows and kTokens tokens, by one warp. Rows 8 to 15 of the products
// are copies of rows 0 to 7, which are not used.
template <typename T, int kTokens, int kHeadDim, bool kTransforms>
__device__ __forceinline__ void attend_narrow(Consumer<kHeadDim, kTransforms>& c,
                                              const WorkUnit& unit) {
  using S = Shape<kHeadDim>;
  constexpr int kTiles = kTokens / 8;
  constexpr bool kIsShort = kTokens == kShortTokens;
  const ForwardParams& p = c.p;
  const int lane = lane_id();
  const uint32_t q_tile = c.s.narrow_q(c.narrow.index);
  uint32_t tile = c.s.tile(c.stage.index);
  const uint32_t low = lane & 7;
  const uint32_t q_chunk = ((lane >> 4) ^ low) << 4;
  const uint32_t k_row = (low + (lane >> 4) * 8) * 128;
  const uint32_t k_chunk = (((lane >> 3) & 1) ^ low) << 4;
  const uint32_t v_row = ((kIsShort ? kShortTokens : 0) + low + ((lane >> 3) & 1) * 8) * 128;

  const Destination to = destination_of(p, c.s.control(), unit, 0);
  float scores[4 * kTiles];
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) scores[i] = 0.0f;
  c.narrow.wait_full(c.s.base);
  c.stage.wait_full(c.s.base);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const uint32_t chunk = (k & 3) << 5;
    uint32_t a[4];
    load_matrix(a, q_tile + (k >> 2) * (kNarrowRows * 128) + low * 128 + (q_chunk ^ chunk));
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t b[4];
      load_matrix(b, tile + (k >> 2) * S::kPanelBytes + k_row + j * 2048 + (k_chunk ^ chunk));
      mma16816<T>(scores + 8 * j, a, b[0], b[1]);
      mma16816<T>(scores + 8 * j + 4, a, b[2], b[3]);
    }
  }
  c.release(c.narrow.empty(c.s.base));
  if constexpr (!kIsShort) {
    c.release_stage();
    tile = c.s.tile(c.stage.index);
  }
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  float factor[2];
  softmax<kTiles, kTransforms>(p, scores, row_max, row_sum, factor, 0, unit.num_tokens,
                               [](float (&)[4 * kTiles]) {});
  if constexpr (!kIsShort) c.stage.wait_full(c.s.base);
  float o[kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
    if (16 * k >= unit.num_tokens) break;
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = pack2<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      uint32_t b[4];
      load_matrix_transposed(
          b, tile + (j >> 2) * S::kPanelBytes + v_row + k * 2048 + (q_chunk ^ ((j & 3) << 5)));
      mma16816<T>(o + 8 * j, a, b[0], b[1]);
      mma16816<T>(o + 8 * j + 4, a, b[2], b[3]);
    }
  }
  c.release_stage();
  SoftmaxState state[2];
  finish_states(p, row_max, row_sum, state);
  write_rows<T, kHeadDim, kHeadDim / 8, 1>(p, unit, to, 0, 0, o, state, true);
}

}  // namespace pat
