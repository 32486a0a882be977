// SPDX-License-Identifier: Apache-2.0
// The extension module sglang_pat._C: planner here, executors in cpu/bind.cpp and cuda/bind.cpp.
#include <pybind11/pybind11.h>

#include "cpu/bind.h"
#include "pack/bind.h"
#ifdef PAT_CUDA
#include "cuda/bind.h"
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "sglang_pat: pack tree, schedule and executors. Pointers and streams are plain integers.";
  pat::bind_pack(m);
  pat::bind_cpu(m);
#ifdef PAT_CUDA
  pat::bind_cuda(m);
#endif
}
