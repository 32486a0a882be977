// SPDX-License-Identifier: Apache-2.0
// The snapshot kernel: copies the slots that a plan's items read from SGLang's req_to_token into
// our own buffers, so that SGLang may change the table for the next batch while this one's layers
// run.
#include "cuda/decode.h"
#include "cuda/error.h"

namespace pat {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 8;  // CTAs that share an item's tokens
static_assert(kThreads == kBranchSegments);

// The sum of `value` over the threads before this one, and over all threads.
__device__ __forceinline__ int2 scan(int value, int* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  int before = value;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(~0u, before, i);
    if (lane >= i) before += other;
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  int total = 0;
  before -= value;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) before += total;
    total += sums[w];
  }
  return {before, total};
}

template <typename TableRow, typename Length>
__global__ void __launch_bounds__(kThreads) snapshot_kernel(const SnapshotArgs args) {
  const auto* table_rows = static_cast<const TableRow*>(args.rows);
  const auto* seq_lens = static_cast<const Length*>(args.seq_lens);
  // At most what a row of the buffer holds.
  const auto length = [&](int query) {
    const auto given = static_cast<int64_t>(seq_lens[query]);
    return static_cast<int>(max(int64_t{0}, min(given, args.slots_stride)));
  };
  if (args.plan->num_queries > args.num_rows) return;
  auto* plan = reinterpret_cast<char*>(args.plan);
  auto* items = reinterpret_cast<Item*>(plan + args.plan->items_offset);
  const auto* segments = reinterpret_cast<const Segment*>(plan + args.plan->segments_offset);
  const int group = args.plan->num_q_heads / args.plan->num_kv_heads;
  __shared__ int sums[kThreads / 32];
  __shared__ Segment found[kBranchSegments];  // kv_len: tokens in this step; room: where they begin
  // Lists the tokens of a branch, one segment after the other, and the row mask of each.
  const auto list_branch = [&](Item& item) {
    const bool mine = static_cast<int>(threadIdx.x) < item.partial;
    Segment segment{};
    if (mine) {
      segment = segments[item.row + threadIdx.x];
      const bool dynamic = segment.kv_len == kDynamic;
      const int tokens = dynamic ? length(segment.row) - segment.kv_start : segment.kv_len;
      segment.kv_len = max(0, min(tokens, segment.room));
    }
    const int2 at = scan(segment.kv_len, sums);
    segment.room = item.kv_start + at.x;
    if (mine) found[threadIdx.x] = segment;
    if (blockIdx.y == 0 && threadIdx.x == 0) item.tokens = at.y;
    __syncthreads();
    const int lane = threadIdx.x & 31;
    const int warps = kParts * kThreads / 32;
    for (int i = blockIdx.y * (kThreads / 32) + threadIdx.x / 32; i < item.partial; i += warps) {
      const Segment s = found[i];
      const int32_t* from =
          args.req_to_token + table_rows[s.row] * args.req_to_token_stride + s.kv_start;
      const int row_mask = s.first * group | s.num_queries * group << BranchList::kRowCountShift;
#pragma unroll 4
      for (int t = lane; t < s.kv_len; t += 32) {
        args.branches.slots[s.room + t] = __ldg(from + t);
        args.branches.row_masks[s.room + t] = static_cast<uint16_t>(row_mask);
      }
    }
    __syncthreads();  // before the next branch overwrites `found`
  };
  for (int i = blockIdx.x; i < args.plan->num_items; i += gridDim.x) {
    Item& item = items[i];
    if (item.kv_len == kBranch) {
      list_branch(item);
      continue;
    }
    const int end = item.kv_len == kDynamic ? length(item.row) : item.kv_start + item.kv_len;
    if (blockIdx.y == 0 && threadIdx.x == 0) item.tokens = max(end - item.kv_start, 0);
    const int32_t* from = args.req_to_token + table_rows[item.row] * args.req_to_token_stride;
    int32_t* to = args.slots + item.row * args.slots_stride;
#pragma unroll 4
    for (int t = item.kv_start + blockIdx.y * kThreads + threadIdx.x; t < end;
         t += kParts * kThreads) {
      to[t] = __ldg(from + t);
    }
  }
}

template <typename TableRow, typename Length>
void launch_as(const SnapshotArgs& args, cudaStream_t stream) {
  const dim3 grid(2 * current_device().num_sms, kParts);
  snapshot_kernel<TableRow, Length><<<grid, kThreads, 0, stream>>>(args);
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
