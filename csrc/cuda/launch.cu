// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>

#include "check.h"
#include "cuda/error.h"
#include "cuda/forward/pipeline.cuh"
#include "cuda/launch.h"
#include "cuda/mla/launch.h"

namespace pat {
namespace {

// Streams and events of Launch::kStreams on a device. They are never destroyed, because a captured
// graph may refer to them.
struct Forks {
  explicit Forks(int) {
    const auto event = [](cudaEvent_t* e) {
      check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "cudaEventCreate");
    };
    event(&forked);
    for (auto& e : joined) event(&e);
    for (auto& s : streams) {
      check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    }
  }
  std::array<cudaStream_t, kRowTiles.size() - 1> streams;
  std::array<cudaEvent_t, kRowTiles.size() - 1> joined;
  cudaEvent_t forked;
};

// For divisions of packed rows: exact below 65536 / divisor, which check_plan_cuda() has seen to.
uint32_t row_magic(int divisor) { return static_cast<uint32_t>((65536 + divisor - 1) / divisor); }

ForwardParams forward_params(const DecodeParams& decode) {
  ForwardParams p{};
  p.plan = decode.plan;
  p.q = decode.q;
  p.q_stride_query = decode.draft_tokens * decode.q_stride_row;
  p.q_stride_head = decode.q_stride_head;
  p.k = decode.k;
  p.v = decode.v;
  p.k_stride_slot = static_cast<uint32_t>(decode.k_stride_slot);  // check_decode() has looked
  p.k_stride_head = static_cast<uint32_t>(decode.k_stride_head);
  p.v_stride_slot = static_cast<uint32_t>(decode.v_stride_slot);
  p.v_stride_head = static_cast<uint32_t>(decode.v_stride_head);
  p.row_masks = decode.row_masks;
  p.out = decode.out;
  p.out_stride_query = decode.draft_tokens * decode.out_stride_row;
  p.out_stride_head = decode.out_stride_head;
  p.lse = decode.lse;
  p.partials = decode.partials;
  p.partial_lse = decode.partial_lse;
  p.queue = decode.queue;
  p.first_units = has_first_units(decode.launch) ? decode.first_units : nullptr;
  p.num_q_heads = decode.draft_tokens * decode.num_q_heads;
  p.float_partials = decode.partial_bytes == 4;
  p.v_scale = decode.v_scale;
  p.sinks = decode.sinks;
  set_scheduling(p, decode.num_rows, decode.num_q_heads, decode.num_kv_heads, decode.draft_tokens);
  if (decode.draft_tokens > 1) {
    const int head_group = p.head_group;
    p.masked_tokens = decode.draft_tokens - 1;
    p.draft_masks = decode.draft_masks;
    p.head_group_magic = row_magic(head_group);
    p.heads_between = decode.num_q_heads - head_group;
    p.bytes_between = decode.q_stride_row - head_group * decode.q_stride_head;
  }
  p.exp_scale = 1.0f;
  const float scale = decode.scale * decode.k_scale;
  if (decode.logit_cap > 0.0f) {
    p.logits = kCapped;
    p.pre_scale = 2.0f * kLog2E * scale / decode.logit_cap;
    p.cap = decode.logit_cap * kLog2E;
  } else if (scale > 0.0f) {
    p.logits = kPlain;
    p.exp_scale = scale * kLog2E;
  } else {  // no positive scale: the greatest q . k is not the greatest logit
    p.logits = kScaled;
    p.pre_scale = scale * kLog2E;
  }
  return p;
}

void launch_any(const ForwardParams& params, const DecodeParams& decode, cudaStream_t stream) {
  with_head_dim(decode.head_dim, [&](auto dim) {
    auto* launch =
        decode.kv_type == KVDType::kE4M3 ? launch_forward<dim, true> : launch_forward<dim, false>;
    launch(params, decode.type, decode.launch == Launch::kStreams, stream);
  });
}

// One launch per row tile, the first one on `stream` and the others beside it.
void launch_streams(ForwardParams params, const DecodeParams& decode, cudaStream_t stream) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const auto& forks = of_device<Forks>();
  check(cudaEventRecord(forks.forked, stream), "cudaEventRecord");
  for (size_t i = 0; i < kRowTiles.size(); ++i) {
    params.min_row_tile = i == 0 ? 0 : kRowTiles[i - 1] + 1;
    params.max_row_tile = kRowTiles[i];
    params.queue = decode.queue + i * (kQueueInts / kRowTiles.size());
    if (i == 0) {
      launch_any(params, decode, stream);
      continue;
    }
    auto* side = forks.streams[i - 1];
    check(cudaStreamWaitEvent(side, forks.forked), "cudaStreamWaitEvent");
    launch_any(params, decode, side);
    check(cudaEventRecord(forks.joined[i - 1], side), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, forks.joined[i - 1]), "cudaStreamWaitEvent");
  }
}

void check_drafts(const DecodeParams& a) {
  const int max_rows = a.head_dim == mla::kHeadDim ? mla::kMaxRows : kMaxQueryRows;
  const int most = max_rows / (a.num_q_heads / a.num_kv_heads);
  PAT_CHECK(a.draft_tokens >= 1 && a.draft_tokens <= most, "draft_tokens is ", a.draft_tokens,
            ": with ", a.num_q_heads, " query heads on ", a.num_kv_heads,
            " KV heads it must be from 1 to ", most);
  if (a.draft_tokens == 1) return;
  PAT_CHECK(a.logit_cap <= 0.0f && a.scale > 0.0f, "scale is ", a.scale, " and logit_cap ",
            a.logit_cap, ": with draft tokens the scale must be more than 0 and the cap 0 (off)");
  PAT_CHECK(a.out_stride_row == a.num_q_heads * a.out_stride_head, "out has rows ",
            a.out_stride_row, " bytes apart for ", a.num_q_heads, " heads ", a.out_stride_head,
            " bytes apart: with draft tokens it must be contiguous");
}

}  // namespace

void set_scheduling(ForwardParams& params, int num_rows, int num_q_heads, int num_kv_heads,
                    int draft_tokens) {
  params.num_rows = num_rows;
  params.num_kv_heads = num_kv_heads;
  params.head_group = num_q_heads / num_kv_heads;
  params.group = draft_tokens * params.head_group;
  params.group_magic = row_magic(params.group);
  params.kv_heads_magic = divisor_magic(num_kv_heads);
  params.grid_magic = divisor_magic(current_device().num_sms);
  params.max_row_tile = std::numeric_limits<int>::max();
}

int min_shared_bytes(int head_dim) {
  if (head_dim == mla::kHeadDim) return mla::kMinSharedBytes;
  return with_head_dim(head_dim, [](auto dim) { return kMinSharedBytes<dim>; });
}

// What sglang_pat/ops.py leaves: it has looked at pointers, dtypes, shapes and K/V scales.
void check_decode(const DecodeParams& a) {
  min_shared_bytes(a.head_dim);
  if (a.head_dim == mla::kHeadDim) mla::check_decode(a);
  const int max_group = a.head_dim == mla::kHeadDim ? mla::kMaxRows : kMaxGroup;
  PAT_CHECK(a.num_kv_heads >= 1 && a.num_q_heads >= 1 && a.num_q_heads % a.num_kv_heads == 0 &&
                a.num_q_heads / a.num_kv_heads <= max_group,
            a.num_q_heads, " query heads on ", a.num_kv_heads,
            " KV heads: the ratio must be a whole number from 1 to ", max_group);
  check_drafts(a);
  PAT_CHECK(a.logit_cap >= 0.0f && std::isfinite(a.logit_cap) && std::isfinite(a.scale),
            "scale is ", a.scale, " and logit_cap ", a.logit_cap,
            ", both must be finite and the cap 0 (off) or more");
  const int64_t max_stride = std::numeric_limits<uint32_t>::max();
  const int bytes = kv_bytes(a.kv_type);
  const auto check_strides = [&](const char* what, int64_t of_k, int64_t of_v) {
    PAT_CHECK(std::max(of_k, of_v) <= max_stride, what, " of k_cache and v_cache are ",
              of_k / bytes, " and ", of_v / bytes, " elements apart, at most ", max_stride / bytes,
              " fit");
  };
  check_strides("slots", a.k_stride_slot, a.v_stride_slot);
  if (a.num_kv_heads > 1) check_strides("heads", a.k_stride_head, a.v_stride_head);
}

void decode_cuda(const DecodeParams& decode, void* stream_handle) {
  check_decode(decode);
  if (decode.num_rows == 0) return;
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  const ForwardParams params = forward_params(decode);
  if (decode.head_dim == mla::kHeadDim) {
    mla::launch_forward(params, decode, stream);
  } else if (decode.launch == Launch::kStreams) {
    launch_streams(params, decode, stream);
  } else {
    launch_any(params, decode, stream);
  }
  // To the merge, as to the forward, the heads of a query's draft tokens are heads of the query.
  DecodeParams queries = decode;
  queries.num_q_heads *= decode.draft_tokens;
  queries.out_stride_row *= decode.draft_tokens;
  // With kStreams the merge waits for several kernels, so it cannot start while the last one
  // drains.
  if (decode.head_dim == mla::kHeadDim) {
    mla::launch_merge(queries, stream);
  } else {
    launch_merge(queries, decode.launch != Launch::kStreams, stream);
  }
}

}  // namespace pat
