// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cuda/error.h"
#include "cuda/staging.h"
#include "plan.h"

namespace pat {

PlanStaging::PlanStaging(size_t bytes, int count) : bytes_(bytes), buffers_(count) {
  try {
    for (Buffer& buffer : buffers_) {
      check(cudaHostAlloc(&buffer.host, bytes, cudaHostAllocDefault), "pinned memory for plans");
      check(cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming),
            "event of a plan's copy");
    }
  } catch (...) {
    release();
    throw;
  }
}

PlanStaging::~PlanStaging() { release(); }

// Errors are of a process that ends: its context, and so the memory, is gone already.
void PlanStaging::release() noexcept {
  for (const Buffer& buffer : buffers_) {
    if (buffer.copied != nullptr) {
      cudaEventSynchronize(buffer.copied);
      cudaEventDestroy(buffer.copied);
    }
    if (buffer.host != nullptr) cudaFreeHost(buffer.host);
  }
}

void PlanStaging::copy(const void* plan, size_t bytes, void* device, int32_t* list, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (bytes < sizeof(PlanHeader) || bytes > bytes_) {
    throw_invalid("a plan of %zu bytes, must have at least %zu and the staging buffers have %zu",
                  bytes, sizeof(PlanHeader), bytes_);
  }
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(s, &status), "state of the stream that a plan is copied on");
  if (status != cudaStreamCaptureStatusNone) {
    throw_invalid("load() while a CUDA graph is captured: load the plan before");
  }
  const Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  check(cudaEventSynchronize(buffer.copied), "wait for an earlier plan's copy");
  std::memcpy(buffer.host, plan, bytes);
  auto* header = static_cast<PlanHeader*>(buffer.host);
  header->list = list;
  header->first_units = 0;  // this plan's are written down by its snapshot
  check(cudaMemcpyAsync(device, buffer.host, bytes, cudaMemcpyHostToDevice, s), "copy of a plan");
  check(cudaEventRecord(buffer.copied, s), "event of a plan's copy");
}

}  // namespace pat
