// SPDX-License-Identifier: Apache-2.0
// Python's view of the CUDA executor.
#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "bindings/bindings.h"
#include "check.h"
#include "cuda/params.h"
#include "cuda/staging.h"
#include "pack/target.h"
#include "plan_view.h"

namespace py = pybind11;
using namespace py::literals;

namespace pat {
namespace {

// (address, row stride in elements, elements of a row)
using Table = std::array<int64_t, 3>;
// (address, bytes of an element)
using Vector = std::array<int64_t, 2>;

Buffers make_buffers(int64_t plan, int64_t row_masks, int64_t partials, int64_t partial_lse,
                     int64_t queue, int64_t first_units, int partial_bytes, int launch,
                     int64_t draft_masks, const Target& target) {
  return {
      .plan = pointer<PlanHeader>(plan),
      .row_masks = pointer<uint16_t>(row_masks),
      .draft_masks = pointer<const uint64_t>(draft_masks),
      .partials = pointer<char>(partials),
      .partial_lse = pointer<float>(partial_lse),
      .queue = pointer<int32_t>(queue),
      .first_units = pointer<FirstUnit>(first_units),
      .partial_bytes = partial_bytes,
      .num_q_heads = target.num_q_heads,
      .num_kv_heads = target.num_kv_heads,
      .head_dim = target.head_dim,
      .draft_tokens = target.draft_tokens,
      .launch = static_cast<Launch>(launch),
      .v_head_dim = target.v_head_dim,
  };
}

void decode(const Buffers& buffers, const Tensor3& q, const Tensor3& k_cache,
            const Tensor3& v_cache, const Tensor3& out, int64_t lse, int num_rows, int dtype,
            float scale, float logit_cap, int64_t stream, int kv_dtype, float k_scale,
            float v_scale, int64_t sinks, int sink_dtype, const Tensor3& q_rope) {
  constexpr int64_t kBytes = 2;  // of an element; Python's strides are in elements
  const auto kv_type = static_cast<KVDType>(kv_dtype);
  const int64_t kv = kv_bytes(kv_type);
  DecodeParams params{};
  static_cast<Buffers&>(params) = buffers;
  params.q = pointer<const char>(q[0]);
  params.q_stride_row = kBytes * q[1];
  params.q_stride_head = kBytes * q[2];
  params.k = pointer<const char>(k_cache[0]);
  params.k_stride_slot = kv * k_cache[1];
  params.k_stride_head = kv * k_cache[2];
  params.v = pointer<const char>(v_cache[0]);
  params.v_stride_slot = kv * v_cache[1];
  params.v_stride_head = kv * v_cache[2];
  params.out = pointer<char>(out[0]);
  params.out_stride_row = kBytes * out[1];
  params.out_stride_head = kBytes * out[2];
  params.lse = pointer<float>(lse);
  params.sinks = {pointer<const void>(sinks), static_cast<DType>(sink_dtype), buffers.num_q_heads,
                  divisor_magic(buffers.num_q_heads)};
  params.num_rows = num_rows;
  params.type = static_cast<DType>(dtype);
  params.scale = scale;
  params.logit_cap = logit_cap;
  params.kv_type = kv_type;
  params.k_scale = k_scale;
  params.v_scale = v_scale;
  params.q_rope = pointer<const char>(q_rope[0]);
  params.q_rope_stride_row = kBytes * q_rope[1];
  params.q_rope_stride_head = kBytes * q_rope[2];
  py::gil_scoped_release release;
  decode_cuda(params, pointer<void>(stream));
}

void check_arguments(int num_q_heads, int num_kv_heads, int head_dim, int64_t k_stride_slot,
                     int64_t v_stride_slot, float scale, float logit_cap, int kv_dtype,
                     int draft_tokens, int v_head_dim, int dtype) {
  DecodeParams args{};
  args.v_head_dim = v_head_dim > 0 ? v_head_dim : head_dim;
  args.type = static_cast<DType>(dtype);
  args.draft_tokens = draft_tokens;
  args.out_stride_row = 16 * num_q_heads;  // of a contiguous out of 8 columns
  args.out_stride_head = 16;
  args.kv_type = static_cast<KVDType>(kv_dtype);
  args.k_stride_slot = kv_bytes(args.kv_type) * k_stride_slot;
  args.v_stride_slot = kv_bytes(args.kv_type) * v_stride_slot;
  args.num_q_heads = num_q_heads;
  args.num_kv_heads = num_kv_heads;
  args.head_dim = head_dim;
  args.scale = scale;
  args.logit_cap = logit_cap;
  check_decode(args);
}

void snapshot(const Buffers& buffers, const Table& req_to_token, const Vector& rows,
              const Vector& seq_lens, int num_rows, int64_t stream) {
  SnapshotArgs args{};
  static_cast<Buffers&>(args) = buffers;
  args.req_to_token = pointer<const int32_t>(req_to_token[0]);
  args.req_to_token_stride = req_to_token[1];
  args.req_to_token_width = req_to_token[2];
  args.rows = pointer<const void>(rows[0]);
  args.rows_bytes = static_cast<int32_t>(rows[1]);
  args.seq_lens = pointer<const void>(seq_lens[0]);
  args.seq_lens_bytes = static_cast<int32_t>(seq_lens[1]);
  args.num_rows = num_rows;
  py::gil_scoped_release release;
  snapshot_cuda(args, pointer<void>(stream));
}

void read_draft_masks(int64_t cells, int64_t num_cells, const Vector& seq_lens, int num_rows,
                      int draft_tokens, int64_t masks, int64_t stream) {
  const DraftMaskArgs args{
      .cells = pointer<const uint8_t>(cells),
      .num_cells = num_cells,
      .seq_lens = pointer<const void>(seq_lens[0]),
      .seq_lens_bytes = static_cast<int32_t>(seq_lens[1]),
      .num_rows = num_rows,
      .draft_tokens = draft_tokens,
      .masks = pointer<uint64_t>(masks),
  };
  py::gil_scoped_release release;
  draft_masks_cuda(args, pointer<void>(stream));
}

// `made`: (last_token, most_rows) of a Plan of this process, which is taken to be sound.
void check_plan(int64_t plan, int64_t plan_bytes, const Target& target, int64_t max_bytes,
                int max_context, int max_list_tokens,
                const std::optional<std::array<int64_t, 2>>& made) {
  const PlanView view = view_plan(pointer<const void>(plan), plan_bytes);
  const PlanHeader& h = *view.header;
  check_heads(h, "the workspace for", target.num_q_heads, target.num_kv_heads, target.draft_tokens);
  PAT_CHECK(plan_bytes <= max_bytes && h.num_queries <= target.max_queries &&
                h.num_partials <= target.max_partials &&
                h.branch_tokens <= target.max_branch_tokens && h.list_tokens <= max_list_tokens,
            "a plan of ", plan_bytes, " bytes, ", h.num_queries, " queries, ", h.num_partials,
            " partials and ", h.list_tokens, " tokens, ", h.branch_tokens,
            " of them of branches, does not fit a workspace for ", max_bytes, " bytes, ",
            target.max_queries, " queries, ", target.max_partials, " partials and ",
            max_list_tokens, " tokens, ", target.max_branch_tokens,
            " of them of branches: make the workspace for a target of larger max_queries, "
            "max_items, max_partials, max_segments and max_branch_tokens");
  const PlanReach reach = made ? PlanReach{(*made)[0], (*made)[1]} : check_parts(view);
  PAT_CHECK(reach.last_token <= max_context, "an item reads up to token ", reach.last_token,
            ", the workspace is for contexts of ", max_context,
            " tokens: make it for a larger max_context");
  // Beyond this many the kernels' division by the rows of a query is not exact.
  const int64_t most_rows = 65536 / group_of(h);
  PAT_CHECK(reach.most_rows <= most_rows, "an item has ", reach.most_rows, " packed rows, at most ",
            most_rows, " fit: give the target smaller row_tiles");
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_min_shared_bytes", &min_shared_bytes, "head_dim"_a);
  m.def("cuda_probe", &cuda_probe, "device"_a, py::call_guard<py::gil_scoped_release>());
  py::class_<Buffers>(m, "CudaBuffers",
                      "Addresses of a workspace's device memory, and the heads it is for: see\n"
                      "Buffers in params.h. Who made it keeps the memory.")
      .def(py::init(&make_buffers), py::kw_only(), "plan"_a, "row_masks"_a, "partials"_a,
           "partial_lse"_a, "queue"_a, "first_units"_a, "partial_bytes"_a, "launch"_a,
           "draft_masks"_a, "target"_a);
  m.def("check_plan_cuda", &check_plan, "plan"_a, "plan_bytes"_a, "target"_a, "max_bytes"_a,
        "max_context"_a, "max_list_tokens"_a, "made"_a);
  py::class_<PlanStaging>(m, "PlanStaging", "A ring of pinned buffers on the current device.")
      .def(py::init<size_t, int>(), "bytes"_a, "count"_a)
      .def(
          "copy",
          [](PlanStaging& self, int64_t plan, size_t bytes, int64_t device, int64_t list,
             int64_t stream) {
            self.copy(pointer<const void>(plan), bytes, pointer<void>(device),
                      pointer<int32_t>(list), pointer<void>(stream));
          },
          "plan"_a, "bytes"_a, "device"_a, "list"_a, "stream"_a,
          py::call_guard<py::gil_scoped_release>());
  m.def("snapshot_cuda", &snapshot, "buffers"_a, py::kw_only(), "req_to_token"_a, "rows"_a,
        "seq_lens"_a, "num_rows"_a, "stream"_a,
        R"(Fills the list of a workspace's plan on a stream, see params.h.

req_to_token: (address, row stride, tokens of a row) of int32.
rows, seq_lens: (address, bytes of an element: 4 or 8).)");
  m.def("read_draft_masks_cuda", &read_draft_masks, py::kw_only(), "cells"_a, "num_cells"_a,
        "seq_lens"_a, "num_rows"_a, "draft_tokens"_a, "masks"_a, "stream"_a,
        "Writes the masks of draft trees on a stream, see DraftMaskArgs in params.h. seq_lens:\n"
        "(address, bytes of an element: 4 or 8), of address 0 where rows have no cells for them.");
  m.def("check_decode_cuda", &check_arguments, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a,
        "k_stride_slot"_a, "v_stride_slot"_a, "scale"_a, "logit_cap"_a, "kv_dtype"_a = 0,
        "draft_tokens"_a = 1, "v_head_dim"_a = 0, "dtype"_a = 1,
        "Raises the ValueError that decode_cuda would raise for these; needs no device.");
  m.def("decode_cuda", &decode, "buffers"_a, py::kw_only(), "q"_a, "k_cache"_a, "v_cache"_a,
        "out"_a, "lse"_a, "num_rows"_a, "dtype"_a, "scale"_a, "logit_cap"_a, "stream"_a,
        "kv_dtype"_a = 0, "k_scale"_a = 1.0f, "v_scale"_a = 1.0f, "sinks"_a = 0, "sink_dtype"_a = 0,
        "q_rope"_a = Tensor3{},
        R"(Executes the plan of a workspace on a stream, see DecodeParams in params.h.

q, k_cache, v_cache, out, q_rope: (address, stride 0, stride 1), strides in elements.
Raises ValueError for what the kernels do not have, RuntimeError with CUDA's error.)");
}

}  // namespace pat
