// SPDX-License-Identifier: Apache-2.0
// What Python has to know of the executors' limits, tiles and options: exported once, from the
// sources that define them. Present in builds without CUDA too.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

#include "bindings/bindings.h"
#include "cpu/forward.h"
#include "cuda/decode.h"
#include "plan.h"

namespace py = pybind11;

#ifndef PAT_CUDA_CODE  // set by CMakeLists.txt in a build with the CUDA kernels
#define PAT_CUDA_CODE ""
#endif

namespace pat {
namespace {

// The sources have these as cases of a switch (cuda) and local to a check (cpu/plan_check.cpp);
// tests/core/test_exported_limits.py compares them with what the executors take.
constexpr int kCudaHeadDims[] = {64, 128, 256};
constexpr int kCpuHeadDimStep = 8;
constexpr int kCpuMaxHeadDim = 512;

py::tuple head_dims() {
  py::list dims;
  for (const int dim : kCudaHeadDims) dims.append(dim);
  return py::tuple(dims);
}

// Names as in SGLANG_PAT_LAUNCH.
py::dict launches() {
  py::dict values;
  values["queue"] = static_cast<int>(Launch::kQueue);
  values["streams"] = static_cast<int>(Launch::kStreams);
  return values;
}

// Names as torch has them. Both executors use one numbering.
py::dict dtypes() {
  static_assert(static_cast<int>(CudaType::kBF16) == static_cast<int>(DType::kBF16));
  static_assert(static_cast<int>(CudaType::kF16) == static_cast<int>(DType::kF16));
  py::dict values;
  values["float32"] = static_cast<int>(DType::kF32);
  values["bfloat16"] = static_cast<int>(DType::kBF16);
  values["float16"] = static_cast<int>(DType::kF16);
  return values;
}

// Names as torch has them, and "same" for q's dtype. Both executors use one numbering.
py::dict kv_dtypes() {
  static_assert(static_cast<int>(KVType::kSame) == static_cast<int>(KVDType::kSame));
  static_assert(static_cast<int>(KVType::kE4M3) == static_cast<int>(KVDType::kE4M3));
  py::dict values;
  values["same"] = static_cast<int>(KVType::kSame);
  values["float8_e4m3fn"] = static_cast<int>(KVType::kE4M3);
  return values;
}

// What the kernels were compiled to, as nvcc names it: cubins (sm_80) and PTX (compute_100).
py::tuple cuda_code() {
  py::list names;
  std::istringstream words{PAT_CUDA_CODE};
  for (std::string name; words >> name;) names.append(name);
  return py::tuple(names);
}

}  // namespace

void bind_limits(py::module_& m) {
  m.attr("BRANCH") = static_cast<int>(ItemKind::kBranch);  // kind of an item that is a branch
  m.attr("WIDE_ROWS") = kWideRows;       // packed rows beyond which both halves of an SM work
  m.attr("HEAVY_ROWS") = kHeavyRows;     // packed rows beyond which a unit is heavy
  m.attr("BRANCH_ROWS") = kBranchRows;   // packed rows of a branch, at most
  m.attr("CUDA_MAX_GROUP") = kMaxGroup;  // query heads a KV head
  m.attr("CUDA_HEAD_DIMS") = head_dims();
  m.attr("CUDA_CODE") = cuda_code();  // () in a build without CUDA
  m.attr("CPU_HEAD_DIM_STEP") = kCpuHeadDimStep;
  m.attr("CPU_MAX_HEAD_DIM") = kCpuMaxHeadDim;
  m.attr("LAUNCHES") = launches();
  m.attr("DTYPES") = dtypes();
  m.attr("KV_DTYPES") = kv_dtypes();
}

}  // namespace pat
