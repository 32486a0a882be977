// SPDX-License-Identifier: Apache-2.0
// The merge of MLA: as merge.cu, with heads of 512 columns. A warp takes 256 columns of a head, and
// all that a lane loads or stores at once are 16 bytes beside those of the next lane.
#pragma once

#include "cuda/merge_splits.cuh"
#include "cuda/mla/shape.cuh"

namespace pat::mla {

inline constexpr int kMergeColumns = 256;  // of a warp
inline constexpr int kMergeParts = kValueDim / kMergeColumns;

// What a warp has of its columns of a head: a lane 8 values, columns 8 lane and on, or, of float
// partials, 4 lane and on and 128 + 4 lane and on.
template <bool kFloat>
struct JoinedColumns {
  static constexpr int kWords = kFloat ? 8 : 4;  // of a lane's columns of a partial
  float o[8]{};
  SoftmaxState state = empty_state();

  // Joins the first kAhead of `count` splits, which it loads at once. `lses`, `parts`: of the first
  // split, the lane's; `rows`: from a split to the next one, in heads.
  template <int kAhead>
  __device__ __forceinline__ void add(const float* lses, const char* parts, int count,
                                      uint32_t rows) {
    uint32_t words[kAhead][kWords];
    float lse[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      lse[i] = -INFINITY;
      if (i >= count) continue;
      const char* from = parts + uint64_t{rows * (kValueDim * (kFloat ? 4 : 2))} * i;
#pragma unroll
      for (int j = 0; j < kWords / 4; ++j) {
        *reinterpret_cast<uint4*>(words[i] + 4 * j) =
            __ldcg(reinterpret_cast<const uint4*>(from + 512 * j));
      }
      lse[i] = __ldcg(lses + uint64_t{rows} * i);
    }
    SoftmaxState total = state;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) total.max = fmaxf(total.max, lse[i]);
    const float keep = rescale(state.max, total.max);
    total.sum *= keep;
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] *= keep;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i >= count) break;
      const SoftmaxState part = stored_state(lse[i]);
      const float weight = rescale(part.max, total.max);
      total.sum = fmaf(part.sum, weight, total.sum);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        o[j] = fmaf(value<__nv_bfloat16, kFloat>(words[i], j), weight, o[j]);
      }
    }
    state = total;
  }

  // Joins what another warp has of the same columns.
  __device__ __forceinline__ void add_warp(const float (&part)[8], const SoftmaxState& of_part) {
    SoftmaxState total = state;
    total.max = fmaxf(total.max, of_part.max);
    const float keep = rescale(state.max, total.max), weight = rescale(of_part.max, total.max);
    total.sum = fmaf(of_part.sum, weight, total.sum * keep);
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] = fmaf(part[j], weight, o[j] * keep);
    state = total;
  }

  // Writes the columns, of which `out` is the first one; NaN if `void_result`.
  __device__ __forceinline__ void write(char* out, bool void_result) const {
    const int lane = threadIdx.x & 31;
    const float norm = void_result ? NAN : normalizer(state);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = pack2<__nv_bfloat16>(o[2 * j] * norm, o[2 * j + 1] * norm);
    }
    if constexpr (kFloat) {
      auto* to = reinterpret_cast<uint2*>(out);
      to[lane] = make_uint2(words[0], words[1]);
      to[32 + lane] = make_uint2(words[2], words[3]);
    } else {
      reinterpret_cast<uint4*>(out)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// Warps of a CTA; those that share nothing stand side by side.
template <int kSharing>
inline constexpr int kMergeWarps = kSharing == 1 ? 4 : kSharing;

// kSharing warps share the splits of a head's columns, and each takes the next kAhead in turn.
template <bool kFloat, int kSharing, int kAhead>
__global__ void __launch_bounds__(kMergeWarps<kSharing> * 32) merge_kernel(const MergeParams p) {
#if PAT_WGMMA
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int task = kSharing == 1 ? blockIdx.x * kMergeWarps<1> + warp : blockIdx.x;
  const int row = task / kMergeParts, part = task % kMergeParts;
  const int query = row / p.num_q_heads, head = row - query * p.num_q_heads;
  if (query >= p.num_rows) return;

  // If the plan has more queries than there is room for, the forward did not run, and the output
  // must not look like a result.
  const int num_queries = p.plan->num_queries;
  const bool too_large = num_queries > p.num_rows;
  int2 splits = {0, 0};
  if (query < num_queries && !too_large) {
    const auto* base = reinterpret_cast<const char*>(p.plan) + p.plan->queries_offset;
    splits = __ldg(reinterpret_cast<const int2*>(base) + query);
  }
  const int first = kSharing == 1 ? 0 : warp * kAhead;  // this warp's first split
  if (first > 0 && first >= splits.y) return;
  const bool written = splits.y == 1;  // by its item
  if (written && blockIdx.x > 0) return;
  // The first CTA always waits, so that this kernel never ends before the forward does.
  await_previous_kernel();
  if (written) return;

  JoinedColumns<kFloat> joined;
  constexpr int kBytes = kFloat ? 4 : 2;
  const int64_t at = int64_t{splits.x + first} * p.num_q_heads + head;
  const float* lses = p.partial_lse + at;
  const char* parts = p.partials + (at * kValueDim + part * kMergeColumns) * kBytes + 16 * lane;
  constexpr int kStep = kSharing * kAhead;
#pragma unroll 1
  for (int left = splits.y - first; left > 0; left -= kStep) {
    joined.template add<kAhead>(lses, parts, left, p.num_q_heads);
    lses += int64_t{kStep} * p.num_q_heads;
    parts += int64_t{kStep} * p.num_q_heads * kValueDim * kBytes;
  }
  if constexpr (kSharing > 1) {
    __shared__ float others[kSharing - 1][8][32];
    __shared__ SoftmaxState states[kSharing - 1];
    const int sharing = min((splits.y + kAhead - 1) / kAhead, kSharing);
    if (sharing > 1) {
      if (warp > 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j) others[warp - 1][j][lane] = joined.o[j];
        if (lane == 0) states[warp - 1] = joined.state;
      }
      named_barrier(1, 32 * sharing);
      if (warp > 0) return;
#pragma unroll 1
      for (int w = 0; w < sharing - 1; ++w) {
        float other[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) other[j] = others[w][j][lane];
        joined.add_warp(other, states[w]);
      }
    }
  }
  joined.write(
      p.out + query * p.out_stride_query + head * p.out_stride_head + part * kMergeColumns * 2,
      too_large);
  if (p.lse && part == 0 && lane == 0) p.lse[row] = too_large ? NAN : lse(joined.state);
#endif
}

}  // namespace pat::mla
