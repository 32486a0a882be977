// SPDX-License-Identifier: Apache-2.0
// Pinned host memory through which plans go to the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>

struct CUevent_st;  // what a cudaEvent_t points to

namespace pat {

// A ring of pinned buffers: a plan may be copied into the next one while copies of plans before it
// are still under way. Made and used on one device. Not thread-safe. Destroying one calls nothing
// of CUDA, so it may happen in a capture; its memory is freed when the next one is made.
class PlanStaging {
 public:
  // Throws std::runtime_error with CUDA's error, as copy does.
  PlanStaging(size_t bytes, int count);
  ~PlanStaging();
  PlanStaging(const PlanStaging&) = delete;
  PlanStaging& operator=(const PlanStaging&) = delete;

  // Copies a plan, of no more bytes than a buffer, to `device` in stream order, with `list` as the
  // device address of its list; the plan may go when this returns. Waits only for the copy of
  // `count` calls ago. Throws std::invalid_argument while the stream is captured: the graph would
  // replay the plan of the capture.
  void copy(const void* plan, size_t bytes, void* device, int32_t* list, void* stream);

 private:
  struct Buffer {
    void* host = nullptr;
    CUevent_st* copied = nullptr;  // the event of its last copy
  };

  static std::list<Buffer>& retired();  // of stagings that are gone
  static void free_retired() noexcept;
  void retire() noexcept { retired().splice(retired().end(), buffers_); }

  std::list<Buffer> buffers_;  // the one that was used last is the last
};

}  // namespace pat
