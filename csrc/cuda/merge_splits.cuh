// SPDX-License-Identifier: Apache-2.0
// What a warp of the merge kernel does: loads splits of a query and joins them by online softmax.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "cuda/sinks.cuh"
#include "state.h"

namespace pat {

// What the merge needs of DecodeParams. It is passed by value: as a __grid_constant__ small batches
// take 0.2 us longer (docs/lessons.md).
struct MergeParams {
  const PlanHeader* plan;
  const char* partials;
  const float* partial_lse;
  char* out;
  int64_t out_stride_query, out_stride_head;
  float* lse;
  int32_t num_rows, num_q_heads;
  Sinks sinks;
};

// A lane's neighbouring values of a partial output, kBytes in all, as they lie in memory.
template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Raw {
  uint32_t words[kBytes / 4];
};

template <int kBytes>
__device__ __forceinline__ Raw<kBytes> load_raw(const void* from) {
  Raw<kBytes> raw;
  const auto* p = static_cast<const char*>(from);
  if constexpr (kBytes == 4) {
    raw.words[0] = __ldcg(reinterpret_cast<const uint32_t*>(p));
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(raw.words) = __ldcg(reinterpret_cast<const uint2*>(p));
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      reinterpret_cast<uint4*>(raw.words)[i] = __ldcg(reinterpret_cast<const uint4*>(p) + i);
    }
  }
  return raw;
}

template <typename T, bool kFloat>
__device__ __forceinline__ float value(const uint32_t* words, int i) {
  if constexpr (kFloat) return __uint_as_float(words[i]);
  const uint32_t bits = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// What a warp has of kHeads heads of one query: a lane kValues neighbouring values of each output.
template <typename T, int kHeadDim, bool kFloat, int kHeads>
struct Joined {
  static constexpr int kValues = kHeadDim / 32;
  static constexpr int kBytes = kValues * (kFloat ? 4 : 2);
  float o[kHeads][kValues]{};
  SoftmaxState state[kHeads];

  // Joins the first kAhead of `count` splits, which it loads at once. `lses`, `parts`: of the first
  // split and head.
  template <int kAhead>
  __device__ __forceinline__ void add(const float* lses, const char* parts, int count,
                                      uint32_t num_q_heads, int num_heads) {
    Raw<kBytes> part[kHeads][kAhead];
    SoftmaxState states[kHeads][kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        states[h][i] = empty_state();
        if (i < count && h < num_heads) {
          // One instruction an address, as the stride has 32 bits.
          const uint64_t after = static_cast<uint64_t>(num_q_heads * 32 * kBytes) * i;
          part[h][i] = load_raw<kBytes>(parts + after + h * 32 * kBytes);
          states[h][i] = stored_state(__ldcg(lses + static_cast<uint64_t>(num_q_heads) * i + h));
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      SoftmaxState total = state[h];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) total.max = fmaxf(total.max, states[h][i].max);
      const float keep = rescale(state[h].max, total.max);
      total.sum *= keep;
#pragma unroll
      for (int j = 0; j < kValues; ++j) o[h][j] *= keep;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= count) break;
        const float weight = rescale(states[h][i].max, total.max);
        total.sum = fmaf(states[h][i].sum, weight, total.sum);
#pragma unroll
        for (int j = 0; j < kValues; ++j) {
          o[h][j] = fmaf(value<T, kFloat>(part[h][i].words, j), weight, o[h][j]);
        }
      }
      state[h] = total;
    }
  }

  // Joins what `count` other warps have of the same head: `parts` [count, head_dim].
  __device__ __forceinline__ void add_warps(const float (*parts)[kHeadDim],
                                            const SoftmaxState* of_parts, int count) {
    static_assert(kHeads == 1);
    SoftmaxState total = state[0];
#pragma unroll 1
    for (int w = 0; w < count; ++w) total.max = fmaxf(total.max, of_parts[w].max);
    const float keep = rescale(state[0].max, total.max);
    total.sum *= keep;
#pragma unroll
    for (int j = 0; j < kValues; ++j) o[0][j] *= keep;
#pragma unroll 1
    for (int w = 0; w < count; ++w) {
      const float weight = rescale(of_parts[w].max, total.max);
      total.sum = fmaf(of_parts[w].sum, weight, total.sum);
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        o[0][j] = fmaf(parts[w][(threadIdx.x & 31) + 32 * j], weight, o[0][j]);
      }
    }
    state[0] = total;
  }

  // Writes head `h` as output `head` of a query; NaN if `void_result`.
  __device__ __forceinline__ void write(const MergeParams& p, int query, int head, int h,
                                        bool void_result) const {
    const int lane = threadIdx.x & 31;
    SoftmaxState total = state[h];
    float norm = normalizer(total);
    if (p.sinks.values) [[unlikely]] {
      total = with_sink(total, sink_of(p.sinks, head));
      norm = share(state[h].max, total);
    }
    if (void_result) norm = NAN;
    auto* out = reinterpret_cast<T*>(p.out + query * p.out_stride_query + head * p.out_stride_head);
    Raw<kValues * 2> result;
#pragma unroll
    for (int j = 0; j < kValues / 2; ++j) {
      result.words[j] = pack2<T>(o[h][2 * j] * norm, o[h][2 * j + 1] * norm);
    }
    *reinterpret_cast<Raw<kValues * 2>*>(out + lane * kValues) = result;
    if (p.lse && lane == 0) {
      p.lse[static_cast<int64_t>(query) * p.num_q_heads + head] = void_result ? NAN : lse(total);
    }
  }
};

}  // namespace pat
