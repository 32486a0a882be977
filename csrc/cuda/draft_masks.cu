// SPDX-License-Identifier: Apache-2.0
// The kernel that reads the masks of draft trees, once a step: one CTA a query.
#include "cuda/error.h"
#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace pat {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The sum of `value` over the threads of the CTA.
__device__ int64_t sum_of(int64_t value) {
  __shared__ int64_t sums[kWarps];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  int64_t total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  return total;
}

__global__ void __launch_bounds__(kThreads) draft_masks_kernel(const DraftMaskArgs args) {
  const auto length = [&](int i) { return integer_at(args.seq_lens, args.seq_lens_bytes, i); };
  const int query = blockIdx.x, tokens = args.draft_tokens;
  int64_t before = 0, prefix = 0;  // tokens of the queries before this one, and its own
  if (args.seq_lens) {
    int64_t part = 0;
    for (int i = threadIdx.x; i < query; i += kThreads) part += length(i);
    before = sum_of(part);
    prefix = length(query);
  }
  const int64_t first = (before + int64_t{query} * tokens) * tokens + prefix;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < tokens; row += kWarps) {
    const int64_t first_of_row = first + row * (prefix + tokens);
    uint32_t halves[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 32 * half + lane;
      const int64_t cell = first_of_row + token;
      const bool given = token < tokens && cell >= 0 && cell < args.num_cells;
      halves[half] = __ballot_sync(~0u, given && args.cells[cell]);
    }
    if (lane == 0) {
      args.masks[int64_t{query} * tokens + row] = uint64_t{halves[1]} << 32 | halves[0];
    }
  }
}

}  // namespace

void draft_masks_cuda(const DraftMaskArgs& args, void* stream) {
  if (args.num_rows == 0) return;
  auto* s = static_cast<cudaStream_t>(stream);
  draft_masks_kernel<<<args.num_rows, kThreads, 0, s>>>(args);
  check(cudaGetLastError(), "draft mask kernel: launch");
}

}  // namespace pat
