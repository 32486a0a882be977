// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "cuda/decode.h"
#include "cuda/error.h"
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

ForwardParams forward_params(const CudaDecodeArgs& a) {
  ForwardParams p{};
  p.plan = a.plan;
  p.q = static_cast<const char*>(a.q);
  p.q_stride_query = 2 * a.q_stride_query;
  p.q_stride_head = 2 * a.q_stride_head;
  p.k = static_cast<const char*>(a.k_cache);
  p.k_stride_slot = static_cast<uint32_t>(2 * a.k_stride_slot);
  p.k_stride_head = 2 * a.k_stride_head;
  p.v = static_cast<const char*>(a.v_cache);
  p.v_stride_slot = static_cast<uint32_t>(2 * a.v_stride_slot);
  p.v_stride_head = 2 * a.v_stride_head;
  p.row_masks = a.row_masks;
  p.out = static_cast<char*>(a.out);
  p.out_stride_query = 2 * a.out_stride_query;
  p.out_stride_head = 2 * a.out_stride_head;
  p.lse = a.lse;
  p.partials = static_cast<char*>(a.partials);
  p.partial_lse = a.partial_lse;
  p.queue = a.queue;
  p.trace = a.trace;
  p.num_queries = a.num_rows;
  p.num_q_heads = a.num_q_heads;
  p.num_kv_heads = a.num_kv_heads;
  p.group = a.num_q_heads / a.num_kv_heads;
  p.group_magic = (65536 + p.group - 1) / p.group;
  const uint64_t heads = static_cast<uint64_t>(p.num_kv_heads);
  p.kv_heads_magic =
      heads == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + heads - 1) / heads);
  p.max_row_tile = std::numeric_limits<int>::max();
  p.float_partials = a.partial_bytes == 4;
  if (a.logit_cap > 0.0f) {
    p.logits = kCapped;
    p.pre_scale = 2.0f * kLog2E * a.scale / a.logit_cap;
    p.cap = a.logit_cap * kLog2E;
    p.scale = 1.0f;
  } else if (a.scale > 0.0f) {
    p.logits = kPlain;
    p.scale = a.scale * kLog2E;
  } else {  // no positive scale: the greatest q . k is not the greatest logit
    p.logits = kScaled;
    p.pre_scale = a.scale * kLog2E;
    p.scale = 1.0f;
  }
  return p;
}

void launch_forward(const ForwardParams& params, const CudaDecodeArgs& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return launch_forward_64(params, a.type, stream);
    case 128:
      return launch_forward_128(params, a.type, stream);
    default:
      return launch_forward_256(params, a.type, stream);
  }
}

// One launch per row tile. If forks is null, all are on `stream`.
void launch_by_tile(ForwardParams params, const CudaDecodeArgs& a, const Forks* forks,
                    cudaStream_t stream) {
  for (size_t i = 0; i < kRowTiles.size(); ++i) {
    params.min_row_tile = i == 0 ? 0 : kRowTiles[i - 1] + 1;
    params.max_row_tile = kRowTiles[i];
    params.queue = a.queue + i * (kQueueInts / kRowTiles.size());
    launch_forward(params, a, forks && i > 0 ? forks->streams[i - 1] : stream);
  }
}

void launch_streams(const ForwardParams& params, const CudaDecodeArgs& a, cudaStream_t stream) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Forks& forks = forks_of_device();
  check(cudaEventRecord(forks.forked, stream), "cudaEventRecord");
  for (auto* s : forks.streams) check(cudaStreamWaitEvent(s, forks.forked), "cudaStreamWaitEvent");
  launch_by_tile(params, a, &forks, stream);
  for (size_t i = 0; i < forks.streams.size(); ++i) {
    check(cudaEventRecord(forks.joined[i], forks.streams[i]), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, forks.joined[i]), "cudaStreamWaitEvent");
  }
}

}  // namespace

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

void check_decode_args(const CudaDecodeArgs& a) {
  min_shared_bytes(a.head_dim);
  if (a.num_kv_heads < 1 || a.num_q_heads < 1 || a.num_q_heads % a.num_kv_heads ||
      a.num_q_heads / a.num_kv_heads > kMaxGroup) {
    throw_invalid("%d query heads on %d KV heads: the ratio must be a whole number from 1 to %d",
                  a.num_q_heads, a.num_kv_heads, kMaxGroup);
  }
  if (a.partial_bytes != 2 && a.partial_bytes != 4) {
    throw_invalid("partial_bytes is %d, must be 2 or 4", a.partial_bytes);
  }
  if (!(a.logit_cap >= 0.0f) || std::isinf(a.logit_cap) || !std::isfinite(a.scale)) {
    throw_invalid("scale is %g and logit_cap %g, both must be finite and the cap 0 (off) or more",
                  a.scale, a.logit_cap);
  }
  const int64_t max_stride = std::numeric_limits<uint32_t>::max() / 2;
  if (a.k_stride_slot > max_stride || a.v_stride_slot > max_stride) {
    throw_invalid("slots of k_cache and v_cache are %lld and %lld elements apart, at most %lld fit",
                  static_cast<long long>(a.k_stride_slot), static_cast<long long>(a.v_stride_slot),
                  static_cast<long long>(max_stride));
  }
}

void decode_cuda(const CudaDecodeArgs& args, void* stream_handle) {
  check_decode_args(args);
  if (args.num_rows == 0) return;
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  const ForwardParams params = forward_params(args);
  switch (args.launch) {
    case Launch::kQueue:
      launch_forward(params, args, stream);
      break;
    case Launch::kStreams:
      launch_streams(params, args, stream);
      break;
    case Launch::kSerial:
      launch_by_tile(params, args, nullptr, stream);
      break;
  }
  // With kStreams the merge waits for several kernels, so it cannot start while the last one
  // drains.
  launch_merge(args, args.launch != Launch::kStreams, stream);
}

}  // namespace pat
