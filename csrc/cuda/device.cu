// SPDX-License-Identifier: Apache-2.0
#include "cuda/error.h"
#include "cuda/params.h"

namespace pat {
namespace {

constexpr int kProbeThreads = 32;

// Lane i adds i across the warp; lane 0 writes the sum and the architecture it was compiled for.
__global__ void probe_kernel(int* out /* [2]: sum of the lane ids, __CUDA_ARCH__ / 10 */) {
#ifdef __CUDA_ARCH__
  int sum = static_cast<int>(threadIdx.x);
  for (int offset = kProbeThreads / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x == 0) {
    out[0] = sum;
    out[1] = __CUDA_ARCH__ / 10;
  }
#endif
}

// Runs the probe kernel on the current device. `out`: null; memory that the caller frees.
void run_probe(int*& out) {
  int host[2] = {};
  check(cudaMalloc(&out, sizeof(host)), "cudaMalloc");
  probe_kernel<<<1, kProbeThreads>>>(out);
  check(cudaGetLastError(), "launch of the probe kernel");
  check(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost), "the probe kernel");
  if (host[0] != kProbeThreads * (kProbeThreads - 1) / 2) {
    throw std::runtime_error("the probe kernel summed to " + std::to_string(host[0]));
  }
}

}  // namespace

Device::Device(int id) {
  int major = 0, minor = 0;
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(value, attribute, id), "cudaDeviceGetAttribute");
  };
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  get(&num_sms, cudaDevAttrMultiProcessorCount);
  get(&shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(&shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  arch = 10 * major + minor;
}

std::string cuda_probe(int device) {
  int previous = -1, *out = nullptr;
  std::string error;
  try {
    check(cudaGetDevice(&previous), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
    run_probe(out);
  } catch (const std::runtime_error& failed) {
    error = failed.what();
  }
  if (out != nullptr) cudaFree(out);
  if (previous >= 0) cudaSetDevice(previous);
  return error;
}

}  // namespace pat
