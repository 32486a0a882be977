// SPDX-License-Identifier: Apache-2.0
// The merge kernel (PAT section 7): the partial results of queries with several splits, joined by
// online softmax. A warp takes one query head; splits are joined in the plan's order, so that
// results are bitwise the same from run to run. It also writes the rows that no item covers:
// queries without tokens and the rows that pad a batch.
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "state.h"

namespace pat {
namespace {

constexpr int kWarps = 4;

struct MergeParams {
  const PlanHeader* plan;
  const void* partials;
  const float* partial_lse;
  void* out;
  int64_t out_stride_query, out_stride_head;  // elements
  float* lse;
  int32_t num_rows, num_q_heads;
};

// kBytes of a partial output as they lie in memory: the neighbouring values of a lane.
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

template <typename T, int kHeadDim, bool kFloat>
__global__ void __launch_bounds__(kWarps * 32) merge_kernel(const MergeParams p) {
  constexpr int kValues = kHeadDim / 32;  // of a lane
  constexpr int kBytes = kValues * (kFloat ? 4 : 2);
  constexpr int kAhead = 4;  // splits loaded at a time
  const int lane = threadIdx.x & 31;
  const int task = blockIdx.x * kWarps + threadIdx.x / 32;
  const int row = task / p.num_q_heads;
  const int head = task - row * p.num_q_heads;
  if (row >= p.num_rows) return;

  const int planned = p.plan->num_queries;
  int2 splits{0, 0};  // QuerySplits
  if (row < planned) {
    const auto* base = reinterpret_cast<const char*>(p.plan) + p.plan->queries_offset;
    splits = __ldg(reinterpret_cast<const int2*>(base) + row);
  }
  const bool too_large = planned > p.num_rows;  // the forward did not run
  // Also who has nothing to do waits: the end of this kernel stands for the end of the forward.
  await_previous_kernel();
  if (splits.y == 1 && !too_large) return;  // its item wrote the output
  if (too_large) splits.y = 0;

  float o[kValues]{};
  SoftmaxState state = empty_state();
  const int64_t first_part = static_cast<int64_t>(splits.x) * p.num_q_heads + head;
  const float* lses = p.partial_lse + first_part;
  const char* parts = static_cast<const char*>(p.partials) + (first_part * 32 + lane) * kBytes;
  const int64_t part_bytes = static_cast<int64_t>(p.num_q_heads) * 32 * kBytes;
  for (int first = 0; first < splits.y; first += kAhead) {
    Raw<kBytes> part[kAhead];
    SoftmaxState states[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      states[i] = empty_state();
      if (first + i < splits.y) {
        const int64_t split = first + i;
        part[i] = load_raw<kBytes>(parts + split * part_bytes);
        states[i] = stored_state(__ldcg(lses + split * p.num_q_heads));
      }
    }
    SoftmaxState total = state;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) total = join(total, states[i]);
    const float keep = rescale(state.max, total.max);
#pragma unroll
    for (int j = 0; j < kValues; ++j) o[j] *= keep;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float weight = rescale(states[i].max, total.max);
      if (first + i >= splits.y) break;
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        o[j] = fmaf(value<T, kFloat>(part[i].words, j), weight, o[j]);
      }
    }
    state = total;
  }

  // A plan that the buffers cannot hold must not pass for a result.
  const float norm = too_large ? NAN : normalizer(state);
  T* out = static_cast<T*>(p.out) + row * p.out_stride_query + head * p.out_stride_head;
  Raw<kValues * 2> result;
#pragma unroll
  for (int j = 0; j < kValues / 2; ++j) {
    result.words[j] = pack2<T>(o[2 * j] * norm, o[2 * j + 1] * norm);
  }
  *reinterpret_cast<Raw<kValues * 2>*>(out + lane * kValues) = result;
  if (p.lse && lane == 0) {
    p.lse[static_cast<int64_t>(row) * p.num_q_heads + head] = too_large ? NAN : lse(state);
  }
}

template <typename T, int kHeadDim, bool kFloat>
void launch_as(const MergeParams& params, bool overlap, cudaStream_t stream) {
  const int64_t tasks = static_cast<int64_t>(params.num_rows) * params.num_q_heads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((tasks + kWarps - 1) / kWarps));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap && current_device().arch >= 90 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, merge_kernel<T, kHeadDim, kFloat>, params),
        "merge kernel: launch");
}

template <typename T, int kHeadDim>
void launch_dim(const CudaDecodeArgs& args, const MergeParams& params, bool overlap,
                cudaStream_t stream) {
  if (args.partial_bytes == 4) {
    launch_as<T, kHeadDim, true>(params, overlap, stream);
  } else {
    launch_as<T, kHeadDim, false>(params, overlap, stream);
  }
}

template <typename T>
void launch_type(const CudaDecodeArgs& args, const MergeParams& params, bool overlap,
                 cudaStream_t stream) {
  switch (args.head_dim) {
    case 64:
      return launch_dim<T, 64>(args, params, overlap, stream);
    case 128:
      return launch_dim<T, 128>(args, params, overlap, stream);
    default:
      return launch_dim<T, 256>(args, params, overlap, stream);
  }
}

}  // namespace

void launch_merge(const CudaDecodeArgs& args, bool overlap, cudaStream_t stream) {
  const MergeParams params{args.plan, args.partials,         args.partial_lse,
                           args.out,  args.out_stride_query, args.out_stride_head,
                           args.lse,  args.num_rows,         args.num_q_heads};
  if (args.type == CudaType::kBF16) {
    launch_type<__nv_bfloat16>(args, params, overlap, stream);
  } else {
    launch_type<__half>(args, params, overlap, stream);
  }
}

}  // namespace pat
