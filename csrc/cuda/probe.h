// SPDX-License-Identifier: Apache-2.0
// Does the CUDA path work on this machine? One tiny kernel answers.
#pragma once

#include <string>

namespace pat {

struct ProbeResult {
  bool ok;          // a kernel of ours ran on the device and its result came back right
  int device;       // ordinal that was asked for
  int arch;         // compute capability of the device, 10 * major + minor; 0 if unknown
  int kernel_arch;  // architecture the kernel was compiled for, e.g. 80 or 90; 0 if it did not run
  int driver_version;  // CUDA version of the driver, e.g. 13000; 0 without a driver
  std::string error;   // "" if ok, else the step that failed and CUDA's reason
};

// Runs the probe kernel on `device` and waits for it. Never throws: a machine without a GPU or
// driver is an answer, not an error. Leaves the calling thread's current device as it was.
ProbeResult cuda_probe(int device);

}  // namespace pat
