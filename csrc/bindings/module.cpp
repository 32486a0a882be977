// SPDX-License-Identifier: Apache-2.0
// The extension module sglang_pat._C, and what Python has to know of the executors' limits, tiles
// and options: exported once, from the sources that define them, in builds without CUDA too.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

#include "bindings/bindings.h"
#include "cuda/params.h"
#include "dtypes.h"
#include "plan.h"

namespace py = pybind11;
using namespace py::literals;

#ifndef PAT_CUDA_CODE  // set by CMakeLists.txt in a build with the CUDA kernels
#define PAT_CUDA_CODE ""
#endif

namespace pat {
namespace {

// What the kernels were compiled to, as nvcc names it: cubins (sm_80) and PTX (compute_100).
py::tuple cuda_code() {
  py::list names;
  std::istringstream words{PAT_CUDA_CODE};
  for (std::string name; words >> name;) names.append(name);
  return py::tuple(names);
}

void bind_limits(py::module_& m) {
  m.attr("BRANCH") = static_cast<int>(ItemKind::kBranch);  // kind of an item that is a branch
  m.attr("WIDE_ROWS") = kWideRows;         // packed rows beyond which both halves of an SM work
  m.attr("HEAVY_ROWS") = kHeavyRows;       // packed rows beyond which a unit is heavy
  m.attr("BRANCH_ROWS") = kBranchRows;     // packed rows of a branch, at most
  m.attr("CUDA_MAX_GROUP") = kMaxGroup;    // query heads a KV head
  m.attr("CUDA_CODE") = cuda_code();       // () in a build without CUDA
  m.attr("CUDA_QUEUE_INTS") = kQueueInts;  // of CudaBuffers
  m.attr("CUDA_FIRST_UNIT_BYTES") = kFirstUnitBytes;
  // The sources have these as cases of a switch (cuda) and local to a check (cpu/forward.cpp):
  // tests/core/test_exported_limits.py compares them with what the executors take.
  m.attr("CUDA_HEAD_DIMS") = py::make_tuple(64, 128, 256);
  m.attr("CPU_HEAD_DIM_STEP") = 8;
  m.attr("CPU_MAX_HEAD_DIM") = 576;
  // Names as Workspace takes them.
  m.attr("LAUNCHES") = py::dict("queue"_a = static_cast<int>(Launch::kQueue),
                                "streams"_a = static_cast<int>(Launch::kStreams));
  // Names as torch has them, and "same" for q's dtype.
  m.attr("DTYPES") = py::dict("float32"_a = static_cast<int>(DType::kF32),
                              "bfloat16"_a = static_cast<int>(DType::kBF16),
                              "float16"_a = static_cast<int>(DType::kF16));
  m.attr("KV_DTYPES") = py::dict("same"_a = static_cast<int>(KVDType::kSame),
                                 "float8_e4m3fn"_a = static_cast<int>(KVDType::kE4M3));
}

}  // namespace
}  // namespace pat

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
