// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as exceptions, and what a launch needs to know of the device.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace pat {

// Throws std::runtime_error that names what was done and the error.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next to ask, torch for one, takes it for its own
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

// The T of the calling thread's current device: T(its number), made at the first call and never
// freed.
template <typename T>
T& of_device() {
  static std::mutex mutex;
  static std::vector<T*> all;
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  if (static_cast<size_t>(id) >= all.size()) all.resize(id + 1);
  if (!all[id]) all[id] = new T(id);
  return *all[id];
}

struct Device {
  explicit Device(int id);

  int num_sms;
  int arch;                                              // 10 * major + minor
  int shared_per_block, shared_per_sm, shared_reserved;  // bytes
};

inline const Device& current_device() { return of_device<Device>(); }

}  // namespace pat
