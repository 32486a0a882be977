// SPDX-License-Identifier: Apache-2.0
// Python's view of the CPU executor.
#include <pybind11/stl.h>

#include <array>
#include <limits>

#include "bindings/args.h"
#include "bindings/bindings.h"
#include "check.h"
#include "cpu/forward.h"

namespace py = pybind11;

namespace pat {
namespace {

// Counts come as 64 bits, so that one that is too large is not cut to one that fits.
int to_int(const char* name, int64_t value) {
  PAT_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), name, " is ", value);
  return static_cast<int>(value);
}

void decode(int64_t plan, int64_t plan_bytes, const Tensor3& q, const Tensor3& k_cache,
            const Tensor3& v_cache, const Tensor3& out, int64_t lse,
            const std::array<int64_t, 4>& req_to_token, int64_t rows, int64_t seq_lens,
            int64_t num_slots, int64_t num_queries, int64_t num_q_heads, int64_t num_kv_heads,
            int64_t head_dim, int64_t v_head_dim, int dtype, int partial_dtype, float scale,
            float logit_cap, int num_threads, int64_t draft_tokens, int kv_dtype, float k_scale,
            float v_scale, int64_t draft_masks) {
  const DecodeArgs args{
      .q = pointer<const void>(q[0]),
      .q_stride_row = q[1],
      .q_stride_head = q[2],
      .k_cache = pointer<const void>(k_cache[0]),
      .k_stride_slot = k_cache[1],
      .k_stride_head = k_cache[2],
      .v_cache = pointer<const void>(v_cache[0]),
      .v_stride_slot = v_cache[1],
      .v_stride_head = v_cache[2],
      .num_slots = num_slots,
      .req_to_token = pointer<const int32_t>(req_to_token[0]),
      .table_stride = req_to_token[1],
      .table_rows = req_to_token[2],
      .table_width = req_to_token[3],
      .rows = pointer<const int64_t>(rows),
      .seq_lens = pointer<const int64_t>(seq_lens),
      .out = pointer<void>(out[0]),
      .out_stride_row = out[1],
      .out_stride_head = out[2],
      .lse = pointer<float>(lse),
      .draft_masks = pointer<const uint64_t>(draft_masks),
      .num_queries = to_int("num_queries", num_queries),
      .draft_tokens = to_int("draft_tokens", draft_tokens),
      .num_q_heads = to_int("num_q_heads", num_q_heads),
      .num_kv_heads = to_int("num_kv_heads", num_kv_heads),
      .head_dim = to_int("head_dim", head_dim),
      .v_head_dim = to_int("v_head_dim", v_head_dim),
      .dtype = static_cast<DType>(dtype),
      .kv_dtype = static_cast<KVDType>(kv_dtype),
      .k_scale = k_scale,
      .v_scale = v_scale,
      .scale = scale,
      .logit_cap = logit_cap,
      .partial_dtype = static_cast<DType>(partial_dtype),
      .num_threads = num_threads,
  };
  py::gil_scoped_release release;
  decode_cpu(pointer<const void>(plan), plan_bytes, args);
}

}  // namespace

void bind_cpu(py::module_& m) {
  m.def("decode_cpu", &decode, py::arg("plan"), py::arg("plan_bytes"), py::arg("q"),
        py::arg("k_cache"), py::arg("v_cache"), py::arg("out"), py::arg("lse"),
        py::arg("req_to_token"), py::arg("rows"), py::arg("seq_lens"), py::arg("num_slots"),
        py::arg("num_queries"), py::arg("num_q_heads"), py::arg("num_kv_heads"),
        py::arg("head_dim"), py::arg("v_head_dim"), py::arg("dtype"), py::arg("partial_dtype"),
        py::arg("scale"), py::arg("logit_cap"), py::arg("num_threads"), py::arg("draft_tokens") = 1,
        py::arg("kv_dtype") = 0, py::arg("k_scale") = 1.0f, py::arg("v_scale") = 1.0f,
        py::arg("draft_masks") = 0,
        R"(Executes a plan on CPU memory: forward of all items, merge of the partials.

plan, plan_bytes: address and size of the plan, ``Plan.data_ptr`` and ``Plan.nbytes``.
q, k_cache, v_cache, out: (address, stride 0, stride 1), strides in elements, of
    [num_queries * draft_tokens, num_q_heads, head_dim], [num_slots, num_kv_heads, head_dim],
    [num_slots, num_kv_heads, v_head_dim] and [num_queries * draft_tokens, num_q_heads,
    v_head_dim]; the last dimension contiguous; q and out of ``dtype`` 0 (fp32), 1 (bf16) or 2
    (fp16).
lse: address of fp32 [num_queries * draft_tokens, num_q_heads], base 2, or 0.
req_to_token: (address, row stride, rows, columns) of int32 slot ids.
rows, seq_lens: addresses of int64 [num_queries], rows of req_to_token and lengths in tokens.
draft_tokens: of each query, the last tokens of its sequence (csrc/plan.h); 1 in a decode step.
draft_masks: address of uint64 [num_queries, draft_tokens], or 0: bit j says that the draft token
    attends to draft token j of its query; without them each attends to those before it.
partial_dtype: 0 (fp32) or 1 (bf16).
kv_dtype: of k_cache and v_cache, one of KV_DTYPES: q's, or float8_e4m3fn, of which k_scale and
    v_scale are the factors; for q's both are 1.
logit_cap: 0 = off. num_threads: the result does not depend on it.

Raises ValueError for arguments that make no sense, for a plan that is damaged or was made for
other heads, queries or lengths, and for a slot id outside of the cache. Releases the GIL.)");
}

}  // namespace pat
