// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime as exceptions, and what a launch needs to know of the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace pat {

// Throws std::runtime_error that names what was done and the error.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next to ask, torch for one, takes it for its own
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

template <typename... Args>
[[noreturn]] void throw_invalid(const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof(text), format, args...);
  throw std::invalid_argument(text);
}

struct Device {
  int num_sms;
  int arch;                                              // 10 * major + minor
  int shared_per_block, shared_per_sm, shared_reserved;  // bytes
};

// The calling thread's current device.
const Device& current_device();

}  // namespace pat
