// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "check.h"
#include "cuda/error.h"
#include "cuda/staging.h"
#include "plan.h"

namespace pat {

PlanStaging::PlanStaging(size_t bytes, int count) : buffers_(count) {
  free_retired();
  try {
    for (Buffer& buffer : buffers_) {
      check(cudaHostAlloc(&buffer.host, bytes, cudaHostAllocDefault), "pinned memory for plans");
      check(cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming),
            "event of a plan's copy");
    }
  } catch (...) {
    retire();
    throw;
  }
}

PlanStaging::~PlanStaging() { retire(); }

// Python may collect a staging at any time, also while a graph is captured. Waiting for an event or
// freeing pinned memory then would invalidate the capture, so that is left to the next staging's
// constructor, which allocates and so cannot run in a capture either. The GIL guards the list.
std::list<PlanStaging::Buffer>& PlanStaging::retired() {
  static auto* retired = new std::list<Buffer>;  // never freed: stagings outlive static objects
  return *retired;
}

// Errors are of a process that ends: its context, and so the memory, is gone already.
void PlanStaging::free_retired() noexcept {
  for (const Buffer& buffer : retired()) {
    if (buffer.copied != nullptr) {
      cudaEventSynchronize(buffer.copied);
      cudaEventDestroy(buffer.copied);
    }
    if (buffer.host != nullptr) cudaFreeHost(buffer.host);
  }
  retired().clear();
}

void PlanStaging::copy(const void* plan, size_t bytes, void* device, int32_t* list, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(s, &status), "state of the stream that a plan is copied on");
  PAT_CHECK(status == cudaStreamCaptureStatusNone,
            "load() while a CUDA graph is captured: load the plan before");
  buffers_.splice(buffers_.end(), buffers_, buffers_.begin());  // the oldest copy's is next
  const Buffer& buffer = buffers_.back();
  check(cudaEventSynchronize(buffer.copied), "wait for an earlier plan's copy");
  std::memcpy(buffer.host, plan, bytes);
  auto* header = static_cast<PlanHeader*>(buffer.host);
  header->list = list;
  header->first_units = 0;  // this plan's are written down by its snapshot
  check(cudaMemcpyAsync(device, buffer.host, bytes, cudaMemcpyHostToDevice, s), "copy of a plan");
  check(cudaEventRecord(buffer.copied, s), "event of a plan's copy");
}

}  // namespace pat
