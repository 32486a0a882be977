// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode.h"
#include "cuda/error.h"

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
void run_probe(ProbeResult& result, int*& out) {
  int host[2] = {};
  result.arch = current_device().arch;
  check(cudaMalloc(&out, sizeof(host)), "cudaMalloc");
  probe_kernel<<<1, kProbeThreads>>>(out);
  check(cudaGetLastError(), "launch of the probe kernel");
  check(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost), "the probe kernel");
  result.kernel_arch = host[1];
  result.ok = host[0] == kProbeThreads * (kProbeThreads - 1) / 2;
  if (!result.ok) result.error = "the probe kernel summed to " + std::to_string(host[0]);
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

ProbeResult cuda_probe(int device) {
  ProbeResult result{};
  result.device = device;
  cudaDriverGetVersion(&result.driver_version);
  if (result.driver_version == 0) {  // the runtime would call it "insufficient"
    result.error = "no CUDA driver (libcuda.so.1) on this machine";
    return result;
  }
  int previous = -1, *out = nullptr;
  try {
    check(cudaGetDevice(&previous), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
    run_probe(result, out);
  } catch (const std::runtime_error& error) {
    result.error = error.what();
  }
  if (out != nullptr) cudaFree(out);
  if (previous >= 0) cudaSetDevice(previous);
  return result;
}

}  // namespace pat
