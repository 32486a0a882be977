// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "cuda/probe.h"

namespace pat {
namespace {

constexpr int kThreads = 32;

// Lane i adds i across the warp; lane 0 writes the sum and the architecture it was compiled for.
__global__ void probe_kernel(int* out /* [2]: sum of the lane ids, __CUDA_ARCH__ / 10 */) {
#ifdef __CUDA_ARCH__
  int sum = static_cast<int>(threadIdx.x);
  for (int offset = kThreads / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x == 0) {
    out[0] = sum;
    out[1] = __CUDA_ARCH__ / 10;
  }
#endif
}

// The steps of one probe; the first that fails ends it.
class Probe {
 public:
  explicit Probe(int device) { result_.device = device; }

  ProbeResult run() {
    cudaDriverGetVersion(&result_.driver_version);
    if (result_.driver_version == 0) {  // the runtime would call it "insufficient"
      result_.error = "no CUDA driver (libcuda.so.1) on this machine";
      return result_;
    }
    int previous = -1;
    if (!step(cudaGetDevice(&previous), "cudaGetDevice")) return result_;
    launch();
    cudaSetDevice(previous);
    return result_;
  }

 private:
  void launch() {
    int major = 0, minor = 0;
    int* out = nullptr;
    int host[2] = {};
    const auto attribute = [&](int* value, cudaDeviceAttr attr) {
      return step(cudaDeviceGetAttribute(value, attr, result_.device), "cudaDeviceGetAttribute");
    };
    if (!step(cudaSetDevice(result_.device), "cudaSetDevice") ||
        !attribute(&major, cudaDevAttrComputeCapabilityMajor) ||
        !attribute(&minor, cudaDevAttrComputeCapabilityMinor)) {
      return;
    }
    result_.arch = 10 * major + minor;
    if (!step(cudaMalloc(&out, sizeof(host)), "cudaMalloc")) return;
    probe_kernel<<<1, kThreads>>>(out);
    if (step(cudaGetLastError(), "launch of the probe kernel") &&
        step(cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost), "the probe kernel")) {
      result_.kernel_arch = host[1];
      result_.ok = host[0] == kThreads * (kThreads - 1) / 2;
      if (!result_.ok) result_.error = "the probe kernel summed to " + std::to_string(host[0]);
    }
    cudaFree(out);
  }

  bool step(cudaError_t status, const char* name) {
    if (status == cudaSuccess) return true;
    cudaGetLastError();  // clear it: it is reported here, not by whoever asks next
    result_.error = std::string(name) + ": " + cudaGetErrorString(status);
    return false;
  }

  ProbeResult result_{};
};

}  // namespace

ProbeResult cuda_probe(int device) { return Probe(device).run(); }

}  // namespace pat
