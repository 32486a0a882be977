// SPDX-License-Identifier: Apache-2.0
// The epilogue of a work unit: where the results of its rows go, and how a warp writes them.
#pragma once

#include "cuda/forward/pipeline.cuh"
#include "cuda/sinks.cuh"

namespace pat {

// Where the results of rows lane / 4 and lane / 4 + 8 of 16 packed rows go. Looked up at a unit's
// beginning, so that its end neither waits for memory nor runs the code for it, which is often in
// no cache.
struct Destination {
  char* row[2];    // the head's row of the output or of a partial
  int32_t lse[2];  // where its LSE goes in p.lse or p.partial_lse
  bool direct[2];  // to the output
};

template <int kHeadDim, Drafts kDrafts>
__device__ __forceinline__ Destination destination_of(const ForwardParams& p,
                                                      const Control& control, const WorkUnit& unit,
                                                      int first_row) {
  Destination to;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + (lane_id() >> 2) + 8 * r;
    const int packed_row = unit.first_packed_row + row;
    const int member = (packed_row * p.group_magic) >> 16;
    int head = unit.kv_head * p.group + packed_row - member * p.group;
    if constexpr (kDrafts != kNoDrafts) {
      const int in_query = packed_row - member * p.group;
      const int draft_token = (in_query * p.head_group_magic) >> 16;
      head = unit.kv_head * p.head_group + in_query + draft_token * p.heads_between;
    }
    Member of = unit.member;
    if (row < unit.num_rows && !unit.single_query()) {
      of = load_member(control, unit.member_offset + member);
    }
    const bool direct = of.partial == kDirect;
    // Selected, not branched to: a jump into code that is in no cache waits for memory.
    const int64_t index = direct ? of.query : of.partial;
    const int64_t head_bytes = p.float_partials ? 4 * kHeadDim : 2 * kHeadDim;
    const int64_t query_stride = direct ? p.out_stride_query : p.num_q_heads * head_bytes;
    const int64_t head_stride = direct ? p.out_stride_head : head_bytes;
    to.row[r] = (direct ? p.out : p.partials) + index * query_stride + head * head_stride;
    to.lse[r] = static_cast<int32_t>(index) * p.num_q_heads + head;
    to.direct[r] = direct;
  }
  return to;
}

// Writes 8 * kTiles columns of a row, of which the lane holds columns 4 quad to 4 quad + 3 of each
// 16, the even ones first, as add_raw_values() leaves them. `o`: from the row's first value on.
// `exact`: as floats to `base`. `half`: see write_rows().
template <typename T, int kTiles>
__device__ __forceinline__ void write_quads(char* base, int column, const float* o, float norm,
                                            bool exact, bool half) {
  const int quad = lane_id() & 3;
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    if (2 * i == kTiles && half) break;
    const float* even = o + 4 * i;
    const float* odd = even + 4;
    const int at = column + 8 * i + 4 * quad;
    if (exact) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(base) + at) =
          make_float4(even[0] * norm, odd[0] * norm, even[1] * norm, odd[1] * norm);
    } else {
      *reinterpret_cast<uint2*>(reinterpret_cast<T*>(base) + at) = make_uint2(
          pack2<T>(even[0] * norm, odd[0] * norm), pack2<T>(even[1] * norm, odd[1] * norm));
    }
  }
}

// Joins the sinks of the query heads of row lane / 4 and, if kRows is 2, of row lane / 4 + 8 where
// a row's result is an output. `norm`: what that is multiplied with.
//
// Of the lanes of a quad, which have the same rows, each joins one, so that the code stands there
// once: kernels of fp8 have 130 KB of code, and 1 KB less took 1 % of their time (docs/lessons.md).
template <int kRows>
__device__ __forceinline__ void join_sinks(const Sinks& sinks, const Destination& to,
                                           SoftmaxState (&state)[2], float (&norm)[2]) {
  const bool second = kRows == 2 && (lane_id() & 1);
  const SoftmaxState tokens = second ? state[1] : state[0];
  const bool direct = second ? to.direct[1] : to.direct[0];
  const float sink = direct ? sink_of(sinks, second ? to.lse[1] : to.lse[0]) : -INFINITY;
  const SoftmaxState total = with_sink(tokens, sink);
  const float factor = share(tokens.max, total);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int from = kRows == 2 ? (lane_id() & ~1) + r : lane_id();
    state[r] = {__shfl_sync(~0u, total.max, from), __shfl_sync(~0u, total.sum, from)};
    norm[r] = __shfl_sync(~0u, factor, from);
  }
}

// Writes the results of row lane / 4 and, if kRows is 2, of row lane / 4 + 8 of 16 packed rows,
// which begin at row `first_row` of the unit: 8 * kTiles columns from `column` on. A query with one
// split gets its output, others a partial result. `state`: of all tokens of the unit. kFp8: of K
// and V, of which the lanes hold the columns that write_quads() writes. `half`: only the first half
// of these columns.
template <typename T, int kTiles, bool kFp8, int kRows, int kCount>
__device__ __forceinline__ void write_rows(const ForwardParams& p, const WorkUnit& unit,
                                           const Destination& to, int first_row, int column,
                                           float (&o)[kCount], const SoftmaxState (&state)[2],
                                           bool write_lse, bool half = false) {
  static_assert(kCount >= 4 * kTiles);
  const int lane = lane_id();
  const int quad = lane & 3;
  SoftmaxState total[2] = {state[0], state[1]};
  float norms[2] = {normalizer(total[0]), normalizer(total[1])};
  if (p.sinks.values) [[unlikely]]
    join_sinks<kRows>(p.sinks, to, total, norms);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + 8 * r >= unit.num_rows) break;
    const int row = first_row + (lane >> 2) + 8 * r;
    const bool live = row < unit.num_rows;
    const bool direct = to.direct[r];
    float norm = norms[r];
    if constexpr (kFp8) norm *= p.v_scale;
    float* lses = direct ? p.lse : p.partial_lse;
    if (write_lse && live && quad == 0 && lses) lses[to.lse[r]] = lse(total[r]);
    char* base = to.row[r];
    const bool exact = p.float_partials && !direct;
    if constexpr (kFp8) {
      if (live) write_quads<T, kTiles>(base, column, o + 2 * r, norm, exact, half);
      continue;
    }
    if (__any_sync(~0u, live && exact)) {
      if (live && exact) {
        float* dst = reinterpret_cast<float*>(base) + column + 2 * quad;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          if (2 * i == kTiles && half) break;
          *reinterpret_cast<float2*>(dst + 8 * i) =
              make_float2(o[4 * i + 2 * r] * norm, o[4 * i + 2 * r + 1] * norm);
        }
      }
    }
    if (!__any_sync(~0u, live && !exact)) continue;
    // The lanes of a quad swap, so that each writes 4 neighbouring columns and the quad a sector.
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      if (2 * i == kTiles && half) break;
      const uint32_t a = pack2<T>(o[4 * i + 2 * r] * norm, o[4 * i + 2 * r + 1] * norm);
      const uint32_t b = pack2<T>(o[4 * i + 4 + 2 * r] * norm, o[4 * i + 5 + 2 * r] * norm);
      const uint32_t kept = quad & 2 ? b : a;
      const uint32_t got = __shfl_xor_sync(~0u, quad & 2 ? a : b, 2);
      // quad 0: a0 a2, quad 1: a1 a3, quad 2: b2 b0, quad 3: b3 b1
      const uint32_t x = quad & 2 ? got : kept;  // pair quad & 1
      const uint32_t y = quad & 2 ? kept : got;  // pair (quad & 1) + 2
      const uint32_t other = __shfl_xor_sync(~0u, quad & 1 ? x : y, 1);
      if (live && !exact) {
        auto* dst = reinterpret_cast<T*>(base) + column + 8 * i + 4 * quad;
        *reinterpret_cast<uint2*>(dst) = quad & 1 ? make_uint2(other, y) : make_uint2(x, other);
      }
    }
  }
}

}  // namespace pat
