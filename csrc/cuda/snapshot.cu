// SPDX-License-Identifier: Apache-2.0
// The snapshot kernel: copies the slots that a plan's items read from SGLang's req_to_token into
// the list, so that SGLang may change the table for the next batch while this one's layers run.
// What each half begins with is written down behind it: first_units.cu.
#include "cuda/error.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"

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

// kDrafts: a query has several draft tokens.
template <bool kDrafts>
struct Snapshot {
  const SnapshotArgs& args;
  const ItemSegments* item_segments;
  const Segment* segments;
  int32_t* list;
  int group;  // packed rows of a query

  // Tokens that a segment has in this step. A query whose length the plan does not hold for gets no
  // more than the segment's room in the list, and nothing beyond its row of the table.
  __device__ __forceinline__ int tokens_of(const Segment& s) const {
    if (s.kv_len != kDynamic) return s.kv_len;
    const int64_t given = integer_at(args.seq_lens, args.seq_lens_bytes, s.query);
    const auto length = static_cast<int>(max(int64_t{0}, min(given, args.req_to_token_width)));
    return max(0, min(length - s.kv_start, s.room));
  }

  __device__ __forceinline__ const int32_t* slots_of(const Segment& s) const {
    const int64_t row = integer_at(args.rows, args.rows_bytes, s.query);
    return args.req_to_token + row * args.req_to_token_stride + s.kv_start;
  }

  // Lists the tokens of an item that is no branch. `listed`: another item does.
  __device__ __forceinline__ void list_segment(Item& item, const Segment& s, bool listed) const {
    const int tokens = tokens_of(s);
    if (blockIdx.y == 0 && threadIdx.x == 0) item.tokens = tokens;
    if (listed) return;
    const int32_t* from = slots_of(s);
    int32_t* to = list + item.list_start;
#pragma unroll 4
    for (int t = blockIdx.y * kThreads + threadIdx.x; t < tokens; t += kParts * kThreads) {
      to[t] = __ldg(from + t);
    }
  }

  // Narrows the row masks of the last tokens of a tail of a branch to the draft tokens that attend
  // to them. `s` comes from list_branch()'s `found`: there `room` is where the segment
  // begins in the list. All lanes of a warp call it, which wrote the masks before.
  __device__ __forceinline__ void mask_drafts(const Segment& s, int lane) const {
    const int head_group = group / args.draft_tokens;
    __syncwarp();
    for (int draft = 1 + lane; draft < args.draft_tokens; draft += 32) {
      const int first = s.first_member * group + draft * head_group;
      const int count = group - draft * head_group;
      args.row_masks[s.room + s.kv_len - args.draft_tokens + draft] =
          static_cast<uint16_t>(first | count << kRowCountShift);
    }
  }

  // Lists the tokens of a branch, one segment after the other, and the row mask of each. `found`:
  // [kBranchSegments] in shared memory; kv_len are the tokens in this step and room is where they
  // begin in the list.
  __device__ void list_branch(Item& item, const ItemSegments& range, Segment* found,
                              int* sums) const {
    const bool mine = static_cast<int>(threadIdx.x) < range.num_segments;
    Segment segment{};
    if (mine) {
      segment = segments[range.first_segment + threadIdx.x];
      segment.kv_len = tokens_of(segment);
    }
    const int2 at = scan(segment.kv_len, sums);
    segment.room = item.list_start + at.x;
    if (mine) found[threadIdx.x] = segment;
    if (blockIdx.y == 0 && threadIdx.x == 0) item.tokens = at.y;
    __syncthreads();
    const int lane = threadIdx.x & 31;
    const int warps = kParts * kThreads / 32;
    for (int i = blockIdx.y * (kThreads / 32) + threadIdx.x / 32; i < range.num_segments;
         i += warps) {
      const Segment s = found[i];
      const int32_t* from = slots_of(s);
      const int row_mask = s.first_member * group | s.num_queries * group << kRowCountShift;
#pragma unroll 4
      for (int t = lane; t < s.kv_len; t += 32) {
        list[s.room + t] = __ldg(from + t);
        args.row_masks[s.room + t] = static_cast<uint16_t>(row_mask);
      }
      if constexpr (kDrafts) {
        // A tail that is too short for them is of a sequence that the plan is not for.
        if (s.kv_len >= args.draft_tokens && segments[range.first_segment + i].kv_len == kDynamic) {
          mask_drafts(s, lane);
        }
      }
    }
    __syncthreads();  // before the next branch overwrites `found`
  }
};

template <bool kDrafts>
__global__ void __launch_bounds__(kThreads) snapshot_kernel(const SnapshotArgs args) {
  const PlanHeader header = *args.plan;
  if (header.num_queries > args.num_rows) return;
  auto* plan = reinterpret_cast<char*>(args.plan);
  auto* items = reinterpret_cast<Item*>(plan + header.items_offset);
  const Snapshot<kDrafts> snapshot{
      args, reinterpret_cast<const ItemSegments*>(plan + header.item_segments_offset),
      reinterpret_cast<const Segment*>(plan + header.segments_offset), header.list,
      (kDrafts ? header.draft_tokens : 1) * (header.num_q_heads / header.num_kv_heads)};
  __shared__ int sums[kThreads / 32];
  __shared__ Segment found[kBranchSegments];
  for (int i = blockIdx.x; i < header.num_items; i += gridDim.x) {
    const ItemSegments range = snapshot.item_segments[i];
    if (items[i].kind == ItemKind::kBranch) {
      snapshot.list_branch(items[i], range, found, sums);
    } else {
      // Of the row tiles of a piece, which mostly stand side by side, one lists the tokens.
      const bool listed = i > 0 && items[i - 1].list_start == items[i].list_start;
      snapshot.list_segment(items[i], snapshot.segments[range.first_segment], listed);
    }
  }
}

}  // namespace

void snapshot_cuda(const SnapshotArgs& args, void* stream) {
  if (args.num_rows == 0) return;
  auto* s = static_cast<cudaStream_t>(stream);
  const dim3 grid(2 * current_device().num_sms, kParts);
  auto* kernel = args.draft_tokens > 1 ? snapshot_kernel<true> : snapshot_kernel<false>;
  kernel<<<grid, kThreads, 0, s>>>(args);
  check(cudaGetLastError(), "snapshot kernel: launch");
  if (has_first_units(args.launch)) launch_first_units(args, s);
}

}  // namespace pat
