// SPDX-License-Identifier: Apache-2.0
// What the kernels of MLA have, and launches that throw where a build has none. Addresses, strides
// and that V is a view of K sglang_pat/ops.py has looked at.
#include "check.h"
#include "cuda/mla/launch.h"

namespace pat::mla {

void check_decode(const DecodeParams& a) {
  PAT_CHECK(PAT_MLA,
            "head_dim is 576, and this build has no kernels for it: build with sm_90a "
            "among PAT_ARCHS");
  PAT_CHECK(a.v_head_dim == kVHeadDim, "v_head_dim is ", a.v_head_dim, ", must be ", kVHeadDim,
            " with head_dim 576");
  PAT_CHECK(a.num_kv_heads == 1, "num_kv_heads is ", a.num_kv_heads,
            ", must be 1 with head_dim 576");
  PAT_CHECK(a.type == DType::kBF16,
            "q is not bfloat16, which it must be with head_dim 576: convert it");
  PAT_CHECK(a.kv_type == KVDType::kSame,
            "K and V are float8_e4m3fn, with head_dim 576 they must be bfloat16: keep them so");
  PAT_CHECK(a.logit_cap == 0.0f && a.scale > 0.0f, "scale is ", a.scale, " and logit_cap ",
            a.logit_cap, ": with head_dim 576 the scale must be more than 0 and the cap 0 (off)");
  PAT_CHECK(!a.sinks.values,
            "sinks are given: the kernels for head_dim 576 have none, leave them out or let "
            "another attention run these layers");
  PAT_CHECK(a.launch == Launch::kQueue,
            "launch is not 'queue', which it must be with head_dim 576");
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
