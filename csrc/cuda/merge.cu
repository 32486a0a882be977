// SPDX-License-Identifier: Apache-2.0
// The merge kernel (PAT section 7): the partial results of queries with several splits, joined by
// online softmax. The plan, the rows and the SMs fix the order, so that results are bitwise the
// same from run to run. It also writes zeros for the queries that no item covers: those without
// tokens and those that pad a batch.
#include <iterator>

#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/merge_splits.cuh"
#include "merge_rule.h"

namespace pat {
namespace {

constexpr int kWarps = 4;  // of a CTA whose warps share nothing

// The QuerySplits of a query; none for a row that the plan does not cover.
__device__ __forceinline__ int2 splits_of(const MergeParams& p, int query) {
  if (query >= p.plan->num_queries) return {0, 0};
  const auto* base = reinterpret_cast<const char*>(p.plan) + p.plan->queries_offset;
  return __ldg(reinterpret_cast<const int2*>(base) + query);
}

constexpr int block_warps(int sharing) { return sharing == 1 ? kWarps : sharing; }

// Joins what the first `sharing` warps of a CTA have, in their order, in warp 0. Returns whether
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
  // The first CTA always waits, so that this kernel never ends before the forward does.
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
  const MergeParams merge{params.plan, params.partials,       params.partial_lse,
                          params.out,  params.out_stride_row, params.out_stride_head,
                          params.lse,  params.num_rows,       params.num_q_heads,
                          params.sinks};
  check(cudaLaunchKernelEx(&config, merge_kernel<T, kHeadDim, kFloat, kHeads, kAhead, kSharing>,
                           merge),
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

template <typename T>
void launch_as(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_rows} * params.num_q_heads;
  const size_t rule = merge_rule(rows, current_device().num_sms);
  with_head_dim(params.head_dim, [&](auto dim) {
    auto* launch =
        params.partial_bytes == 4 ? launch_rule<T, dim, true> : launch_rule<T, dim, false>;
    launch(params, rule, overlap, stream);
  });
}

}  // namespace

void launch_merge(const DecodeParams& params, bool overlap, cudaStream_t stream) {
  auto* launch = params.type == DType::kBF16 ? launch_as<__nv_bfloat16> : launch_as<__half>;
  launch(params, overlap, stream);
}

}  // namespace pat
