// SPDX-License-Identifier: Apache-2.0
// The two warpgroups of the MLA forward that multiply weights with V, 256 of the 512 columns each,
// and write the outputs or partial results.
#pragma once

#include "cuda/mla/products.cuh"
#include "cuda/mla/units.cuh"

namespace pat::mla {

#if PAT_WGMMA

// Where the results of rows lane / 4 and lane / 4 + 8 of a warp's 16 go. Looked up at a part's
// beginning, so that its end does not wait for memory.
struct Results {
  char* row[2];    // the head's first column of the output or of a partial
  int32_t lse[2];  // where its LSE goes in p.lse or p.partial_lse
  bool direct[2];  // to the output
  bool live[2];    // there is such a row
};

struct Multiplier {
  // A product has 128 columns: more registers than that takes no instruction of a kernel of 512
  // threads.
  static constexpr int kColumns = kHalfColumns / 2;
  static constexpr int kCount = kColumns / 2;  // of a lane's values

  const Params& p;
  const Place s;
  const int half, warp, lane;  // half: of the columns
  const PlanArrays plan;
  Position<kUnits> work;
  Position<kTileStages> stage;

  __device__ __forceinline__ Results results_of(const WorkUnit& unit, int first_row) const {
    Results to;
    const ForwardParams& f = p.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp * kWarpRows + (lane >> 2) + 8 * r;
      to.live[r] = row < unit.num_rows;
      // The heads of a query's draft tokens are heads of the query.
      const int head = row - ((row * f.group_magic) >> 16) * f.group;
      Member of = unit.member;
      if (to.live[r] && !unit.single_query()) of = plan.member_of(f, unit.member_offset, row);
      const bool direct = of.partial == kDirect;
      const int64_t index = direct ? of.query : of.partial;
      const int64_t head_bytes = f.float_partials ? 4 * kValueDim : 2 * kValueDim;
      const int64_t stride = direct ? f.out_stride_query : f.num_q_heads * head_bytes;
      to.row[r] = (direct ? f.out : f.partials) + index * stride +
                  head * (direct ? f.out_stride_head : head_bytes);
      to.lse[r] = static_cast<int32_t>(index) * f.num_q_heads + head;
      to.direct[r] = direct;
    }
    return to;
  }

  // The warp's rows of the weights, as operands of four products.
  __device__ __forceinline__ void load_weights(uint32_t (&weights)[16], uint32_t from) const {
    const uint32_t low = lane & 7, row = warp * kWarpRows + low + (lane & 8);
    const uint32_t chunk = ((lane >> 4) ^ low) << 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t part[4];
      load_matrix(part, from + row * 128 + (chunk ^ (i << 5)));
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[4 * i + j] = part[j];
    }
  }

  // Multiplies the output with what the weights' warp of the same rows says.
  __device__ __forceinline__ void scale_output(float (&low)[kCount], float (&high)[kCount]) const {
    const Board& board = s.board();
    if (!board.raised[stage.index][warp]) return;
    const float* factors = board.factors[stage.index] + warp * kWarpRows + (lane >> 2);
    const float factor[2] = {factors[0], factors[8]};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      low[i] *= factor[(i >> 1) & 1];
      high[i] *= factor[(i >> 1) & 1];
    }
  }

  // Issues o += weights V of 128 columns as one group.
  __device__ __forceinline__ static void issue_columns(float (&o)[kCount],
                                                       const uint32_t (&weights)[16],
                                                       uint64_t values) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_output<__nv_bfloat16>(o, weights + 4 * i, values + i * kNextTokens);
    }
    wgmma_commit();
  }

  // Adds the stage's tile to the output.
  __device__ __forceinline__ void add_tile(float (&low)[kCount], float (&high)[kCount], bool last,
                                           SoftmaxState (&state)[2]) {
    const uint32_t tile = s.tile(stage.index);
    // V is there since before its weights. This wait orders its copies before the products of this
    // thread.
    barrier_wait(s.full(stage.index), stage.phase);
    fence_async_proxy();
    barrier_wait(s.weighed(stage.index), stage.phase);
    uint32_t weights[16];
    load_weights(weights, tile + kRopeOffset);
    scale_output(low, high);
    if (last) {
      const SoftmaxState* states = s.board().states[stage.index] + warp * kWarpRows + (lane >> 2);
      state[0] = states[0];
      state[1] = states[8];
    }
    const uint64_t values =
        wgmma_operand(tile + half * (kHalfColumns / 64) * kPanelBytes, kPanelBytes);
    warpgroup_fence_operand(low);
    warpgroup_fence_operand(high);
    warpgroup_fence_operand(weights);
    wgmma_fence();
    // One after the other, so that the first columns are given up sooner.
    issue_columns(low, weights, values);
    issue_columns(high, weights, values + (kColumns / 64 * kPanelBytes >> 4));
    barrier_release(s.empty(stage.index, kRopePart), lane);
    wgmma_wait<1>();
    barrier_release(s.empty(stage.index, 2 * half), lane);
    wgmma_wait<0>();
    warpgroup_fence_operand(low);
    warpgroup_fence_operand(high);
    warpgroup_fence_operand(weights);
    barrier_release(s.empty(stage.index, 2 * half + 1), lane);
    stage.advance();
  }

  // Writes row r of the lane's two as bf16. The lanes of a quad swap, so that each writes 16 bytes
  // and the quad 64 neighbouring ones.
  template <int r>
  __device__ __forceinline__ void write_bf16(char* base, int column, const float (&o)[kCount],
                                             float norm, bool live) const {
    const bool odd = lane & 1, upper = lane & 2;
    auto* to = reinterpret_cast<uint4*>(base + 2 * (column + 8 * (lane & 3)));
#pragma unroll
    for (int i = 0; i < kCount; i += 16) {  // four tiles of 8 columns, of which the lane has two
      uint32_t w[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        w[t] = pack2<__nv_bfloat16>(o[i + 4 * t + 2 * r] * norm, o[i + 4 * t + 2 * r + 1] * norm);
      }
      // Now the lane gets tile lane % 4: of two tiles its own columns and those of lane ^ 2, ...
      const uint32_t own[2] = {upper ? w[2] : w[0], upper ? w[3] : w[1]};
      const uint32_t got[2] = {__shfl_xor_sync(~0u, upper ? w[0] : w[2], 2),
                               __shfl_xor_sync(~0u, upper ? w[1] : w[3], 2)};
      // ... and of one of them those of lane ^ 1 and lane ^ 3.
      const uint32_t a = odd ? own[1] : own[0], b = odd ? got[1] : got[0];
      const uint32_t other_a = __shfl_xor_sync(~0u, odd ? own[0] : own[1], 1);
      const uint32_t other_b = __shfl_xor_sync(~0u, odd ? got[0] : got[1], 1);
      const uint2 near = odd ? make_uint2(other_a, a) : make_uint2(a, other_a);
      const uint2 far = odd ? make_uint2(other_b, b) : make_uint2(b, other_b);
      if (live) {
        to[i / 4] = upper ? make_uint4(far.x, far.y, near.x, near.y)
                          : make_uint4(near.x, near.y, far.x, far.y);
      }
    }
  }

  // The same as floats: a pair of lanes has 8 columns of two tiles, and each lane writes one half.
  template <int r>
  __device__ __forceinline__ void write_float(char* base, int column, const float (&o)[kCount],
                                              float norm, bool live) const {
    const bool odd = lane & 1;
    auto* to = reinterpret_cast<float4*>(base) + column / 4 + 2 * odd + ((lane >> 1) & 1);
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {  // two tiles of 8 columns
      const float* even_tile = o + i + 2 * r;
      const float* odd_tile = even_tile + 4;
      float own[2], got[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        own[j] = (odd ? odd_tile[j] : even_tile[j]) * norm;
        got[j] = __shfl_xor_sync(~0u, (odd ? even_tile[j] : odd_tile[j]) * norm, 1);
      }
      if (live) {
        to[i / 2] = odd ? make_float4(got[0], got[1], own[0], own[1])
                        : make_float4(own[0], own[1], got[0], got[1]);
      }
    }
  }

  // Writes row r, 128 columns from `column` on.
  template <int r>
  __device__ __forceinline__ void write_row(const Results& to, int column, const float (&o)[kCount],
                                            float norm) const {
    const bool live = to.live[r], exact = p.f.float_partials && !to.direct[r];
    if (__any_sync(~0u, live && exact)) write_float<r>(to.row[r], column, o, norm, live && exact);
    if (__any_sync(~0u, live && !exact)) write_bf16<r>(to.row[r], column, o, norm, live && !exact);
  }

  // Writes the results of a part of a unit, one half of the columns after the other by the same
  // code, which keeps the kernel within the 64 KB that a launch fetches ahead.
  __device__ __forceinline__ void write_results(const Results& to, float (&low)[kCount],
                                                const float (&high)[kCount],
                                                const SoftmaxState (&state)[2]) const {
    float norm[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      norm[r] = normalizer(state[r]);
      float* lses = to.direct[r] ? p.f.lse : p.f.partial_lse;
      if (half == 0 && to.live[r] && (lane & 3) == 0 && lses) lses[to.lse[r]] = lse(state[r]);
    }
#pragma unroll 1
    for (int column = half * kHalfColumns;; column += kColumns) {
      write_row<0>(to, column, low, norm[0]);
      write_row<1>(to, column, low, norm[1]);
      if (computed_here(column % kHalfColumns != 0)) break;
#pragma unroll
      for (int i = 0; i < kCount; ++i) low[i] = high[i];
    }
  }

  __device__ __forceinline__ void run() {
    float low[kCount], high[kCount];
    for (;; work.advance()) {
      barrier_wait(s.unit_full(work.index), work.phase);
      const WorkUnit unit = s.board().units[work.index];
      const int tokens = __shfl_sync(~0u, unit.num_tokens, 0);
      if (tokens < 0) break;
      const int rows = __shfl_sync(~0u, unit.num_rows, 0);
#pragma unroll 1
      for (int row = 0; row < rows; row += kTileRows) {
        const Results to = results_of(unit, row);
        SoftmaxState state[2] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) low[i] = high[i] = 0.0f;
#pragma unroll 1
        for (int left = tokens;; left -= kTileTokens) {
          const bool last = left <= kTileTokens;
          add_tile(low, high, last, state);
          if (last) break;
        }
        write_results(to, low, high, state);
      }
      barrier_release(s.unit_empty(work.index), lane);
    }
  }
};

#endif  // PAT_WGMMA

}  // namespace pat::mla
