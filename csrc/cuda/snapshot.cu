// SPDX-License-Identifier: Apache-2.0
// The snapshot kernel: copies what a plan reads of SGLang's tables into buffers of ours, so that
// the scheduler may go on to the next batch while the layers of this one run.
#include "cuda/decode.h"
#include "cuda/error.h"

namespace pat {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 8;  // CTAs that share the tokens of an item

template <typename Row, typename Length>
__global__ void __launch_bounds__(kThreads) snapshot_kernel(const SnapshotArgs args) {
  const auto* rows = static_cast<const Row*>(args.rows);
  const auto* seq_lens = static_cast<const Length*>(args.seq_lens);
  // Bounded by the buffer, so that no length reaches beyond it.
  const auto length = [&](int row) {
    const auto given = static_cast<int64_t>(seq_lens[row]);
    return static_cast<int>(max(int64_t{0}, min(given, args.slots_stride)));
  };
  if (args.plan->num_queries > args.num_rows) return;
  auto* items =
      reinterpret_cast<Item*>(reinterpret_cast<char*>(args.plan) + args.plan->items_offset);
  for (int i = blockIdx.x; i < args.plan->num_items; i += gridDim.x) {
    Item& item = items[i];
    const int end = item.kv_len == kDynamic ? length(item.row) : item.kv_start + item.kv_len;
    if (blockIdx.y == 0 && threadIdx.x == 0) item.tokens = max(end - item.kv_start, 0);
    const int32_t* from = args.req_to_token + rows[item.row] * args.req_to_token_stride;
    int32_t* to = args.slots + item.row * args.slots_stride;
#pragma unroll 4
    for (int t = item.kv_start + blockIdx.y * kThreads + threadIdx.x; t < end;
         t += kParts * kThreads) {
      to[t] = __ldg(from + t);
    }
  }
}

template <typename Row, typename Length>
void launch_as(const SnapshotArgs& args, cudaStream_t stream) {
  const dim3 grid(2 * current_device().num_sms, kParts);
  snapshot_kernel<Row, Length><<<grid, kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "snapshot kernel: launch");
}

}  // namespace

void snapshot_cuda(const SnapshotArgs& args, void* stream) {
  if (args.num_rows == 0) return;
  auto* s = static_cast<cudaStream_t>(stream);
  if (args.rows_bytes == 8) {
    args.seq_lens_bytes == 8 ? launch_as<int64_t, int64_t>(args, s)
                             : launch_as<int64_t, int32_t>(args, s);
  } else {
    args.seq_lens_bytes == 8 ? launch_as<int32_t, int64_t>(args, s)
                             : launch_as<int32_t, int32_t>(args, s);
  }
}

}  // namespace pat
