// SPDX-License-Identifier: Apache-2.0
// The extension module sglang_pat._C.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "sglang_pat: pack tree, schedule and executors. Pointers and streams are plain integers.";
  pat::bind_limits(m);
  pat::bind_pack(m);
  pat::bind_cpu(m);
#ifdef PAT_CUDA
  pat::bind_cuda(m);
#endif
}
