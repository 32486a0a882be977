// SPDX-License-Identifier: Apache-2.0
// The merge kernel (PAT section 7): the partial results of queries with several splits, joined by
// online softmax. The plan, the rows and the SMs fix the order, so that results are bitwise the
// same from run to run. It also writes zeros for the queries that no item covers: those without
// tokens and those that pad a batch.
#include <iterator>

#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "merge_rule.h"
#include "state.h"

namespace pat {
namespace {

// What the merge needs of DecodeParams. It is passed by value: as a __grid_constant__ small batches
// take 0.2 us longer (docs/experiments/host.md).
struct MergeParams {
  const PlanHeader* plan;
  const char* partials;
  const float* partial_lse;
  char* out;
  int64_t out_stride_query, out_stride_head;
  float* lse;
  int32_t num_rows, num_q_heads;

  explicit MergeParams(const DecodeParams& p)
      : plan(p.plan),
        partials(p.partials),
        partial_lse(p.partial_lse),
        out(p.out),
        out_stride_query(p.out_stride_query),
        out_stride_head(p.out_stride_head),
        lse(p.lse),
        num_rows(p.num_rows),
        num_q_heads(p.num_q_heads) {}
};

constexpr int kWarps = 4;  // of a block whose warps share nothing

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

// The QuerySplits of a query; none for a row that the plan does not cover.
__device__ __forceinline__ int2 splits_of(const MergeParams& p, int query) {
  if (query >= p.plan->num_queries) return {0, 0};
  const auto* base = reinterpret_cast<const char*>(p.plan) + p.plan->queries_offset;
  return __ldg(reinterpret_cast<const int2*>(base) + query);
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
    const float norm = void_result ? NAN : normalizer(state[h]);
    auto* out = reinterpret_cast<T*>(p.out + query * p.out_stride_query + head * p.out_stride_head);
    Raw<kValues * 2> result;
#pragma unroll
    for (int j = 0; j < kValues / 2; ++j) {
      result.words[j] = pack2<T>(o[h][2 * j] * norm, o[h][2 * j + 1] * norm);
    }
    *reinterpret_cast<Raw<kValues * 2>*>(out + lane * kValues) = result;
    if (p.lse && lane == 0) {
      p.lse[static_cast<int64_t>(query) * p.num_q_heads + head] = void_result ? NAN : lse(state[h]);
    }
  }
};

constexpr int block_warps(int sharing) { return sharing == 1 ? kWarps : sharing; }

// Joins what the first `sharing` warps of a block have, in their order, in warp 0. Returns whether
// this is warp 0.
template <typename Result, int kHeadDim, int kSharing>
__device__ __forceinline__ bool gather(Result& joined, int warp, int sharing) {
  __shared__ float parts[kSharing - 1][kHeadDim];
  __shared__ SoftmaxState states[kSharing - 1];
  if (sharing <= 1) return true;
  const int lane = threadIdx.x & 31;
  if (warp > 0) {
#pragma unroll
    for (int j = 0; j < Result::kValues; ++j) parts[warp - 1][lane + 32 * j] = joined.o[0][j];
    if (lane == 0) states[warp - 1] = joined.state[0];
  }
  named_barrier(1, 32 * sharing);
  if (warp > 0) return false;
  joined.add_warps(parts, states, sharing - 1);
  return true;
}

// kSharing warps take kHeads heads of a query, and each loads kAhead splits at once, so that it
// waits for memory as rarely as possible. Of warps that share a head each takes the next kAhead
// splits in turn.
template <typename T, int kHeadDim, bool kFloat, int kHeads, int kAhead, int kSharing>
__global__ void __launch_bounds__(block_warps(kSharing) * 32) merge_kernel(const MergeParams p) {
  static_assert(kSharing == 1 || kHeads == 1);
  using Result = Joined<T, kHeadDim, kFloat, kHeads>;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  const int task = kSharing == 1 ? blockIdx.x * kWarps + warp : blockIdx.x;
  const int tasks_per_query = (p.num_q_heads + kHeads - 1) / kHeads;
  const int query = task / tasks_per_query;
  const int first_head = (task - query * tasks_per_query) * kHeads;
  if (query >= p.num_rows) return;

  // If the plan has more queries than there is room for, the forward did not run, and the output
  // must not look like a result.
  const bool too_large = p.plan->num_queries > p.num_rows;
  int2 splits = splits_of(p, query);
  if (too_large) splits.y = 0;
  const int mine = kSharing == 1 ? 0 : warp * kAhead;  // this warp's first split
  if (mine > 0 && mine >= splits.y) return;
  const bool written = splits.y == 1;  // by its item
  if (written && blockIdx.x > 0) return;
  // The first block always waits, so that this kernel never ends before the forward does.
  await_previous_kernel();
  if (written) return;

  Result joined;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) joined.state[h] = empty_state();
  const int64_t first_part = static_cast<int64_t>(splits.x + mine) * p.num_q_heads + first_head;
  const float* lses = p.partial_lse + first_part;
  const char* parts = p.partials + (first_part * 32 + lane) * Result::kBytes;
  const int num_heads = p.num_q_heads - first_head;
  const uint64_t step = static_cast<uint64_t>(kSharing * kAhead) * p.num_q_heads;
#pragma unroll 1
  for (int left = splits.y - mine; left > 0; left -= kSharing * kAhead) {
    joined.template add<kAhead>(lses, parts, left, p.num_q_heads, num_heads);
    lses += step;
    parts += step * 32 * Result::kBytes;
  }
  if constexpr (kSharing > 1) {
    const int sharing = min((splits.y + kAhead - 1) / kAhead, kSharing);
    if (!gather<Result, kHeadDim, kSharing>(joined, warp, sharing)) return;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= num_heads) break;
    joined.write(p, query, first_head + h, h, too_large);
  }
}

template <typename T, int kHeadDim, bool kFloat, int kHeads, int kAhead, int kSharing>
void launch_warps(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  const int64_t tasks = static_cast<int64_t>(params.num_rows) * kSharing *
                        ((params.num_q_heads + kHeads - 1) / kHeads);
  cudaLaunchConfig_t config{};
  constexpr int kBlock = block_warps(kSharing);
  config.gridDim = dim3(static_cast<unsigned>((tasks + kBlock - 1) / kBlock));
  config.blockDim = dim3(kBlock * 32);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap && current_device().arch >= 90 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, merge_kernel<T, kHeadDim, kFloat, kHeads, kAhead, kSharing>,
                           MergeParams(params)),
        "merge kernel: launch");
}

// Launches the kernel of rule `rule`; kRule counts up to it.
template <typename T, int kHeadDim, bool kFloat, size_t kRule = 0>
void launch_rule(const DecodeParams& params, size_t rule, bool overlap, cudaStream_t stream) {
  if constexpr (kRule < std::size(kMergeRules)) {
    constexpr MergeRule kThis = kMergeRules[kRule];
    if (rule != kRule) {
      return launch_rule<T, kHeadDim, kFloat, kRule + 1>(params, rule, overlap, stream);
    }
    launch_warps<T, kHeadDim, kFloat, kThis.heads, kThis.ahead, kThis.sharing>(params, overlap,
                                                                               stream);
  }
}

template <typename T, int kHeadDim, bool kFloat>
void launch_as(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_rows} * params.num_q_heads;
  const size_t rule = merge_rule(rows, current_device().num_sms);
  launch_rule<T, kHeadDim, kFloat>(params, rule, overlap, stream);
}

template <typename T, int kHeadDim>
void launch_dim(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  if (params.partial_bytes == 4) {
    launch_as<T, kHeadDim, true>(params, overlap, stream);
  } else {
    launch_as<T, kHeadDim, false>(params, overlap, stream);
  }
}

template <typename T>
void launch_type(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  switch (params.head_dim) {
    case 64:
      return launch_dim<T, 64>(params, overlap, stream);
    case 128:
      return launch_dim<T, 128>(params, overlap, stream);
    default:
      return launch_dim<T, 256>(params, overlap, stream);
  }
}

}  // namespace

void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  if (params.type == CudaType::kBF16) {
    launch_type<__nv_bfloat16>(params, overlap, stream);
  } else {
    launch_type<__half>(params, overlap, stream);
  }
}

}  // namespace pat
