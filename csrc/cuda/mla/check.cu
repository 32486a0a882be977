// SPDX-License-Identifier: Apache-2.0
// What the kernels of MLA have, and launches that throw where a build has none.
#include "check.h"
#include "cuda/mla/launch.h"

namespace pat::mla {
namespace {

void check_stride(const char* what, int64_t bytes) {
  PAT_CHECK(bytes % 16 == 0, what, " is ", bytes / 2,
            " elements, must be a multiple of 8 with head_dim 576: make the tensor contiguous");
}

void check_address(const char* what, const void* address) {
  PAT_CHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0, what, " begins at address ", address,
            ", must be a multiple of 16 with head_dim 576: copy the tensor");
}

}  // namespace

void check_decode(const DecodeParams& a) {
  PAT_CHECK(PAT_MLA,
            "head_dim is 576, and this build has no kernels for it: build with sm_90a "
            "among PAT_ARCHS");
  PAT_CHECK(a.v_head_dim == kVHeadDim, "v_head_dim is ", a.v_head_dim, ", must be ", kVHeadDim,
            " with head_dim 576");
  PAT_CHECK(a.num_kv_heads == 1, "num_kv_heads is ", a.num_kv_heads,
            ", must be 1 with head_dim 576");
  PAT_CHECK(a.type == DType::kBF16, "dtype is ", static_cast<int>(a.type),
            ", must be 1 (bf16) with head_dim 576: convert q");
  PAT_CHECK(a.kv_type == KVDType::kSame, "kv_dtype is ", static_cast<int>(a.kv_type),
            ", must be 0 (q's) with head_dim 576: keep K and V in bf16");
  PAT_CHECK(a.logit_cap == 0.0f && a.scale > 0.0f, "scale is ", a.scale, " and logit_cap ",
            a.logit_cap, ": with head_dim 576 the scale must be more than 0 and the cap 0 (off)");
  PAT_CHECK(!a.sinks.values,
            "sinks are given: the kernels for head_dim 576 have none, leave them out or let "
            "another attention run these layers");
  PAT_CHECK(a.launch == Launch::kQueue, "launch is ", static_cast<int>(a.launch),
            ", must be 0 (queue) with head_dim 576");
  PAT_CHECK(a.k == a.v && a.k_stride_slot == a.v_stride_slot,
            "k_cache and v_cache differ: with head_dim 576 v_cache must be the first 512 columns "
            "of k_cache");
  PAT_CHECK(!a.q || a.q_rope,
            "q_rope is missing: with head_dim 576 q has 512 columns and q_rope "
            "the other 64");
  check_address("q", a.q);
  check_address("q_rope", a.q_rope);
  check_address("k_cache", a.k);
  check_address("out", a.out);
  check_stride("the row stride of q", a.q_stride_row);
  check_stride("the head stride of q", a.q_stride_head);
  check_stride("the row stride of q_rope", a.q_rope_stride_row);
  check_stride("the head stride of q_rope", a.q_rope_stride_head);
  check_stride("the slot stride of k_cache", a.k_stride_slot);
  check_stride("the row stride of out", a.out_stride_row);
  check_stride("the head stride of out", a.out_stride_head);
}

#if !PAT_MLA
// check_decode() has refused before, or a snapshot is for nothing.
void launch_forward(const ForwardParams&, const DecodeParams& params, cudaStream_t) {
  mla::check_decode(params);
}
void launch_merge(const DecodeParams& params, cudaStream_t) { mla::check_decode(params); }
void launch_first_units(const SnapshotArgs&, cudaStream_t) {}
#endif

}  // namespace pat::mla
