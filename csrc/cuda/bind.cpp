// SPDX-License-Identifier: Apache-2.0
#include "cuda/bind.h"

#include "cuda/probe.h"

namespace py = pybind11;

namespace pat {

void bind_cuda(py::module_& m) {
  m.def(
      "cuda_probe",
      [](int device) {
        ProbeResult r;
        {
          py::gil_scoped_release release;  // the first CUDA call may take seconds
          r = cuda_probe(device);
        }
        py::dict d;
        d["ok"] = r.ok;
        d["device"] = r.device;
        d["arch"] = r.arch;
        d["kernel_arch"] = r.kernel_arch;
        d["driver_version"] = r.driver_version;
        d["error"] = r.error;
        return d;
      },
      py::arg("device") = 0,
      "Run a tiny kernel of this module on a CUDA device.\n\n"
      "Returns a dict: ok, device, arch (10 * major + minor), kernel_arch (what the kernel was\n"
      "compiled for), driver_version (0 without a driver), error (\"\" if ok). Never raises.");
}

}  // namespace pat
