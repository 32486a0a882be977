// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "cuda/decode.h"
#include "cuda/error.h"
#include "cuda/first_units.h"
#include "cuda/forward/pipeline.cuh"
#include "cuda/launch.h"

namespace pat {
namespace {

// Streams and events of Launch::kStreams. They are never destroyed, because a captured graph may
// refer to them.
struct Forks {
  std::array<cudaStream_t, kRowTiles.size() - 1> streams;
  std::array<cudaEvent_t, kRowTiles.size() - 1> joined;
  cudaEvent_t forked;
};

Forks& forks_of_device() {  // the caller holds the mutex
  static std::vector<Forks*> all;
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  if (static_cast<size_t>(id) >= all.size()) all.resize(id + 1);
  if (!all[id]) {
    auto* forks = new Forks;
    const auto event = [](cudaEvent_t* e) {
      check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "cudaEventCreate");
    };
    event(&forks->forked);
    for (auto& e : forks->joined) event(&e);
    for (auto& s : forks->streams) {
      check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    all[id] = forks;
  }
  return *all[id];
}

// For divisions of packed rows, of which there are fewer than 65536.
uint32_t row_magic(int divisor) { return static_cast<uint32_t>((65536 + divisor - 1) / divisor); }

ForwardParams forward_params(const DecodeParams& decode) {
  ForwardParams p{
      .plan = decode.plan,
      .q = decode.q,
      .q_stride_query = decode.draft_tokens * decode.q_stride_row,
      .q_stride_head = decode.q_stride_head,
      .k = decode.k,
      .v = decode.v,
      .k_stride_slot = static_cast<uint32_t>(decode.k_stride_slot),  // check_decode() has looked
      .k_stride_head = static_cast<uint32_t>(decode.k_stride_head),
      .v_stride_slot = static_cast<uint32_t>(decode.v_stride_slot),
      .v_stride_head = static_cast<uint32_t>(decode.v_stride_head),
      .row_masks = decode.row_masks,
      .out = decode.out,
      .out_stride_query = decode.draft_tokens * decode.out_stride_row,
      .out_stride_head = decode.out_stride_head,
      .lse = decode.lse,
      .partials = decode.partials,
      .partial_lse = decode.partial_lse,
      .queue = decode.queue,
      .first_units = has_first_units(decode.launch) ? decode.first_units : nullptr,
      .num_q_heads = decode.draft_tokens * decode.num_q_heads,
      .float_partials = decode.partial_bytes == 4,
      .v_scale = decode.v_scale,
  };
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

template <int kHeadDim>
void launch_dim(const ForwardParams& params, const DecodeParams& decode, cudaStream_t stream) {
  const bool fp8 = decode.kv_type == KVType::kE4M3;
  auto* launch = fp8 ? launch_forward<kHeadDim, true> : launch_forward<kHeadDim, false>;
  launch(params, decode.type, decode.launch == Launch::kStreams, stream);
}

void launch_any(const ForwardParams& params, const DecodeParams& decode, cudaStream_t stream) {
  switch (decode.head_dim) {
    case 64:
      return launch_dim<64>(params, decode, stream);
    case 128:
      return launch_dim<128>(params, decode, stream);
    default:  // check_decode() has refused others
      return launch_dim<256>(params, decode, stream);
  }
}

// One launch per row tile, the first one on `stream` and the others beside it.
void launch_streams(ForwardParams params, const DecodeParams& decode, cudaStream_t stream) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Forks& forks = forks_of_device();
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

void check_kv_type(const DecodeParams& a) {
  if (a.kv_type != KVType::kSame && a.kv_type != KVType::kE4M3) {
    throw_invalid("kv_dtype is %d, must be 0 (q's) or 1 (float8_e4m3fn)",
                  static_cast<int>(a.kv_type));
  }
  const bool scaled = a.k_scale != 1.0f || a.v_scale != 1.0f;
  if (scaled && a.kv_type == KVType::kSame) {
    throw_invalid("k_scale is %g and v_scale %g, must be 1 where K and V are of q's dtype",
                  a.k_scale, a.v_scale);
  }
  const auto usable = [](float scale) { return scale > 0.0f && std::isfinite(scale); };
  if (!usable(a.k_scale) || !usable(a.v_scale)) {
    throw_invalid("k_scale is %g and v_scale %g, both must be finite and more than 0", a.k_scale,
                  a.v_scale);
  }
}

void check_drafts(const DecodeParams& a) {
  const int most = kMaxQueryRows / (a.num_q_heads / a.num_kv_heads);
  if (a.draft_tokens < 1 || a.draft_tokens > most) {
    throw_invalid("draft_tokens is %d: with %d query heads on %d KV heads it must be from 1 to %d",
                  a.draft_tokens, a.num_q_heads, a.num_kv_heads, most);
  }
  if (a.draft_tokens > 1 && (a.logit_cap > 0.0f || a.scale <= 0.0f)) {
    throw_invalid(
        "scale is %g and logit_cap %g: with draft tokens the scale must be more than 0 "
        "and the cap 0 (off)",
        a.scale, a.logit_cap);
  }
  if (a.draft_tokens > 1 && a.out_stride_row != a.num_q_heads * a.out_stride_head) {
    throw_invalid(
        "out has rows %lld bytes apart for %d heads %lld bytes apart: with draft tokens "
        "it must be contiguous",
        static_cast<long long>(a.out_stride_row), a.num_q_heads,
        static_cast<long long>(a.out_stride_head));
  }
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
  switch (head_dim) {
    case 64:
      return kMinSharedBytes<64>;
    case 128:
      return kMinSharedBytes<128>;
    case 256:
      return kMinSharedBytes<256>;
    default:
      throw_invalid("head_dim is %d, the CUDA kernels have 64, 128 and 256", head_dim);
  }
}

void check_decode(const DecodeParams& a) {
  min_shared_bytes(a.head_dim);
  if (a.num_kv_heads < 1 || a.num_q_heads < 1 || a.num_q_heads % a.num_kv_heads ||
      a.num_q_heads / a.num_kv_heads > kMaxGroup) {
    throw_invalid("%d query heads on %d KV heads: the ratio must be a whole number from 1 to %d",
                  a.num_q_heads, a.num_kv_heads, kMaxGroup);
  }
  check_drafts(a);
  if (a.partial_bytes != 2 && a.partial_bytes != 4) {
    throw_invalid("partial_bytes is %d, must be 2 or 4", a.partial_bytes);
  }
  if (!(a.logit_cap >= 0.0f) || std::isinf(a.logit_cap) || !std::isfinite(a.scale)) {
    throw_invalid("scale is %g and logit_cap %g, both must be finite and the cap 0 (off) or more",
                  a.scale, a.logit_cap);
  }
  check_kv_type(a);
  const int64_t max_stride = std::numeric_limits<uint32_t>::max();
  const int bytes = kv_bytes(a.kv_type);
  const auto check_strides = [&](const char* what, int64_t of_k, int64_t of_v) {
    if (std::max(of_k, of_v) <= max_stride) return;
    throw_invalid("%s of k_cache and v_cache are %lld and %lld elements apart, at most %lld fit",
                  what, static_cast<long long>(of_k / bytes), static_cast<long long>(of_v / bytes),
                  static_cast<long long>(max_stride / bytes));
  };
  check_strides("slots", a.k_stride_slot, a.v_stride_slot);
  if (a.num_kv_heads > 1) check_strides("heads", a.k_stride_head, a.v_stride_head);
}

void decode_cuda(const DecodeParams& decode, void* stream_handle) {
  check_decode(decode);
  if (decode.num_rows == 0) return;
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  const ForwardParams params = forward_params(decode);
  if (decode.launch == Launch::kStreams) {
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
  launch_merge(queries, decode.launch != Launch::kStreams, stream);
}

}  // namespace pat
