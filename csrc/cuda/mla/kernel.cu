// SPDX-License-Identifier: Apache-2.0
// Decode attention of MLA on Hopper: a persistent CTA per SM, of four warpgroups.
//
//   loaders     gather Q and K into shared memory, ahead of the others and across work units; the
//               first warp claims units as well (loader.cuh, units.cuh)
//   scores      Q K^T of a tile of 64 tokens and its softmax; weights to shared memory (scores.cuh)
//   output x 2  weights V, of 256 columns each, and the results (output.cuh)
//
// What they do forms a line, and each hands over by mbarriers: a tile is loaded, its scores are
// made, its weights replace its rope panel, and its columns are given up part by part when they are
// multiplied, so that the loaders refill them part by part. There is room for two tiles. So the
// matrix units run the products of one tile with V while the next one arrives, and the line never
// turns back: what raising a row's reference asks of the output is handed over with the tile's
// weights.
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/mla/launch.h"
#include "cuda/mla/loader.cuh"
#include "cuda/mla/merge.cuh"
#include "cuda/mla/output.cuh"
#include "cuda/mla/scores.cuh"

namespace pat::mla {
namespace {

__global__ void __launch_bounds__(kCtaThreads, 1) forward_kernel(const __grid_constant__ Params p) {
#if PAT_WGMMA
  extern __shared__ __align__(1024) uint8_t memory[];
  const Place s{shared_address(memory)};
  // __shfl_sync tells the compiler that a value is uniform in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int group = warp / kGroupWarps, warp_of_group = warp % kGroupWarps;
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (threadIdx.x == 0) s.init_barriers();
  __syncthreads();
  allow_next_kernel();
  // computed_here() makes the compiler place what comes first in the kernel's code first. Behind
  // its first 64 KB a launch does not fetch code ahead.
  if (computed_here(group == 0)) {
    warpgroup_reg_dealloc<kLoaderRegisters>();
    Loader{p, s, warp_of_group, lane, {p.f, s, PlanArrays(p.f), lane}}.run();
  } else if (computed_here(group == 1)) {
    warpgroup_reg_dealloc<kScoreRegisters>();
    Scorer{p, s, warp_of_group, lane}.run();
  } else {
    warpgroup_reg_alloc<kOutputRegisters>();
    Multiplier{p, s, group - 2, warp_of_group, lane, PlanArrays(p.f)}.run();
  }
#endif
}

// Writes down the item that each CTA begins with, its first slots, and the queries of its first
// rows: see FirstUnit. A CTA's is the first one of its two.
__global__ void first_units_kernel(const __grid_constant__ ForwardParams p, PlanHeader* header,
                                   FirstUnit* units) {
#if PAT_WGMMA
  const PlanArrays plan(p);
  const int thread = threadIdx.x, item = blockIdx.x;
  if (item == 0 && thread == 0) header->first_units = header->num_queries <= p.num_rows;
  if (item >= plan.num_items) return;
  RawItem raw;
  raw.read(plan.items, item);
  const WorkUnit unit = raw.unit(p, item);
  FirstUnit& to = units[2 * item];
  if (thread == 0) to.unit = unit;
  for (int i = 0; i < kGivenTiles; ++i) {
    const int token = i * kTileTokens + thread;
    to.slots[i][thread] = token < unit.num_tokens ? plan.list[unit.list_start + token] : 0;
  }
  int query = unit.member.query;
  if (!unit.single_query() && thread < unit.num_rows) {
    query = plan.member_of(p, unit.member_offset, thread).query;
  }
  to.rows[thread] = {static_cast<uint32_t>(query), 0, 0};
#endif
}

// sharing: warps that share a head's splits. As many as let all warps run at the same time, of
// which an SM has room for 64.
template <bool kFloat, int kSharing, int kAhead>
void launch_merge_as(const DecodeParams& a, int64_t tasks, cudaStream_t stream) {
  constexpr int kWarps = kMergeWarps<kSharing>;
  const int64_t ctas = kSharing == 1 ? (tasks + kWarps - 1) / kWarps : tasks;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const MergeParams merge{
      a.plan, a.partials, a.partial_lse, a.out,  a.out_stride_row, a.out_stride_head,
      a.lse,  a.num_rows, a.num_q_heads, a.sinks};
  check(cudaLaunchKernelEx(&config, merge_kernel<kFloat, kSharing, kAhead>, merge),
        "MLA merge kernel: launch");
}

template <bool kFloat>
void launch_merge_of(const DecodeParams& a, cudaStream_t stream) {
  const int64_t tasks = int64_t{a.num_rows} * a.num_q_heads * kMergeParts;
  const int64_t most = 64 * int64_t{current_device().num_sms};
  if (16 * tasks <= most) return launch_merge_as<kFloat, 16, 4>(a, tasks, stream);
  if (4 * tasks <= most) return launch_merge_as<kFloat, 4, 4>(a, tasks, stream);
  launch_merge_as<kFloat, 1, kFloat ? 4 : 8>(a, tasks, stream);
}

}  // namespace

void launch_forward(const ForwardParams& forward, const DecodeParams& a, cudaStream_t stream) {
  const Device& device = current_device();
  PAT_CHECK(device.arch == 90, "head_dim is ", kKeyDim, ": its kernels run on GPUs of compute ",
            "capability 9.0, this one has ", device.arch / 10, ".", device.arch % 10,
            ": let another attention run these layers");
  const Params params{forward, a.q_stride_row, a.q_rope, a.q_rope_stride_row, a.q_rope_stride_head};
  check(cudaFuncSetAttribute(forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes),
        "MLA forward kernel: shared memory");
  forward_kernel<<<device.num_sms, kCtaThreads, kSharedBytes, stream>>>(params);
  check(cudaGetLastError(), "MLA forward kernel: launch");
}

void launch_merge(const DecodeParams& a, cudaStream_t stream) {
  if (a.partial_bytes == 4) {
    launch_merge_of<true>(a, stream);
  } else {
    launch_merge_of<false>(a, stream);
  }
}

void launch_first_units(const SnapshotArgs& args, cudaStream_t stream) {
  ForwardParams p{};
  p.plan = args.plan;
  p.first_units = args.first_units;
  set_scheduling(p, args.num_rows, args.num_q_heads, args.num_kv_heads, args.draft_tokens);
  first_units_kernel<<<current_device().num_sms, kTileTokens, 0, stream>>>(p, args.plan,
                                                                           args.first_units);
  check(cudaGetLastError(), "MLA first units kernel: launch");
}

}  // namespace pat::mla
