// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <vector>

#include "cuda/error.h"

namespace pat {
namespace {

Device query(int id) {
  Device device{};
  int major = 0, minor = 0;
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(value, attribute, id), "cudaDeviceGetAttribute");
  };
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  get(&device.num_sms, cudaDevAttrMultiProcessorCount);
  get(&device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&device.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(&device.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  device.arch = 10 * major + minor;
  return device;
}

}  // namespace

const Device& current_device() {
  static std::mutex mutex;
  static std::vector<Device*> devices;  // never freed: references to them are handed out
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  if (static_cast<size_t>(id) >= devices.size()) devices.resize(id + 1);
  if (!devices[id]) devices[id] = new Device(query(id));
  return *devices[id];
}

}  // namespace pat
