// SPDX-License-Identifier: Apache-2.0
// The extension module sglang_pat._C: what Python has to know of the executors' limits, tiles and
// options, exported once, from the sources that define them, in builds without CUDA too; and the
// CPU executor.
#include <pybind11/stl.h>

#include <array>
#include <sstream>
#include <string>

#include "bindings/bindings.h"
#include "cpu/forward.h"
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

Strided strided(const Tensor3& tensor) { return {pointer<void>(tensor[0]), tensor[1], tensor[2]}; }

void decode(int64_t plan, int64_t plan_bytes, const Tensor3& q, const Tensor3& k_cache,
            const Tensor3& v_cache, const Tensor3& out, int64_t lse,
            const std::array<int64_t, 4>& req_to_token, int64_t rows, int64_t seq_lens,
            int64_t num_slots, int num_queries, int num_q_heads, int num_kv_heads, int head_dim,
            int v_head_dim, int dtype, int partial_dtype, float scale, float logit_cap,
            int num_threads, int draft_tokens, int kv_dtype, float k_scale, float v_scale,
            int64_t draft_masks, int64_t sinks, int sink_dtype, const Tensor3& q_rope) {
  const DecodeArgs args{
      .q = strided(q),
      .q_rope = strided(q_rope),
      .k_cache = strided(k_cache),
      .v_cache = strided(v_cache),
      .num_slots = num_slots,
      .req_to_token = pointer<const int32_t>(req_to_token[0]),
      .table_stride = req_to_token[1],
      .table_rows = req_to_token[2],
      .table_width = req_to_token[3],
      .rows = pointer<const int64_t>(rows),
      .seq_lens = pointer<const int64_t>(seq_lens),
      .out = strided(out),
      .lse = pointer<float>(lse),
      .draft_masks = pointer<const uint64_t>(draft_masks),
      .sinks = pointer<const void>(sinks),
      .num_queries = num_queries,
      .draft_tokens = draft_tokens,
      .num_q_heads = num_q_heads,
      .num_kv_heads = num_kv_heads,
      .head_dim = head_dim,
      .v_head_dim = v_head_dim,
      .dtype = static_cast<DType>(dtype),
      .kv_dtype = static_cast<KVDType>(kv_dtype),
      .k_scale = k_scale,
      .v_scale = v_scale,
      .scale = scale,
      .logit_cap = logit_cap,
      .partial_dtype = static_cast<DType>(partial_dtype),
      .sink_dtype = static_cast<DType>(sink_dtype),
      .num_threads = num_threads,
  };
  py::gil_scoped_release release;
  decode_cpu(pointer<const void>(plan), plan_bytes, args);
}

void bind_cpu(py::module_& m) {
  m.def("decode_cpu", &decode, "plan"_a, "plan_bytes"_a, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a,
        "lse"_a, "req_to_token"_a, "rows"_a, "seq_lens"_a, "num_slots"_a, "num_queries"_a,
        "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "dtype"_a,
        "partial_dtype"_a, "scale"_a, "logit_cap"_a, "num_threads"_a, "draft_tokens"_a = 1,
        "kv_dtype"_a = 0, "k_scale"_a = 1.0f, "v_scale"_a = 1.0f, "draft_masks"_a = 0,
        "sinks"_a = 0, "sink_dtype"_a = 0, "q_rope"_a = Tensor3{},
        R"(Executes a plan on CPU memory, see DecodeArgs in cpu/forward.h.

q, q_rope, k_cache, v_cache, out: (address, stride 0, stride 1), strides in elements.
req_to_token: (address, row stride, rows, columns).
Raises ValueError for arguments that make no sense, for a plan that is damaged or was made for
other heads, queries or lengths, and for a slot id outside of the cache. Releases the GIL.)");
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
